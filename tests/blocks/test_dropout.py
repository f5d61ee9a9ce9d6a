"""LoRA dropout as a pure function of where a number stands: statistics, and independence of how tokens are grouped."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ajusta.blocks.dropout import DropoutContext, LoraDropout, TokenIds, keep_mask

FEATURES = 256


def ids(step=3, tokens=200, example=7):
    return TokenIds(step=step, example_ids_T=torch.full((tokens,), example), position_ids_T=torch.arange(tokens))


def mask(*, seed=1, layer=0, probability=0.1, tokens=None, features=FEATURES):
    context = DropoutContext(seed=seed, tokens=tokens or ids())
    dropout = LoraDropout(probability=probability, layer=layer, context=context)
    return keep_mask(dropout.row_keys(), features, probability, torch.float64)


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.5, 0.9])
def test_keep_rate(probability):
    kept = mask(probability=probability, tokens=ids(tokens=1000))
    error = math.sqrt(probability * (1 - probability) / kept.numel())
    assert abs(float(kept.mean()) - (1 - probability)) < 5 * error
    for axis in (0, 1):  # no token and no feature is favoured
        rates = kept.mean(axis)
        spread = math.sqrt(probability * (1 - probability) / kept.shape[axis])
        assert float((rates - (1 - probability)).abs().max()) < 5.5 * spread


def correlation(one, other):
    return float(((one - one.mean()) * (other - other.mean())).mean() / (one.std() * other.std()))


NEIGHBOURS = {
    "layer": lambda: (mask(layer=4), mask(layer=5)),
    "layer and step swapped": lambda: (mask(layer=3, tokens=ids(step=4)), mask(layer=4, tokens=ids(step=3))),
    "step": lambda: (mask(tokens=ids(step=1)), mask(tokens=ids(step=2))),
    "seed": lambda: (mask(seed=0), mask(seed=1)),
    "high seed bits": lambda: (mask(seed=5), mask(seed=5 + (1 << 32))),
    "example": lambda: (mask(tokens=ids(example=1)), mask(tokens=ids(example=2))),
    "example far away": lambda: (mask(tokens=ids(example=1)), mask(tokens=ids(example=1 + (1 << 40)))),
    "position": lambda: (mask()[:-1], mask()[1:]),
    "feature": lambda: (mask()[:, :-1], mask()[:, 1:]),
    "position against feature": lambda: (mask(tokens=ids(tokens=FEATURES)), mask(tokens=ids(tokens=FEATURES)).t()),
}


@pytest.mark.parametrize("what", NEIGHBOURS)
def test_neighbours_are_independent(what):
    one, other = NEIGHBOURS[what]()
    assert abs(correlation(one, other)) < 5 / math.sqrt(one.numel())


def test_no_two_tokens_share_a_mask_even_permuted():
    kept = mask(probability=0.5, tokens=ids(tokens=400))
    agreement = (kept - 0.5) @ (kept - 0.5).t() * 4 / FEATURES
    agreement.fill_diagonal_(0)
    assert float(agreement.abs().max()) < 6 / math.sqrt(FEATURES)
    counts = kept.sum(1)
    expected = FEATURES / 4
    assert abs(float(counts.var()) / expected - 1) < 5 * math.sqrt(2 / 400)  # permuted copies would share one count


def test_eight_patterns_of_three_neighbours_are_equally_frequent():
    kept = mask(probability=0.5, tokens=ids(tokens=1000))
    patterns = (kept[:, :-2] * 4 + kept[:, 1:-1] * 2 + kept[:, 2:]).long()
    counts = torch.bincount(patterns.view(-1), minlength=8).double()
    assert float((counts / counts.sum() - 1 / 8).abs().max()) < 5 * math.sqrt(1 / 8 * 7 / 8 / counts.sum())


def test_any_grouping_of_tokens_sees_the_same_mask():
    whole = ids(tokens=90)
    examples = torch.tensor([4] * 40 + [9] * 50)
    positions = torch.cat([torch.arange(40), torch.arange(50)])
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    packed = mask(tokens=TokenIds(step=3, example_ids_T=examples, position_ids_T=positions))
    shuffled = mask(tokens=TokenIds(step=3, example_ids_T=examples[order], position_ids_T=positions[order]))
    assert torch.equal(packed[order], shuffled)
    alone = mask(tokens=TokenIds(step=3, example_ids_T=whole.example_ids_T[:50] * 0 + 9, position_ids_T=positions[40:]))
    assert torch.equal(packed[40:], alone)


def test_the_mask_of_a_run_does_not_change_between_releases():
    """A resumed run must go on with the masks it began with."""
    first = mask(probability=0.5, tokens=ids(tokens=2), features=16)
    assert ["".join(str(int(bit)) for bit in row) for row in first] == GOLDEN


GOLDEN = ["0011110111101110", "1110000111100100"]


def test_a_mask_needs_its_tokens():
    with pytest.raises(AssertionError, match="tokens"):
        LoraDropout(probability=0.1, layer=0, context=DropoutContext(seed=1)).row_keys()


def test_works_on_meta():
    tokens = TokenIds(
        step=1, example_ids_T=torch.empty(5, dtype=torch.int64, device="meta"),
        position_ids_T=torch.empty(5, dtype=torch.int64, device="meta"),
    )  # fmt: skip
    assert mask(tokens=tokens).shape == (5, FEATURES)


def test_masks_differ_pairwise_over_a_small_grid():
    seen = {
        mask(seed=seed, layer=layer, tokens=ids(step=step, tokens=4)).numpy().tobytes()
        for seed, layer, step in itertools.product(range(4), range(4), range(4))
    }
    assert len(seen) == 64
