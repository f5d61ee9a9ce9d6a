"""A skeleton filled from a source: the model itself, stored as asked, with adapters that change nothing yet."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from architectures import stock_model, to_logits
from planned import StoredModel, adapter
from tiny_models import tiny_config
from torch import Tensor
from transformers import PreTrainedModel

from ajusta.base.errors import ModelError
from ajusta.blocks.lora import LoraLinear
from ajusta.engine.assemble import Assembled, assemble
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.place import CountingPlace, Place, RealPlace

CPU = RealPlace("cpu")
KINDS = ["llama", "qwen3", "gpt2", "bloom"]


def filled(stock: PreTrainedModel, place: Place = CPU, bits: str = "none", **over: object) -> Assembled:
    settings: dict[str, object] = {"dtype": stock.dtype, "adapter": adapter(), **over}
    skeleton = build_skeleton(stock.config, stock.dtype)
    return assemble(skeleton, StoredModel(stock), place, bits=bits, **settings)  # type: ignore[arg-type]


def logits_of(assembled: Assembled) -> Tensor:
    ids = torch.arange(5, 16)
    with torch.no_grad():
        logits: Tensor = assembled.chain.model(input_ids=ids[None], use_cache=False).logits
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_adapters_change_nothing(kind: str) -> None:
    stock = stock_model(tiny_config(kind))
    assembled = filled(stock)
    expected = stock(input_ids=torch.arange(5, 16)[None], use_cache=False).logits
    found = logits_of(assembled)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5  # fp32, another attention kernel
    assert torch.equal(found, logits_of(filled(stock, adapter=None)))
    assert assembled.adapters.keys() == assembled.linears.keys()
    assert all(p.requires_grad and p.dtype == torch.float32 for p in assembled.parameters())
    trained = {id(p) for p in assembled.parameters()}
    assert not any(p.requires_grad for p in assembled.chain.model.parameters() if id(p) not in trained)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", ["int8", "nf4"])
def test_blocks_are_quantized_and_the_rest_stays_in_float(kind: str, bits: str) -> None:
    stock = stock_model(tiny_config(kind))
    assembled = filled(stock, bits=bits)
    assert {layer.storage.kind for layer in assembled.linears.values()} == {bits}
    names = {
        name.replace(".block.", ".") for name, p in assembled.chain.model.named_parameters() if p.is_floating_point()
    }
    assert {name for name in names if "lora_" not in name and not name.endswith("base.bias")} <= assembled.loose
    expected = stock(input_ids=torch.arange(5, 16)[None], use_cache=False).logits
    error = float((logits_of(assembled) - expected).norm() / expected.norm())
    assert 0 < error < (0.02 if bits == "int8" else 0.2)


def test_only_the_chosen_linears_are_adapted() -> None:
    assembled = filled(stock_model(tiny_config("llama")), adapter=dataclasses.replace(adapter(), targets=("q_proj",)))
    assert len(assembled.adapters) == 4 and len(assembled.linears) == 28
    assert isinstance(assembled.chain.submodule("model.layers.1.self_attn.q_proj"), LoraLinear)
    assert len(assembled.parameters()) == 8


def test_the_seed_fixes_the_start() -> None:
    stock = stock_model(tiny_config("llama"))
    one, same = filled(stock), filled(stock)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    firsts = [layer.lora_A for layer in one.adapters.values()]
    assert len({float(a.flatten()[0].detach()) for a in firsts}) == len(firsts)


def test_tied_weights_stay_one_tensor() -> None:
    model = filled(stock_model(tiny_config("llama", tie_word_embeddings=True))).chain.model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_loading_tells_each_tensor_once() -> None:
    told: list[tuple[int, int]] = []
    stock = stock_model(tiny_config("llama"))
    filled(stock, loaded=lambda done, total: told.append((done, total)))
    total = told[0][1]
    assert [done for done, _ in told] == list(range(1, total + 1))


def test_a_missing_tensor_is_named() -> None:
    stock = stock_model(tiny_config("llama"))
    source = StoredModel(stock)
    source._tensors = {name: t for name, t in source._tensors.items() if "layers.2.mlp.up_proj" not in name}
    skeleton = build_skeleton(stock.config, torch.float32)
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj"):
        assemble(skeleton, source, CPU, dtype=torch.float32, bits="none", adapter=None)


@pytest.mark.parametrize("bits", ["none", "int8", "nf4"])
def test_a_counting_place_gets_the_same_tensors_without_bytes(bits: str) -> None:
    stock = stock_model(tiny_config("llama"))
    real = filled(stock, bits=bits)
    skeleton = build_skeleton(stock.config, torch.float32)
    counted = assemble(skeleton, None, CountingPlace(), dtype=torch.float32, bits=bits, adapter=adapter())
    pairs = zip(real.chain.model.named_parameters(), counted.chain.model.named_parameters(), strict=True)
    assert all((n, p.shape, p.dtype) == (m, q.shape, q.dtype) and q.is_meta for (n, p), (m, q) in pairs)
    pairs = zip(real.chain.model.named_buffers(), counted.chain.model.named_buffers(), strict=True)
    assert all((n, p.shape, p.dtype) == (m, q.shape, q.dtype) and q.is_meta for (n, p), (m, q) in pairs)


def test_the_chain_of_an_assembled_model_is_the_model() -> None:
    assembled = filled(stock_model(tiny_config("gpt2")), bits="nf4")
    chain, ids = assembled.chain, torch.arange(5, 16)
    with torch.no_grad():
        hidden, calls = chain.prelude(ids, torch.arange(11))
        for index, call in enumerate(calls):
            hidden = chain.run_block(index, hidden, call)
        assert torch.equal(to_logits(chain, hidden), logits_of(assembled))
