"""Answers: the tokens that transformers' own generate() gives, whatever stands beside a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from architectures import real_chain, stock_model
from tiny_models import VOCABULARY, tiny_config
from torch import Tensor
from transformers import PreTrainedModel

from ajusta.engine.chain import Chain
from ajusta.engine.generate import Sampling, _left_padded, _pick, generate, stream
from ajusta.memory.place import RealPlace

CPU = RealPlace("cpu")
KINDS = ["llama", "qwen3", "gpt2", "bloom"]
OTHERS = ["mistral", "gemma2", "opt", "gpt_neox", "falcon", "mpt", "phi3"]
LENGTHS = (12, 1, 7, 3)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY - 3, (length,), generator=generator).tolist() for length in lengths]


def pair(kind: str) -> tuple[PreTrainedModel, Chain]:
    """Return the untouched model and our chain of the same weights; wide weights, so that answers differ.

    In fp32, because stock's eager attention turns rows of padding into NaN in fp64 (its softmax is in fp32 always).
    """
    config = tiny_config(kind, initializer_range=0.1)
    stock = stock_model(config, torch.float32)
    return stock, real_chain(stock, config)


def stocks_answers(
    stock: PreTrainedModel, asked: Sequence[Sequence[int]], new: int, end: int | None = None
) -> list[list[int]]:
    """Return what transformers' own greedy generate() adds to all prompts together, padded on the left."""
    ids, valid = _left_padded(asked)
    settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    out: Tensor = stock.generate(ids, attention_mask=valid.long(), **settings)
    return [row[ids.shape[1] :].tolist() for row in out]


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_greedy_is_transformers_own(kind: str) -> None:
    stock, chain = pair(kind)
    expected = stocks_answers(stock, prompts(), 8)
    found = generate(chain, CPU, prompts(), max_new_tokens=8, end_token_ids=())
    assert found == expected
    assert len({tuple(row) for row in found}) == len(LENGTHS)


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_a_row_alone_answers_the_same(kind: str) -> None:
    _, chain = pair(kind)
    together = generate(chain, CPU, prompts(), max_new_tokens=12, end_token_ids=())
    for prompt, answer in zip(prompts(), together, strict=True):
        assert generate(chain, CPU, [prompt], max_new_tokens=12, end_token_ids=()) == [answer]


def test_an_answer_ends_before_its_end_token_and_the_others_go_on() -> None:
    _, chain = pair("llama")
    whole = generate(chain, CPU, prompts(), max_new_tokens=8, end_token_ids=())
    ends = [whole[0][3], whole[2][5]]
    found = generate(chain, CPU, prompts(), max_new_tokens=8, end_token_ids=ends)
    for cut, full in zip(found, whole, strict=True):
        first = next((i for i, token in enumerate(full) if token in ends), 8)
        assert cut == full[:first]
    assert len(found[0]) <= 3


def test_nothing_is_computed_once_every_row_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    _, chain = pair("llama")
    (answer,) = generate(chain, CPU, [[5, 6, 7]], max_new_tokens=8, end_token_ids=())
    calls = []
    forward = chain.model.forward
    monkeypatch.setattr(chain.model, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    generate(chain, CPU, [[5, 6, 7]], max_new_tokens=8, end_token_ids=[answer[0]])
    assert len(calls) == 1


def test_the_cache_is_used() -> None:
    """R10: one new token a forward pass, and the model's own setting stays."""
    _, chain = pair("llama")
    before = chain.model.config.use_cache
    seen = []
    chain.model.get_input_embeddings().register_forward_hook(lambda m, args, out: seen.append(tuple(args[0].shape)))
    generate(chain, CPU, prompts(), max_new_tokens=4, end_token_ids=())
    assert seen == [(4, 12), (4, 1), (4, 1), (4, 1)]
    assert chain.model.config.use_cache == before


def test_a_seed_repeats_and_another_differs() -> None:
    _, chain = pair("llama")

    def said(seed: int, temperature: float = 1.5, top_p: float = 0.9) -> list[list[int]]:
        sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
        return generate(chain, CPU, prompts(), max_new_tokens=6, end_token_ids=(), sampling=sampling)

    assert said(1) == said(1) != said(2)
    greedy = generate(chain, CPU, prompts(), max_new_tokens=6, end_token_ids=())
    assert said(3, temperature=1e-6, top_p=1.0) == greedy  # cold enough, the likeliest one is all that is left
    assert said(4, temperature=5.0, top_p=0.0) == greedy  # the smallest set that can be picked from is one token


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_at_least_one() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(500, 1)
    picker = torch.Generator().manual_seed(0)

    def kept(top_p: float) -> set[int]:
        return set(_pick(logits, Sampling(temperature=1.0, top_p=top_p), picker).tolist())

    assert kept(0.0) == kept(1e-9) == kept(0.49) == {0}
    assert kept(0.6) == {0, 1}
    assert kept(0.85) == {0, 1, 2}
    assert kept(1.0) == {0, 1, 2, 3}


def test_the_sampled_shares_are_the_models() -> None:
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = 20_000
    drawn = _pick(shares.log().mul(2).repeat(rows, 1), Sampling(temperature=2.0), torch.Generator().manual_seed(0))
    found = torch.bincount(drawn, minlength=4) / rows
    assert float((found - shares).abs().max()) < 5 * 0.5 / rows**0.5  # five standard errors


def test_a_stream_yields_a_token_a_prompt_and_ends() -> None:
    _, chain = pair("gpt2")
    columns = list(stream(chain, CPU, prompts(), max_new_tokens=3, sampling=Sampling()))
    rows = [list(row) for row in zip(*columns, strict=True)]
    assert rows == generate(chain, CPU, prompts(), max_new_tokens=3, end_token_ids=())
