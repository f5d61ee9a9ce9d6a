"""The section --plan of gpu.py: runs of 1 to 8 billion weights, planned for a budget, and lived under it as a limit.

Each cell has a process of its own (gpu_life.py), so that one that runs out of memory loses no other's figures. No torch
in here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from typing import Any

from helpers import Gone, Helper

MIB = 1024 * 1024
CELL_S = 110.0
GOAL = 0.03  # reserved memory may be so much less than predicted, and never more


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run to plan for a card of `budget_gib`, and to live under that limit."""

    model: str
    bits: str
    dtype: str
    batch_size: int
    tokens: int  # of each example
    budget_gib: float

    def line(self) -> str:
        """Return the cell as a person reads it."""
        return (
            f"{self.model:<15} {self.bits:<4} {self.dtype} {self.batch_size} x {self.tokens:>4} tokens, "
            f"{self.budget_gib:>4.1f} GiB"
        )


CELLS = (
    Cell(model="llama-3.2-1b", bits="none", dtype="bf16", batch_size=4, tokens=2048, budget_gib=8),
    Cell(model="gpt2-xl", bits="none", dtype="fp32", batch_size=4, tokens=1024, budget_gib=12),
    Cell(model="bloom-1b7", bits="int8", dtype="bf16", batch_size=4, tokens=1024, budget_gib=8),
    Cell(model="gemma-2-2b", bits="none", dtype="bf16", batch_size=2, tokens=2048, budget_gib=12),
    Cell(model="qwen3-4b", bits="int8", dtype="bf16", batch_size=4, tokens=2048, budget_gib=12),
    Cell(model="olmoe-1b-7b", bits="none", dtype="bf16", batch_size=4, tokens=1024, budget_gib=24),
    Cell(model="mistral-7b-v0.3", bits="nf4", dtype="bf16", batch_size=4, tokens=2048, budget_gib=12),
    Cell(model="llama-3.1-8b", bits="none", dtype="bf16", batch_size=4, tokens=4096, budget_gib=24),
)


def tried(context: ForkServerContext, cell: Cell, tiny: bool, patience_s: float) -> dict[str, Any]:
    """Return a cell's figures, or its error."""
    began = time.monotonic()
    if patience_s <= 0:
        return {"error": "not begun: the time for all is over", "seconds": 0.0}
    row: dict[str, Any] = {}
    try:
        with Helper(context, "gpu_life", "plan_cell", cell, tiny) as helper:
            while not row.get("done"):
                row |= helper.told(max(1.0, patience_s - (time.monotonic() - began)))
    except Gone as gone:
        row["error"] = str(gone)
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def error_share(row: dict[str, Any], name: str) -> float | None:
    """Return how much more was predicted than measured, as a share of the measured; None where nothing was."""
    said, took = (row.get(part, {}).get(name) for part in ("planned", "measured"))
    return None if said is None or took is None else said / took - 1


def is_wrong(row: dict[str, Any]) -> bool:
    """Say whether a cell failed, took more than predicted, or much less."""
    if "error" in row or row["runs_in_reserved"] is False:
        return True
    share = error_share(row, "reserved_bytes")
    return share is not None and not 0 <= share <= GOAL


def verdict(row: dict[str, Any]) -> str:
    """Say in a few words how a cell went."""
    if "error" in row:
        return f"FAILED: {row['error']}; {row['seconds']} s"
    told = []
    for name in ("tensors_bytes", "allocated_bytes", "reserved_bytes"):
        said, took, share = row["planned"][name], row["measured"][name], error_share(row, name)
        beside = "no card to ask" if share is None else f"measured {took / MIB:.0f}, {share:+.2%}"
        told.append(f"{name.removesuffix('_bytes')} planned {said / MIB:.0f} MiB ({beside})")
    told.append({True: "runs in what is reserved", False: "DOES NOT RUN in what is reserved"}.get(
        row["runs_in_reserved"], "not held to it"
    ))  # fmt: skip
    return f"{'WRONG ' if is_wrong(row) else ''}{'; '.join(told)}; {row['seconds']} s"


def summary(rows: Sequence[dict[str, Any]], seconds: float) -> str:
    """Return one line a cell and the score."""
    first = rows[0]
    lines = [f"{first['card']}; torch {first['torch']}; commit {first['commit']}; segments {first['segments']}"]
    lines += [f"{row['number']}  {row['line']}  {verdict(row)}" for row in rows]
    shares = [share for row in rows if (share := error_share(row, "reserved_bytes")) is not None]
    lived = sum("error" not in row for row in rows)
    score = f"{sum(0 <= share <= GOAL for share in shares)} of {len(shares)} within {GOAL:.0%} on reserved, never under"
    if first["tiny"]:
        score = "tiny: nothing was measured of a card"
    lines.append(f"{len(rows)} cells in {seconds / 60:.1f} minutes, {lived} lived; {score}")
    return "\n".join(lines)
