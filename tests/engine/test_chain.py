"""A model taken apart is the model: replayed bit for bit, and examples in one row are as if each were alone."""

from __future__ import annotations

import pytest
import torch
from architectures import inputs, judge, last_hidden, real_chain, runs_on_meta, stock_model, to_logits
from tiny_models import VOCABULARY, tiny_config
from transformers import PretrainedConfig
from tuned import ModelSource, examples
from widen import InFp64

from ajusta.blocks.attention import Segments, using
from ajusta.data.pack import lay_out
from ajusta.engine.assemble import assemble
from ajusta.engine.chain import Chain
from ajusta.engine.masks import block_diagonal_mask
from ajusta.engine.probe import probe
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.place import RealPlace

KINDS = ["llama", "qwen3", "gpt2", "bloom", "gemma2", "mistral", "opt", "phi3", "gpt_neox", "falcon", "mpt"]
CPU = RealPlace("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_the_chain_is_the_model(kind: str) -> None:
    verdict = judge(kind)
    assert verdict.straight, verdict.line()
    assert verdict.meta, verdict.line()
    assert verdict.probed and verdict.mixes is None, verdict.line()
    assert verdict.gradient < 1e-5, verdict.line()  # the same operations, cut at the blocks
    assert verdict.stock < 1e-5, verdict.line()  # fp32: another attention kernel


@pytest.mark.parametrize("kind", KINDS)
def test_packed_examples_equal_each_alone_in_the_untouched_model(kind: str) -> None:
    stock = stock_model(tiny_config(kind), torch.float64)
    chain = assemble(
        build_skeleton(stock.config, torch.float64), ModelSource(stock), CPU,
        dtype=torch.float64, bits="none", adapter=None,
    ).chain  # fmt: skip
    made = examples([7, 13, 5])
    row = lay_out(made)
    mask = block_diagonal_mask(row.segment_ends, torch.float64, CPU) if chain.needs_mask else None
    with torch.no_grad(), InFp64(), using(Segments(ends=row.segment_ends)):
        hidden = last_hidden(chain, CPU.take(row.input_ids_T), CPU.take(row.position_ids_T), mask)
        packed = to_logits(chain, hidden)[0]
        alone = [stock(input_ids=torch.from_numpy(e.ids)[None], use_cache=False).logits[0] for e in made]
    expected = torch.cat(alone)
    assert float((packed - expected).abs().max() / expected.abs().max()) < 1e-10


def test_a_mixture_of_experts_replays_and_runs_on_meta_in_bf16() -> None:
    stock = stock_model(tiny_config("mixtral"), torch.bfloat16)
    chain = real_chain(stock, tiny_config("mixtral"))
    ids, positions, mask = inputs(chain, CPU)
    with torch.no_grad():
        own = chain.model(**chain.inputs(ids, positions, mask)).logits
        assert torch.equal(to_logits(chain, last_hidden(chain, ids, positions, mask)), own)
    assert runs_on_meta(tiny_config("mixtral"))


def test_a_second_tensor_is_carried_from_block_to_block() -> None:
    verdict = judge("zaya")
    assert verdict.straight and verdict.gradient < 1e-5, verdict.line()


@pytest.mark.parametrize(
    ("kind", "word"), [("dory", "several times"), ("gemma4_text", "receive what an earlier one made")]
)
def test_what_is_no_straight_chain_stays_whole_and_says_why(kind: str, word: str) -> None:
    verdict = judge(kind)
    assert verdict.path is None and verdict.replayed, verdict.line()
    assert word in verdict.why


def test_a_bare_operation_before_the_head_is_run_by_the_models_own_forward() -> None:
    chain = build_skeleton(tiny_config("minicpm3"), torch.float32).chain
    assert chain.ends_by_forward and chain.logits.scale == 1.0


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "bart", "qwen3_next"])
def test_the_probe_sees_examples_that_would_not_be_alone(kind: str) -> None:
    found = probe(_chain(tiny_config(kind)), CPU, VOCABULARY)
    assert found.replay_equal and not found.isolates
    assert "one example" in found.message


def test_the_probe_takes_a_familys_own_positions_where_they_do_not_start_at_0() -> None:
    chain = _chain(tiny_config("roberta"))
    assert chain.takes_positions
    found = probe(chain, CPU, VOCABULARY)
    assert found.replay_equal and not found.isolates and not chain.takes_positions


def test_the_probe_refuses_a_model_that_remembers_its_last_pass() -> None:
    found = probe(_chain(tiny_config("recurrent_gemma")), CPU, VOCABULARY)
    assert not found.replay_equal
    assert "expected at most" in found.message


def test_the_probe_refuses_a_chain_with_a_block_out_of_place() -> None:
    chain = _chain(tiny_config("llama"))
    chain.blocks[1], chain.blocks[2] = chain.blocks[2], chain.blocks[1]
    assert not probe(chain, CPU, VOCABULARY).replay_equal


def _chain(config: PretrainedConfig) -> Chain:
    return real_chain(stock_model(config), config)
