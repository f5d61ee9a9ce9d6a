"""How close the planner's figures come: traced peaks beside the allocator's own, over a seeded sample of small models.

Each cell is traced on `meta` as a plan is, and then run for real, phase by phase: load, one optimizer step, evaluation.
The same code runs both times; what is compared is the planner's count with the events of torch's CPU allocator, to the
byte. The resident memory of the whole life stands beside the plan. What counts as inside: bench/README.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from cells import Cell, sample
from measures import commit, cores, cpu_name, keep, say

HERE = Path(__file__).resolve().parent
KIB, MIB = 1024, 1024 * 1024
RAW_SHARE, RAW_BYTES = 0.01, 64 * KIB  # a traced peak is inside if it is within the larger of these
RESIDENT_SHARE, RESIDENT_BYTES = 0.05, 24 * MIB


def main() -> int:
    """Run the cells one after the other; the summary goes to stdout, or with --json the rows; progress to stderr."""
    asked = _arguments()
    context = _server()
    cells = [cell for cell in sample(asked.cells, asked.seed, cores()) if asked.only in (None, cell.number)]
    stamp = {"cpu": cpu_name(), "commit": commit(), "sample": asked.seed}
    started, rows = time.monotonic(), []
    for cell in cells:
        row = {**stamp, **asdict(cell), "line": cell.line(), **_in_its_own_process(context, cell)}
        rows.append(row)
        say(f"{cell.line()}  {_verdict(row)}")
    print(json.dumps(rows, indent=2) if asked.json else _summary(rows, time.monotonic() - started))
    if asked.keep:
        say(f"kept: {keep(rows, 'plan_accuracy')}")
    return 1 if any("error" in row or _misses(row) for row in rows) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, default=108, help="how many cells (default 108)")
    parser.add_argument("--seed", type=int, default=0, help="which sample (default 0)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this cell of the sample alone")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a summary")
    parser.add_argument("--keep", action="store_true", help="write the rows into bench/results/")
    return parser.parse_args()


def _server() -> ForkServerContext:
    """Return a server of fresh processes that has torch and transformers ready, so that a cell need not load them.

    It does nothing but import: nothing has been computed, and no thread started, when a cell's process leaves it.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cell"])
    return context


def _in_its_own_process(context: ForkServerContext, cell: Cell) -> dict[str, Any]:
    """Return a cell's figures, or its error: whatever goes wrong in there is a result."""
    started = time.monotonic()
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        try:
            row = pool.submit(_measure, cell).result()
        except BrokenProcessPool:
            row = {"error": "its process ended"}
        except Exception as error:  # the row says it, and the bench fails at its end
            row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {**row, "seconds": round(time.monotonic() - started, 1)}


def _measure(cell: Cell) -> dict[str, Any]:
    return importlib.import_module("cell").measure(cell)


def _errors(row: dict[str, Any]) -> dict[str, int]:
    """Return traced less measured, by phase."""
    return {name: phase["traced_bytes"] - phase["measured_bytes"] for name, phase in row["phases"].items()}


def _misses(row: dict[str, Any]) -> list[str]:
    """Name what is outside: phases whose trace is off, phases over the plan."""
    found = []
    for name, phase in row["phases"].items():
        error, measured = phase["traced_bytes"] - phase["measured_bytes"], phase["measured_bytes"]
        if abs(error) > max(RAW_SHARE * measured, RAW_BYTES):
            found.append(f"{name} {error / KIB:+.0f} KiB of {measured / MIB:.1f} MiB at {phase['operation']}")
        if measured > row["planned_bytes"]:
            found.append(f"{name} over the plan")
    if row["resident_bytes"] > row["planned_bytes"]:
        found.append("resident over the plan")
    return found


def _resident_error(row: dict[str, Any]) -> int:
    """Return how far the peak of resident memory went over the plan; below 0, what the plan left unused."""
    return row["resident_bytes"] - row["planned_bytes"]


def _resident_inside(row: dict[str, Any]) -> bool:
    return abs(_resident_error(row)) <= max(RESIDENT_SHARE * row["planned_bytes"], RESIDENT_BYTES)


def _verdict(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"cannot run: {row['error']}"
    told = ", ".join(f"{name} {error / KIB:+.1f}" for name, error in _errors(row).items())
    resident = f"resident {_resident_error(row) / MIB:+.0f} MiB of the plan's {row['planned_bytes'] / MIB:.0f}"
    misses = _misses(row)
    return f"{told} KiB; {resident}" + (f"; OUTSIDE: {'; '.join(misses)}" if misses else "")


def _summary(rows: list[dict[str, Any]], seconds: float) -> str:
    ran = [row for row in rows if "error" not in row]
    lines = [f"{rows[0]['cpu']}; commit {rows[0]['commit']}; sample {rows[0]['sample']}"]
    lines.append(f"{len(rows)} cells in {seconds / 60:.1f} minutes, {len(rows) - len(ran)} could not run")
    lines += [_phase_line(name, ran) for name in ("load", "train", "evaluate") if ran]
    if ran:
        lines.append(_resident_line(ran))
    lines += [f"{row['line']}  {_verdict(row)}" for row in rows if "error" in row or _misses(row)]
    return "\n".join(lines)


def _resident_line(rows: list[dict[str, Any]]) -> str:
    low, high = (pick(rows, key=_resident_error) for pick in (min, max))
    kept = sum(row["resident_bytes"] <= row["planned_bytes"] for row in rows)
    worst = (
        f"{_resident_error(row) / MIB:+.1f} MiB of {row['planned_bytes'] / MIB:.0f} (cell {row['number']})"
        for row in (low, high)
    )
    return (
        f"resident {kept} of {len(rows)} within the plan, {sum(map(_resident_inside, rows))} as near to it as 5 % or "
        f"24 MiB; worst {' and '.join(worst)}"
    )


def _phase_line(name: str, rows: list[dict[str, Any]]) -> str:
    def share(row: dict[str, Any]) -> float:
        return 100 * _errors(row)[name] / row["phases"][name]["measured_bytes"]

    exact = sum(_errors(row)[name] == 0 for row in rows)
    inside = sum(not any(miss.startswith(name) for miss in _misses(row)) for row in rows)
    low, high = (pick(rows, key=share) for pick in (min, max))
    kibs = [_errors(row)[name] / KIB for row in rows]
    return (
        f"{name:<8} {inside} of {len(rows)} inside, {exact} to the byte; "
        f"worst {share(low):+.2f} % (cell {low['number']}) and {share(high):+.2f} % (cell {high['number']}), "
        f"{min(kibs):+.1f} and {max(kibs):+.1f} KiB"
    )


if __name__ == "__main__":
    sys.exit(main())
