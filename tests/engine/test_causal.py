"""A model that looks in both directions is refused: by its switch on `meta`, by its values once it is loaded."""

from __future__ import annotations

import pytest
import torch
from architectures import real_chain, stock_model
from tiny_models import VOCABULARY, tiny_config
from torch import Tensor

from ajusta.base.errors import ModelError
from ajusta.engine.probe import probe
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.place import RealPlace

# With an attention interface, without one, and one that does not even run on `meta` to its end.
ENCODERS = ["bert", "roberta", "electra", "xlm-roberta", "megatron-bert", "roformer", "big_bird"]
CPU = RealPlace("cpu")


def seen_from_behind(kind: str, **over: object) -> float:
    """By how much the last token changes the logits of those before it, in the untouched model."""
    stock = stock_model(tiny_config(kind, **over))
    ids = torch.arange(10, 19)
    logits: list[Tensor] = []
    with torch.no_grad():
        for last in (18, 99):
            ids[-1] = last
            logits.append(stock(input_ids=ids[None], use_cache=False).logits[0, :-1])
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_is_refused_by_its_switch_and_taken_with_it_on(kind: str) -> None:
    assert seen_from_behind(kind, is_decoder=False) > 1e-5 > seen_from_behind(kind, is_decoder=True)
    with pytest.raises(ModelError, match="both directions; expected a causal language model") as refused:
        build_skeleton(tiny_config(kind, is_decoder=False), torch.float32)
    assert f"{kind!r} with is_decoder false" in str(refused.value) and "\n" not in str(refused.value)
    assert build_skeleton(tiny_config(kind, is_decoder=True), torch.float32).chain.blocks


def test_an_encoder_that_cannot_be_run_without_bytes_is_refused_too() -> None:
    with pytest.raises(ModelError, match="'xmod' with is_decoder false"):
        build_skeleton(tiny_config("xmod", is_decoder=False), torch.float32)


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt_neox_japanese"])
def test_a_switch_that_nobody_reads_is_no_reason(kind: str) -> None:
    config = tiny_config(kind)
    assert config.is_decoder is False
    assert seen_from_behind(kind) < 1e-6
    assert build_skeleton(config, torch.float32).chain.block_path is not None


def test_what_has_no_switch_is_told_from_its_values() -> None:
    assert seen_from_behind("cpmant") > 1e-2
    config = tiny_config("cpmant")
    found = probe(real_chain(stock_model(config), config), CPU, VOCABULARY)
    assert not found.causal and "a token sees those behind it" in found.message


@pytest.mark.parametrize("kind", ["llama", "mixtral", "mamba", "roberta"])
def test_a_causal_model_is_found_causal(kind: str) -> None:
    config = tiny_config(kind)
    assert probe(real_chain(stock_model(config), config), CPU, VOCABULARY).causal
