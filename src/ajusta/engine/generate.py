"""Answer: several prompts side by side, a key/value cache, greedy or sampled.

Prompts of different lengths are padded on the left, so that new tokens stand in one column; attention is told which
keys are real (blocks/attention.py, `Generation`) and positions count real tokens only, so a row's answer does not
depend on its neighbours.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ajusta.blocks.attention import Generation, using
from ajusta.engine.chain import Chain
from ajusta.memory.place import Place


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the likeliest one."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def generate(
    chain: Chain,
    place: Place,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_token_ids: Sequence[int],
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, up to `max_new_tokens`, without the end token that closed the answer."""
    answers: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    ends = set(end_token_ids)
    for column in stream(chain, place, prompts, max_new_tokens=max_new_tokens, sampling=sampling or Sampling()):
        for row in sorted(open_rows):
            if column[row] in ends:
                open_rows.discard(row)
            else:
                answers[row].append(column[row])
        if not open_rows:
            break
    return answers


def stream(
    chain: Chain, place: Place, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, sampling: Sampling
) -> Iterator[list[int]]:
    """Yield one new token a prompt at a time; the caller stops when it has enough."""
    assert prompts and all(len(prompt) > 0 for prompt in prompts)
    ids_BK, valid_BK = _left_padded(prompts)
    ids, valid = place.take(ids_BK.numpy()), place.take(valid_BK.numpy())
    cache = new_cache(chain)
    picker = torch.Generator(device="cpu").manual_seed(sampling.seed)
    for _ in range(max_new_tokens):
        logits = next_logits(chain, ids, valid, cache)
        ids = _pick(logits, sampling, picker).to(place.device)[:, None]
        valid = torch.cat((valid, torch.ones_like(ids, dtype=torch.bool)), dim=1)
        yield [int(token) for token in ids[:, 0].tolist()]


@torch.no_grad()
def next_logits(chain: Chain, new_ids_BQ: Tensor, valid_BK: Tensor, cache: Any) -> Tensor:
    """Run the model's own forward on the new tokens; return the logits of the last column, fp32 [B, V]."""
    positions_BK = (valid_BK.cumsum(dim=1) - 1).clamp_(min=0)
    inputs: dict[str, Any] = {"input_ids": new_ids_BQ, "use_cache": True, cache_name(chain): cache}
    if chain.takes_positions:
        inputs["position_ids"] = positions_BK[:, -new_ids_BQ.shape[1] :]
    if chain.needs_mask or not chain.takes_positions:
        inputs["attention_mask"] = valid_BK.to(torch.int64)
    if "logits_to_keep" in inspect.signature(type(chain.model).forward).parameters:
        inputs["logits_to_keep"] = 1
    with using(Generation(valid_BK=valid_BK)):
        logits: Tensor = chain.model(**inputs).logits
    return logits[:, -1].float()


def new_cache(chain: Chain) -> DynamicCache:
    """Return an empty key/value cache for the model."""
    return DynamicCache(config=chain.model.config)


def cache_name(chain: Chain) -> str:
    """Return what this release of transformers calls the cache argument of the model."""
    parameters = inspect.signature(type(chain.model.base_model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    valid = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        valid[row, longest - len(prompt) :] = True
    return ids, valid


def _pick(logits_BV: Tensor, sampling: Sampling, picker: torch.Generator) -> Tensor:
    if sampling.temperature <= 0:
        return logits_BV.argmax(dim=-1).cpu()
    chances = torch.softmax(logits_BV.cpu() / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ordered, order = chances.sort(dim=-1, descending=True)
        behind = ordered.cumsum(dim=-1) - ordered >= max(sampling.top_p, 1e-9)  # never behind the first one
        chances = chances.scatter(-1, order, ordered.masked_fill(behind, 0.0))
    return torch.multinomial(chances, 1, generator=picker)[:, 0]
