"""The checks that want a card: what they count as right, and that they run without one where that is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_plan import CELLS, GOAL, error_share, is_wrong, summary, verdict

BENCH = Path(__file__).parents[2] / "bench"
MIB = 1 << 20
NO_CARD = 77


def row(planned: int, measured: int | None, runs_in_reserved: bool | None = True) -> dict[str, Any]:
    names = ("tensors_bytes", "allocated_bytes", "reserved_bytes")
    stamp = {"card": "a card", "torch": "2", "commit": "abc", "segments": "expandable", "tiny": measured is None}
    return {
        **stamp,
        "number": 0,
        "line": "a cell",
        "planned": dict.fromkeys(names, planned * MIB),
        "measured": {name: None if measured is None else measured * MIB for name in names},
        "runs_in_reserved": runs_in_reserved,
        "seconds": 1.0,
    }


def test_the_error_is_what_was_predicted_beyond_the_measured() -> None:
    assert error_share(row(1030, 1000), "reserved_bytes") == pytest.approx(0.03)
    assert error_share(row(1030, None), "reserved_bytes") is None
    assert error_share({"error": "gone"}, "reserved_bytes") is None


@pytest.mark.parametrize(
    ("cell", "wrong"),
    [
        (row(1000, 1000), False),
        (row(1029, 1000), False),
        (row(1040, 1000), True),  # too much
        (row(999, 1000), True),  # under, by however little
        (row(1010, 1000, runs_in_reserved=False), True),
        (row(1000, None, runs_in_reserved=None), False),
        ({"error": "OutOfMemoryError", "seconds": 1.0}, True),
    ],
)
def test_wrong_is_under_or_far_over_what_is_reserved(cell: dict[str, Any], wrong: bool) -> None:
    assert is_wrong(cell) is wrong
    assert ("WRONG" in verdict(cell) or "FAILED" in verdict(cell)) is wrong


def test_the_summary_scores_reserved_memory() -> None:
    lost = {**row(1010, 1000), "error": "no memory"}
    del lost["measured"]
    told = summary([row(1010, 1000), row(990, 1000), lost], 60.0)
    assert "2 lived" in told and f"1 of 2 within {GOAL:.0%} on reserved" in told


def test_the_cells_are_eight_and_no_two_are_alike() -> None:
    assert len(set(CELLS)) == 8
    assert {cell.bits for cell in CELLS} == {"none", "int8", "nf4"}


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCH / "gpu.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


@pytest.mark.slow
def test_without_a_card_it_says_so_and_leaves() -> None:
    done = run("--plan")
    assert done.returncode == NO_CARD, done.stderr
    assert "no card that torch can use" in done.stderr and not done.stdout


@pytest.mark.slow
def test_a_tiny_cell_is_planned_for_a_card_and_lived_on_the_processor() -> None:
    done = run("--plan", "--tiny", "--only", "0", "--json")
    assert done.returncode == 0, done.stderr
    cell = json.loads(done.stdout)[0]
    assert "error" not in cell
    assert list(cell["measured"]["stages"]) == ["load", "rehearse", "train", "evaluate"]
    assert cell["planned"]["reserved_bytes"] >= cell["planned"]["allocated_bytes"] > cell["planned"]["tensors_bytes"]
    assert cell["measured"]["reserved_bytes"] is None
    # The tensors of a step are the same on either device but for what operations hold inside themselves.
    assert cell["measured"]["tensors_bytes"] == pytest.approx(cell["planned"]["tensors_bytes"], rel=0.05)
