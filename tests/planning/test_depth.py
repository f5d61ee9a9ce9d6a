"""A life told of a few blocks is that of the whole depth: to the byte, for every family and every split of policies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from architectures import stock_model
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import Real, ShapedModel, StoredModel, batches, fullest, subject
from tiny_models import tiny_config

from ajusta.memory.abridge import in_full
from ajusta.memory.ledger import Category, Peak, Section
from ajusta.planning import trace as module
from ajusta.planning.depth import proven, shorten
from ajusta.planning.trace import Traced
from ajusta.spec.plan import Rung

DEEP = 13
FAMILIES = {
    "llama": {"num_hidden_layers": DEEP},
    "gpt2": {"num_hidden_layers": DEEP},
    "bloom": {"num_hidden_layers": DEEP},
    "qwen3": {"num_hidden_layers": DEEP},
    "gemma2": {"num_hidden_layers": 2 * DEEP},  # blocks alternate
    "qwen3_moe": {"num_hidden_layers": DEEP, "mlp_only_layers": [0]},  # the first block has no experts
}


def slow_but(*quick: str) -> list[object]:
    """Every family; those that are not named run in the slow lane."""
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES]


def rung(recompute: int) -> Rung:
    return Rung(recompute_blocks=recompute, micro_tokens=100, loss_chunk=16, peak_bytes=0)


def deep(kind: str, bits: str = "none") -> module.Subject:
    config = tiny_config(kind, **FAMILIES[kind])
    return subject(ShapedModel(config, module.torch.float32), bits)


@pytest.mark.parametrize("kind", slow_but("llama", "bloom", "qwen3_moe"))
def test_a_short_row_tells_of_the_whole_depth_to_the_byte(kind: str) -> None:
    what = deep(kind, "nf4" if kind != "qwen3_moe" else "none")
    short, whole = Traced(what), Traced(what, shortened=False)
    assert len(short.model.chain.blocks) < short.blocks == len(whole.model.chain.blocks)
    assert (short.load, short.prepare) == (whole.load, whole.prepare)
    assert (short.parameters, short.adapter_parameters) == (whole.parameters, whole.adapter_parameters)
    for recompute in (0, 1, 5, 6, short.blocks - 1, short.blocks):
        assert short.step(batches(100), rung(recompute)) == whole.step(batches(100), rung(recompute))
    assert short.evaluate(fullest(100), rung(0)) == whole.evaluate(fullest(100), rung(0))
    if kind != "qwen3_moe":
        assert short.answer(3, 20) == whole.answer(3, 20)
    assert short.shortened, "it must not have fallen back to the whole depth"


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_short_row_tells_what_real_tensors_weigh(kind: str) -> None:
    what = subject(StoredModel(stock_model(tiny_config(kind, **FAMILIES[kind]))))
    short, real = Traced(what), Real(what)
    for recompute in (0, 6, short.blocks):
        told, peak = short.step(batches(100), rung(recompute)), real.step(batches(100), rung(recompute))
        assert (told.peak_bytes, told.operation) == (peak.live_bytes, peak.operation)
        assert told.by_category == {str(category): size for category, size in peak.by_category.items()}


def test_three_turns_of_a_loop_weigh_as_much_as_all() -> None:
    what = deep("llama", "nf4")
    long = batches(100)
    few = replace(rung(4), loss_chunk=2)
    abridged = Traced(what, shortened=False)
    short = abridged.step(long, few), abridged.evaluate(fullest(100), few), abridged.load
    with in_full():
        walked = Traced(what, shortened=False)
        assert (walked.step(long, few), walked.evaluate(fullest(100), few), walked.load) == short
    assert abridged.operations < walked.operations


def test_blocks_that_only_look_alike_are_traced_in_the_whole_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    what = deep("gemma2")
    config = replace(what, config=tiny_config("qwen3_moe", num_hidden_layers=DEEP, mlp_only_layers=[4]), source=None)
    honest = Traced(config)
    monkeypatch.setattr(module, "block_kinds", lambda chain, marked, noted: (0,) * len(chain.blocks))
    deceived = Traced(config)
    assert not deceived.shortened
    assert deceived.step(batches(100), rung(3)) == honest.step(batches(100), rung(3))


@given(st.lists(st.integers(0, 2), max_size=40))
@settings(max_examples=200, deadline=None)
def test_every_block_is_told_by_one_of_its_own_kind(row: list[int]) -> None:
    short = shorten(row)
    assert len(short.stands) == len(row) and list(short.kept) == sorted(set(short.kept))
    assert [row[short.kept[position]] for position in short.stands] == row
    assert all(short.stands[number] == position for position, number in enumerate(short.kept))
    assert all(len({row[short.kept[position]] for position in group}) == 1 for group in short.equal)


@pytest.mark.parametrize(
    ("row", "kept"),
    [("a" * 80, 5), ("ab" * 20, 10), ("a" * 40 + "b" * 40, 10), ("aab" * 20, 15), ("abcd", 4), ("a" * 5, 5), ("", 0)],
)
def test_long_runs_are_cut_short(row: str, kept: int) -> None:
    assert len(shorten(row).kept) == kept


def test_units_that_differ_are_no_proof() -> None:
    def section(block: int, size: int) -> Section:
        held = {Category.SAVED: size}
        return Section(
            name="forward",
            block=block,
            begin={},
            peak=Peak(live_bytes=size, operation="mm", by_category=held),
            end=held,
        )

    equal = [section(block, 8) for block in range(5)]
    assert proven(equal, ((1, 2, 3),))
    assert not proven([*equal[:3], section(3, 9), equal[4]], ((1, 2, 3),))
