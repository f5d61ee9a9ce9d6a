"""The time of a step told of a few blocks is that of the whole depth, and that of the real step's operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from architectures import stock_model
from planned import Real, ShapedModel, StoredModel, batches, fullest, subject
from tiny_models import tiny_config

from ajusta.blocks import bitsandbytes_kernels
from ajusta.engine.phases import loss_only, run_step
from ajusta.memory.abridge import in_full
from ajusta.memory.ledger import Ledger, Section
from ajusta.planning import trace as module
from ajusta.planning.trace import Traced
from ajusta.spec.plan import Rung
from ajusta.spec.roofline import Roofline

DEEP = 13
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": DEEP},
    "gpt2": {"num_hidden_layers": DEEP},
    "bloom": {"num_hidden_layers": DEEP},
    "qwen3": {"num_hidden_layers": DEEP},
    "gemma2": {"num_hidden_layers": 2 * DEEP},
    "qwen3_moe": {"num_hidden_layers": DEEP, "mlp_only_layers": [0]},
}
SPEEDS = Roofline(
    matmul_flops={"fp32": 1e9}, thin_flops={"fp32": 3e8}, attention_flops={"fp32": 5e8}, short_flops={"fp32": 1e8},
    bandwidth_bytes_per_s=1e9, per_operation_s=1e-5, fresh_bytes_per_s=1e8, fresh_from_bytes=2048,
    source="made up", measured=False,
)  # fmt: skip


def rung(recompute: int) -> Rung:
    return Rung(recompute_blocks=recompute, micro_tokens=100, loss_chunk=16, peak_bytes=0)


def total(sections: tuple[Section, ...]) -> float:
    return sum(section.seconds for section in sections)


def timed(what: module.Subject, *, shortened: bool = True) -> Traced:
    return Traced(what, shortened=shortened, roofline=SPEEDS)


def deep(kind: str) -> module.Subject:
    config = tiny_config(kind, **FAMILIES[kind])
    return subject(ShapedModel(config, module.torch.float32), "none" if kind == "qwen3_moe" else "nf4")


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=() if kind in ("llama", "qwen3_moe") else pytest.mark.slow) for kind in FAMILIES
])  # fmt: skip
def test_a_short_row_takes_the_time_of_the_whole_depth(kind: str) -> None:
    what = deep(kind)
    short, whole = timed(what), timed(what, shortened=False)
    before = 0.0
    for recompute in (0, 6, short.blocks):
        told, traced = (t.step_sections(batches(100), rung(recompute)) for t in (short, whole))
        assert [(s.name, s.block) for s in told] == [(s.name, s.block) for s in traced]
        assert [s.seconds for s in told] == pytest.approx([s.seconds for s in traced], rel=1e-12)
        assert total(told) > before  # to recompute one block more takes longer
        before = total(told)
    assert short.shortened, "it must not have fallen back to the whole depth"


def test_abridged_loops_take_the_time_of_all_their_turns() -> None:
    what, few = deep("llama"), replace(rung(4), loss_chunk=2)
    abridged = timed(what, shortened=False)
    short = total(abridged.step_sections(batches(100), few))
    with in_full():
        walked = timed(what, shortened=False)
        assert total(walked.step_sections(batches(100), few)) == pytest.approx(short, rel=1e-9)
    assert abridged.operations < walked.operations


@pytest.mark.parametrize("bits", ["none", "int8", "nf4"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_a_trace_takes_the_time_of_the_real_operations(monkeypatch: pytest.MonkeyPatch, kind: str, bits: str) -> None:
    monkeypatch.setattr(bitsandbytes_kernels, "serves", lambda *_: False)  # one road, whatever is faster here
    what = subject(StoredModel(stock_model(tiny_config(kind))), bits)
    traced, real = timed(what), Real(what)
    for recompute in (0, traced.blocks):
        ledger = real.place.ledger = Ledger(roofline=SPEEDS)
        with real.place.counting():
            real._adopt()
            run_step(real.model, real.place, batches(100), rung(recompute), real.optimizer, 0.0, 0)
        ran = [section for section in ledger.cut() if section.name != "start"]
        told = [section for section in traced.step_sections(batches(100), rung(recompute)) if section.name != "start"]
        assert [(s.name, s.block) for s in told] == [(s.name, s.block) for s in ran]
        assert [s.seconds for s in told[:-1]] == pytest.approx([s.seconds for s in ran[:-1]], rel=1e-9)
        # Not traced of the update: the losses that are summed up for the report, in three calls.
        assert 0 < ran[-1].seconds - told[-1].seconds < 3.1 * SPEEDS.per_operation_s


def test_the_loss_alone_takes_less_than_a_step() -> None:
    what = subject(StoredModel(stock_model(tiny_config("llama"))))
    real = Real(what)
    spent = []
    for run in (
        lambda: loss_only(real.model.chain, real.place, fullest(100), 16),
        lambda: run_step(real.model, real.place, (fullest(100),), rung(0), real.optimizer, 0.0, 0),
    ):
        ledger = real.place.ledger = Ledger(roofline=SPEEDS)
        with real.place.counting():
            run()
        spent.append(ledger.seconds)
    assert 0 < 2 * spent[0] < spent[1]


@pytest.mark.parametrize("recompute", [0, 2, 4])
def test_the_time_of_a_step_is_told_of_its_fullest_and_its_leanest_micro_batch(recompute: int) -> None:
    traced = timed(subject(StoredModel(stock_model(tiny_config("llama"))), "nf4"))
    for micro in (batches(1000), batches(60)):  # one, and some of unequal length
        whole = total(traced.step_sections(micro, rung(recompute)))
        assert traced.step_seconds(micro, rung(recompute)) == pytest.approx(whole, rel=0.02)
    assert len(micro) > 3, "or nothing was told"
