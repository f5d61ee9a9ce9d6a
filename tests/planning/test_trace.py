"""What is traced on `meta` is what real tensors weigh, for the same rung; the load never holds two copies."""

from __future__ import annotations

import pytest
import torch
from architectures import stock_model
from planned import Real, ShapedModel, StoredModel, batches, fullest, subject
from tiny_models import tiny_config
from transformers import LlamaConfig

from ajusta.blocks.storage import TILE_BYTES
from ajusta.memory.ledger import Peak
from ajusta.planning.trace import Traced
from ajusta.spec.plan import PhasePeak, Rung

MIB = 1 << 20
CHUNK = 16


def rung(recompute: int) -> Rung:
    return Rung(recompute_blocks=recompute, micro_tokens=100, loss_chunk=CHUNK, peak_bytes=0)


def same(traced: PhasePeak, real: Peak) -> None:
    assert traced.peak_bytes == real.live_bytes
    assert traced.by_category == {str(category): size for category, size in real.by_category.items()}
    assert traced.operation == real.operation


@pytest.mark.parametrize("bits", ["none", "int8", "nf4"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_the_traced_peaks_are_the_real_ones_to_the_byte(kind: str, bits: str) -> None:
    what = subject(StoredModel(stock_model(tiny_config(kind))), bits)
    traced, real = Traced(what), Real(what)
    assert traced.blocks == len(real.model.chain.blocks)
    for recompute in (0, 2, traced.blocks):
        same(traced.step(batches(100), rung(recompute)), real.step(batches(100), rung(recompute)))
    same(traced.evaluate(fullest(100), rung(0)), real.evaluate(fullest(100), rung(0)))
    # Not traced: temporaries of the rotary frequencies, which the model computes once it is there, and until the end of
    # the load the 3 KiB of tables beside each NF4 weight.
    unseen = 128 * (kind == "llama") + 3072 * len(real.model.linears) * (bits == "nf4")
    assert 0 <= real.load.live_bytes - traced.load.peak_bytes <= unseen


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_loading_holds_one_tensor_beyond_what_stays(kind: str) -> None:
    source = StoredModel(stock_model(tiny_config(kind)))
    real = Real(subject(source))
    assert real.load.live_bytes <= real.held + max(info.read_bytes for info in source.infos.values())


@pytest.mark.parametrize("bits", ["none", "int8", "nf4"])
def test_loading_a_billion_parameters_holds_one_tensor_beyond_what_stays(bits: str) -> None:
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128_000, tie_word_embeddings=True,
    )  # fmt: skip
    source = ShapedModel(config, torch.bfloat16)
    traced = Traced(subject(source, bits, torch.bfloat16))
    ledger = traced.place.ledger
    assert ledger is not None
    stays = ledger.now - 3 * 4 * traced.adapter_parameters - 8  # gradients and moments came after the load
    largest = max(info.read_bytes for info in source.infos.values())
    assert traced.load.peak_bytes <= stays + largest + (0 if bits == "none" else TILE_BYTES)
    # 4 blocks of 61 million weights, and 262 million in the embeddings that stay in bf16
    weights = 4 * 60_817_408 * {"none": 2.0, "int8": 1.0, "nf4": 0.516}[bits] + 128_000 * 2048 * 2
    assert 1.0 <= (stays - 4 * traced.adapter_parameters) / weights < 1.002


def test_a_step_can_be_traced_again_with_the_same_answer() -> None:
    traced = Traced(subject(StoredModel(stock_model(tiny_config("llama")))))
    first = [traced.step(batches(100), rung(n)).peak_bytes for n in (0, 4, 2)]
    second = [traced.step(batches(100), rung(n)).peak_bytes for n in (0, 4, 2)]
    assert first == second and first[0] > first[2] > first[1]


def test_nothing_is_left_behind_by_a_phase() -> None:
    traced = Traced(subject(StoredModel(stock_model(tiny_config("llama")))))
    ledger = traced.place.ledger
    assert ledger is not None
    before = ledger.now
    traced.step(batches(100), rung(2))
    traced.evaluate(fullest(100), rung(2))
    assert ledger.now == before
