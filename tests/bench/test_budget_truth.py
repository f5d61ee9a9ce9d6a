"""The budget bench: its sample, the fence it puts around a process, what it counts as kept and as broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from budget_truth import data_bytes, is_wrong, put_fence, share_failed, summary, verdict
from cells import BITS, KINDS
from helpers import Gone, Helper, server
from pairs import FAR, LEAST_ROUGH, MOST_OPERATIONS, MOST_ROUGH, NEAR, computes_bf16, sample

BENCH = Path(__file__).parents[2] / "bench"
MIB = 1 << 20


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> ForkServerContext:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # the server adds to it; put back afterwards
    return server("helped", {})


def test_the_sample_is_the_same_every_time_and_a_small_one_begins_a_large_one() -> None:
    pairs = sample(216, 3, 2, ("fp32", "bf16"))
    assert sample(216, 3, 2, ("fp32", "bf16")) == pairs
    assert sample(7, 3, 2, ("fp32", "bf16")) == pairs[:7]
    assert sample(7, 4, 2, ("fp32", "bf16")) != pairs[:7]


def test_half_of_the_budgets_lie_near_the_least_need_on_both_sides() -> None:
    pairs = sample(216, 0, 2, ("fp32",))
    near = [pair.share for pair in pairs if pair.near]
    assert len(near) == 108 and all(abs(share - 1) <= NEAR for share in near)
    assert sum(share < 1 for share in near) == 54
    far = [pair.share for pair in pairs if not pair.near]
    assert all(any(low <= share <= high for low, high in FAR) for share in far)
    assert sum(share < 1 for share in far) == 54


def test_every_kind_and_storage_is_met_equally_often_and_none_is_too_large() -> None:
    pairs = sample(216, 0, 2, ("fp32",))
    met = Counter((pair.cell.kind, pair.cell.bits) for pair in pairs)
    assert met == Counter({(kind, bits): 12 for kind in KINDS for bits in BITS})
    assert {pair.cell.dtype for pair in pairs} == {"fp32"}
    assert all(LEAST_ROUGH <= pair.rough_bytes() <= MOST_ROUGH for pair in pairs)
    assert all(pair.operations() <= MOST_OPERATIONS for pair in pairs)
    # A micro-batch of more examples than a step has would be refused as a setting.
    assert all(pair.micro_batch in ("auto", 1) for pair in pairs)


def test_a_budget_is_a_share() -> None:
    pair = sample(1, 0, 2, ("fp32",))[0]
    assert replace(pair, share=1 + NEAR / 2).near and not replace(pair, share=1 + 2 * NEAR).near


@pytest.mark.parametrize(
    ("flags", "has"), [("fma avx2 avx512_bf16", True), ("amx_bf16", True), ("avx2 avx512f avx512_bf16_not", False)]
)
def test_bf16_is_for_processors_that_have_it(flags: str, has: bool) -> None:
    assert computes_bf16(flags) is has


def test_what_a_pair_says_of_itself_can_be_written_down() -> None:
    row = sample(1, 0, 2, ("fp32",))[0].row()
    assert json.loads(json.dumps(row))["kind"] in KINDS
    assert "policy" not in row


def test_data_bytes_counts_memory_that_is_not_touched() -> None:
    before = data_bytes(os.getpid())
    held = bytearray(64 * MIB)  # zeros, mapped and not yet touched
    assert 64 * MIB <= data_bytes(os.getpid()) - before < 66 * MIB
    del held


@pytest.mark.parametrize(("size", "told"), [(40 * MIB, f"held {40 * MIB}"), (80 * MIB, "refused")])
def test_the_fence_lets_data_grow_by_the_budget_and_no_more(context: ForkServerContext, size: int, told: str) -> None:
    with Helper(context, "helped", "take", size) as helper:
        assert helper.told() == "ready"
        assert put_fence(helper.pid, 60 * MIB) > MIB
        helper.tell("go")
        assert helper.told() == told


def test_a_helper_that_ends_early_is_told_with_its_code(context: ForkServerContext) -> None:
    with Helper(context, "helped", "leave", 5) as helper, pytest.raises(Gone, match="ended with 5") as gone:
        helper.told()
    assert gone.value.code == 5


def test_a_helper_that_takes_too_long_is_ended(context: ForkServerContext) -> None:
    with Helper(context, "helped", "never") as helper, pytest.raises(Gone, match="more than 0 s") as gone:
        helper.told(0.05)
    assert gone.value.code is None


def row(fits: bool, **ran: bool) -> dict[str, Any]:
    runs = {
        name: {"ran": went, "no_memory": not went, "stage": "train", "error": "no memory"} for name, went in ran.items()
    }
    sizes = {"need_bytes": 130 * MIB, "peak_bytes": 80 * MIB, "budget_bytes": 120 * MIB}
    stamp = {"cpu": "a processor", "commit": "abc", "sample": 0, "line": "a pair", "near": True, "seconds": 1.0}
    return {**stamp, **sizes, "fits": fits, "runs": runs}


def test_wrong_is_what_was_said_to_fit_and_did_not_run() -> None:
    assert not is_wrong(row(True, budget=True))
    assert is_wrong(row(True, budget=False))
    assert not is_wrong(row(False, need=True, trace=False))  # a fat plan is no broken promise
    assert is_wrong({"error": "its process ended with 1", "seconds": 1.0})


def test_a_failure_for_another_reason_than_memory_is_wrong_as_well() -> None:
    odd = row(False, need=False, trace=False)
    odd["runs"]["trace"]["no_memory"] = False
    assert is_wrong(odd)
    assert "no memory" in verdict(odd)


def test_the_summary_counts_what_it_is_given() -> None:
    rows = [row(True, budget=True), row(True, budget=False), row(False, need=True, trace=False)]
    rows.append(row(False, need=False, trace=False))
    assert share_failed(rows, "trace") == 1.0 and share_failed(rows, "need") == 0.5
    told = summary(rows, 60.0)
    assert "said to fit: 2, of these 1 ran" in told
    assert "0.95 of the need: 1 of 2 failed, 50%" in told
    assert told.count("WRONG") == 1


@pytest.mark.slow
def test_two_pairs_are_planned_and_lived() -> None:
    """One that is said to fit and one that is not: the first runs, the second cannot in less than its tensors."""
    pairs = sample(12, 0, 2, ("fp32",))
    fitting = next(pair.cell.number for pair in pairs if pair.share > 1.2 and pair.cell.bits == "none")
    lacking = next(pair.cell.number for pair in pairs if pair.share < 0.9 and pair.cell.bits == "none")
    for number, name, ran in ((fitting, "budget", True), (lacking, "trace", False)):
        command = [sys.executable, str(BENCH / "budget_truth.py"), "--pairs", "12", "--only", str(number), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)[0]
        assert told["fits"] is (name == "budget")
        assert told["runs"][name]["ran"] is ran
        assert told["runs"][name]["baseline_bytes"] > 50 * MIB
