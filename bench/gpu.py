"""Every check of the project that wants a card, one section each; without a card it says so, and leaves with 77.

    python bench/gpu.py            all sections, under six minutes
    python bench/gpu.py --plan     is what a plan says of a card's memory true?
    python bench/gpu.py --tiny     the same code on tiny shapes and no card: a check of this script, not of a card

It needs torch, transformers and this package: weights are drawn on the spot, in the shapes of known models.
What counts: bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.context import ForkServerContext
from typing import Any

import gpu_plan
from helpers import QUIET, Helper, server
from measures import commit, cpu_name, results_path, say

NO_CARD = 77  # the exit code by which test harnesses know a check that was skipped
WHOLE_S = 350.0
# The plan replays expandable segments. Newer torch reads the first name, older the second.
SEGMENTS = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")


def main() -> int:
    """Run the sections asked for; summaries go to stdout, progress to stderr, rows into bench/results/."""
    asked = _arguments()
    context = server("gpu_life", QUIET | SEGMENTS)
    with Helper(context, "gpu_life", "tell_card") as helper:
        found = helper.told()
    if found["card"] is None and not asked.tiny:
        say("no card that torch can use; expected one with CUDA; --tiny checks this script on the processor")
        return NO_CARD
    stamp = {
        "card": cpu_name() if asked.tiny else found["card"],
        "commit": commit(),
        "torch": found["torch"],
        "segments": "expandable",
        "tiny": asked.tiny,
    }
    sections = [name for name in SECTIONS if vars(asked)[name]] or list(SECTIONS)
    return max(SECTIONS[name](context, asked, stamp) for name in sections)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="this section: the memory of 8 runs, planned and measured")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the processor, to check this script")
    parser.add_argument("--only", type=int, choices=range(len(gpu_plan.CELLS)), help="this cell of --plan alone")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a summary")
    return parser.parse_args()


def plan_section(context: ForkServerContext, asked: argparse.Namespace, stamp: dict[str, Any]) -> int:
    """Plan and live the cells one after the other, each in a process of its own; return the exit code."""
    started, rows = time.monotonic(), []
    for number, cell in enumerate(gpu_plan.CELLS):
        if asked.only in (None, number):
            left = WHOLE_S - (time.monotonic() - started)
            told = gpu_plan.tried(context, cell, asked.tiny, min(gpu_plan.CELL_S, left))
            rows.append({**stamp, "number": number, **asdict(cell), "line": cell.line(), **told})
            say(f"{number}  {cell.line()}  {gpu_plan.verdict(rows[-1])}")
    print(json.dumps(rows, indent=2) if asked.json else gpu_plan.summary(rows, time.monotonic() - started))
    if not asked.tiny:
        path = results_path("gpu_plan", stamp["card"], stamp["commit"], "jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        say(f"kept: {path}")
    return 1 if any(map(gpu_plan.is_wrong, rows)) else 0


SECTIONS: dict[str, Callable[[ForkServerContext, argparse.Namespace, dict[str, Any]], int]] = {"plan": plan_section}


if __name__ == "__main__":
    sys.exit(main())
