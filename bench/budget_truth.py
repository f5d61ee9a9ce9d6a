"""Is a budget kept? Small runs under the very budget they were planned for, as a hard limit put on from outside.

For each pair of a run and a budget the planner is asked as `ajusta train` asks it. What it says will fit is then lived
for real in a process whose data (RLIMIT_DATA) may grow by that budget and no more. What it says will not fit is lived
by its leanest plan in a little less than that needs, and ought to fail. What counts: bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from helpers import Gone, Helper, server
from measures import commit, cores, cpu_name, results_path, say
from pairs import NEAR, Pair, computes_bf16, sample

from ajusta.spec.plan import Plan

MIB = 1024 * 1024
SHORT, GOAL = 0.95, 0.9  # of what is needed, that must not be enough; how often
STEPS_OF_LEAST = 5  # halvings of the way between the tensors and the plan
ABORTED = (-signal.SIGABRT, -signal.SIGSEGV, 1)  # how a process ends that finds no memory even to say so
WORDS = {"budget": "its budget", "need": f"{SHORT} of the need", "trace": f"{SHORT} of the traced tensors"}


def main() -> int:
    """Try the pairs one after the other; the summary goes to stdout, or with --json the rows; progress to stderr."""
    asked = _arguments()
    context = server("fence")
    with Helper(context, "fence", "ready") as helper:
        helper.told()  # where it cannot even import, no pair need be tried
    pairs = sample(asked.pairs, asked.seed, cores(), _dtypes())
    pairs = pairs if asked.only is None else [pairs[asked.only]]
    stamp: dict[str, Any] = {"cpu": cpu_name(), "commit": commit(), "sample": asked.seed}
    started, rows = time.monotonic(), []
    kept = results_path("budget_truth", stamp["cpu"], stamp["commit"], "jsonl") if asked.keep else Path(os.devnull)
    with kept.open("w", encoding="utf-8", buffering=1) as lines:
        for pair in pairs:
            rows.append({**stamp, **pair.row(), "line": pair.line(), **_tried(context, pair, asked.least)})
            lines.write(json.dumps(rows[-1]) + "\n")
            say(f"{pair.line()}  {verdict(rows[-1])}")
    print(json.dumps(rows, indent=2) if asked.json else summary(rows, time.monotonic() - started))
    return 1 if any(map(is_wrong, rows)) or share_failed(rows, "trace") < GOAL else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=216, help="how many pairs (default 216)")
    parser.add_argument("--seed", type=int, default=0, help="which sample (default 0)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this pair of the sample alone")
    parser.add_argument("--least", action="store_true", help="also find the least limit that each plan runs under")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a summary")
    parser.add_argument("--keep", action="store_true", help="write the rows into bench/results/, one a line")
    asked = parser.parse_args()
    if asked.pairs < 1 or asked.only not in (None, *range(asked.pairs)):
        parser.error(f"pair {asked.only} of {asked.pairs}; expected at least one pair, and a number below that of all")
    return asked


def _dtypes() -> tuple[str, ...]:
    """Return the dtypes to draw from: bf16 only where the processor has it."""
    flags = re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return ("fp32", "bf16") if flags is not None and computes_bf16(flags[1]) else ("fp32",)


def _tried(context: ForkServerContext, pair: Pair, with_least: bool) -> dict[str, Any]:
    """Return what the planner said of a pair, and what happened."""
    started = time.monotonic()
    try:
        with Helper(context, "fence", "decide", pair) as helper:
            lean, plan = helper.told()
    except Gone as gone:
        return {"error": str(gone), "seconds": round(time.monotonic() - started, 1)}
    budget = plan.budget_bytes
    row: dict[str, Any] = {
        "budget_bytes": budget,
        "fits": plan.fits,
        "least_need_bytes": lean.need_bytes,
        "least_peak_bytes": lean.peak_bytes,
        "need_bytes": plan.need_bytes,
        "peak_bytes": plan.peak_bytes,
        "recompute_blocks": plan.rung.recompute_blocks,
        "blocks": plan.blocks,
        "micro_tokens": plan.rung.micro_tokens,
        "plan_s": round(time.monotonic() - started, 1),
        "runs": {},
    }
    limits = {"budget": budget} if plan.fits else {}
    if not plan.fits:
        limits = {"need": int(SHORT * plan.need_bytes), "trace": int(SHORT * plan.peak_bytes)}
    for name, limit in limits.items():
        row["runs"][name] = _lived(context, pair, plan, limit)
    if with_least:
        row["least_limit_bytes"] = _least(lambda limit: _lived(context, pair, plan, limit)["ran"], plan)
    return {**row, "seconds": round(time.monotonic() - started, 1)}


def _least(runs_under: Callable[[int], bool], plan: Plan) -> int | None:
    """Return about the least limit that a plan runs under, by halving; None if twice what it says is not enough."""
    low, high = int(0.9 * plan.peak_bytes), plan.need_bytes
    if runs_under(low):
        return low
    if not runs_under(high):
        low, high = high, 2 * high
        if not runs_under(high):
            return None
    for _ in range(STEPS_OF_LEAST):
        middle = (low + high) // 2
        low, high = (low, middle) if runs_under(middle) else (middle, high)
    return high


def _lived(context: ForkServerContext, pair: Pair, plan: Plan, budget_bytes: int) -> dict[str, Any]:
    """Return how a life went whose data may grow by `budget_bytes`, and no further."""
    row: dict[str, Any] = {"budget_bytes": budget_bytes, "ran": False}
    try:
        with Helper(context, "fence", "live", pair, plan) as helper:
            row |= helper.told()  # it is ready, all of its imports done
            # What its heap has free already would be had beside the budget, unseen by the limit.
            row["baseline_bytes"] = put_fence(helper.pid, budget_bytes - row["heap_free_bytes"])
            helper.tell("go")
            row |= helper.told()
    except Gone as gone:
        # Where even an error cannot be told any more, libraries end the process: in words of their own, or by a signal.
        row |= {"stage": "?", "error": str(gone), "no_memory": gone.code in ABORTED}
    return row


def put_fence(pid: int, budget_bytes: int) -> int:
    """Let the data of a process grow by so much and no more, from now on; return what it has now, in bytes."""
    baseline = data_bytes(pid)
    limit = baseline + budget_bytes
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
    return baseline


def data_bytes(pid: int) -> int:
    """Return what RLIMIT_DATA counts of a process: private memory that can be written, touched or not (VmData)."""
    match = re.search(r"^VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"), re.MULTILINE)
    assert match is not None, "Linux tells this of every process"
    return int(match[1]) * 1024


def is_wrong(row: dict[str, Any]) -> bool:
    """Say whether a pair could not be tried, or what was said to fit did not run."""
    if "error" in row:
        return True
    odd = any(not run["ran"] and not run["no_memory"] for run in row["runs"].values())
    return odd or (row["fits"] and not row["runs"]["budget"]["ran"])


def share_failed(rows: Sequence[dict[str, Any]], name: str) -> float:
    """Return how often a run failed that should; `name` says at which limit: need | trace. 1.0 without any."""
    runs = [row["runs"][name] for row in rows if name in row.get("runs", ())]
    return sum(not run["ran"] for run in runs) / len(runs) if runs else 1.0


def verdict(row: dict[str, Any]) -> str:
    """Say in a few words how a pair went."""
    if "error" in row:
        return f"COULD NOT BE TRIED: {row['error']}"
    told = [
        f"needs {row['need_bytes'] / MIB:.0f} ({row['peak_bytes'] / MIB:.0f}) of {row['budget_bytes'] / MIB:.0f} MiB"
    ]
    for name, run in row["runs"].items():
        went = "ran" if run["ran"] else f"failed in {run['stage']}"
        told.append(f"{WORDS[name]}: {went}" + ("" if run["ran"] or run["no_memory"] else f" {run['error']}"))
    if row.get("least_limit_bytes"):
        told.append(f"least limit {row['least_limit_bytes'] / MIB:.0f} MiB")
    return f"{'WRONG ' if is_wrong(row) else ''}{'; '.join(told)}; {row['seconds']} s"


def summary(rows: Sequence[dict[str, Any]], seconds: float) -> str:
    """Return the counts, and a line for each pair that went wrong."""
    tried = [row for row in rows if "error" not in row]
    fit = [row for row in tried if row["fits"]]
    lines = [f"{rows[0]['cpu']}; commit {rows[0]['commit']}; sample {rows[0]['sample']}"]
    lines.append(
        f"{len(rows)} pairs in {seconds / 60:.1f} minutes, {len(rows) - len(tried)} could not be tried; "
        f"{sum(row['near'] for row in tried)} budgets within {NEAR:.0%} of the least need"
    )
    lines.append(f"said to fit: {len(fit)}, of these {sum(row['runs']['budget']['ran'] for row in fit)} ran")
    lines += [_failed_line(tried, name) for name in ("need", "trace")]
    lines += [_least_line(tried)] if any("least_limit_bytes" in row for row in tried) else []
    lines += [f"{row['line']}  {verdict(row)}" for row in rows if is_wrong(row)]
    return "\n".join(lines)


def _failed_line(rows: Sequence[dict[str, Any]], name: str) -> str:
    runs = [row["runs"][name] for row in rows if name in row["runs"]]
    failed = [run for run in runs if not run["ran"]]
    stages = Counter(run["stage"] for run in failed)
    share = share_failed(rows, name)
    where = f" ({', '.join(f'{stage} {count}' for stage, count in stages.most_common())})" if stages else ""
    line = f"said not to fit, lived in {WORDS[name]}: {len(failed)} of {len(runs)} failed, {share:.0%}{where}"
    fat = sorted(row["need_bytes"] / row["peak_bytes"] for row in rows if row["runs"].get(name, {}).get("ran"))
    if name == "need" and fat:
        line += f"; plans that ran in less are {fat[0]:.2f} to {fat[-1]:.2f} times their tensors"
    return line


def _least_line(rows: Sequence[dict[str, Any]]) -> str:
    """Say how the least limits lie between the tensors and the plan."""
    found = [row for row in rows if row.get("least_limit_bytes")]
    beyond = sorted((row["least_limit_bytes"] - row["peak_bytes"]) / MIB for row in found)
    share = sorted(row["least_limit_bytes"] / row["need_bytes"] for row in found)
    return (
        f"least limit beyond the traced tensors: {beyond[0]:+.0f} to {beyond[-1]:+.0f} MiB, median "
        f"{statistics.median(beyond):+.0f}; of the plan's need: {share[0]:.2f} to {share[-1]:.2f}, median "
        f"{statistics.median(share):.2f}; {len(rows) - len(found)} plans found none"
    )


if __name__ == "__main__":
    sys.exit(main())
