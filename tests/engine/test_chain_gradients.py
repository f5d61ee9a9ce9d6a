"""The chain step's gradients against stock transformers + PEFT, for every way of cutting the same six examples."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from tuned import examples, our_gradients, stock_and_config, stock_gradients, tuned, with_peft
from widen import InFp64

from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW
from ajusta.blocks.recompute import Keep, Policy, Recompute
from ajusta.data.pack import lay_out
from ajusta.engine.assemble import Assembled
from ajusta.engine.phases import adopt_model
from ajusta.engine.step import StepPlan, optimizer_step
from ajusta.memory.ledger import Peak
from ajusta.memory.place import CountingPlace, Place, RealPlace
from ajusta.spec.data import MicroBatch

KINDS = ["llama", "qwen3", "gpt2", "bloom"]
LENGTHS = [7, 13, 5, 4, 9, 2]
SPLITS = {
    "one row": [[0, 1, 2, 3, 4, 5]],
    "each alone": [[0], [1], [2], [3], [4], [5]],
    "three rows": [[3, 0], [5, 2, 1], [4]],
}


def batches(split: str) -> list[MicroBatch]:
    made = examples(LENGTHS)
    return [lay_out([made[i] for i in row]) for row in SPLITS[split]]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks for it
@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_gives_stocks_gradient(kind: str) -> None:
    stock, _ = stock_and_config(kind, torch.float64)
    assembled = tuned(stock)
    peft = with_peft(kind, assembled, stock)
    with InFp64():
        expected = stock_gradients(peft, examples(LENGTHS), assembled.adapters)
    ways: list[tuple[str, Policy, int]] = [
        ("one row", Keep(), 1000), ("one row", Recompute(), 3), ("each alone", Keep(), 3),
        ("each alone", Recompute(), 1000), ("three rows", Keep(), 1000), ("three rows", Recompute(), 3),
    ]  # fmt: skip
    for split, policy, chunk in ways:
        with InFp64():
            found = our_gradients(assembled, batches(split), policy, chunk)
        assert _worst(found, expected) < 1e-10, (split, policy.name, chunk)


def _worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of any element in units of the largest element of all."""
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[name] - value).abs().max()) for name, value in expected.items()) / largest


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_recompute_is_bit_equal_to_keep_in_fp32(kind: str, dropout: float) -> None:
    stock, _ = stock_and_config(kind, torch.float32)
    assembled = tuned(stock, dtype=torch.float32, dropout=dropout)
    kept = our_gradients(assembled, batches("three rows"), Keep(), 5, step=3)
    again = our_gradients(assembled, batches("three rows"), Recompute(), 5, step=3)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_does_not_depend_on_the_cut(kind: str) -> None:
    stock, _ = stock_and_config(kind, torch.float64)
    assembled = tuned(stock, dropout=0.3)
    with InFp64():
        one = our_gradients(assembled, batches("one row"), Keep(), step=3)
        plain = our_gradients(tuned(stock), batches("one row"), Keep(), step=3)
        alone = our_gradients(assembled, batches("each alone"), Keep(), step=3)
    assert _worst(alone, one) < 1e-10
    assert _worst(plain, one) > 1e-3  # dropout was on


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_is_near_to_fp64(kind: str) -> None:
    stock, _ = stock_and_config(kind, torch.float32)
    narrow = our_gradients(tuned(stock, dtype=torch.float32), batches("three rows"), Keep())
    with InFp64():
        wide = our_gradients(tuned(stock.double()), batches("three rows"), Keep())
    for name, value in wide.items():
        error = torch.linalg.vector_norm(narrow[name].double() - value) / torch.linalg.vector_norm(value)
        assert float(error) < 1e-5, name


@pytest.mark.parametrize("policy", [Keep(), Recompute()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("bits", ["none", "nf4", "int8"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_the_peak_counted_on_meta_is_the_peak_counted_for_real(kind: str, bits: str, policy: Policy) -> None:
    stock, config = stock_and_config(kind, torch.float32)
    real, counted = RealPlace("cpu"), CountingPlace()
    found = _peak(tuned(stock, real, torch.float32, bits), real, policy)
    planned = _peak(tuned(config, counted, torch.float32, bits), counted, policy)
    assert planned.live_bytes == found.live_bytes, (planned, found)
    assert planned.by_category == found.by_category


def _peak(assembled: Assembled, place: Place, policy: Policy) -> Peak:
    """Count one whole optimizer step, with what the model and the optimizer hold from before."""
    optimizer = FlatAdamW(assembled.parameters(), AdamWSettings(), place)
    plan = StepPlan(policies=(policy,) * len(assembled.chain.blocks), loss_chunk=5)
    with place.counting() as ledger:
        adopt_model(assembled, place)
        ledger.start_over()
        optimizer_step(assembled.chain, place, batches("three rows"), plan, optimizer, 1e-3, 0)
        return ledger.peak
