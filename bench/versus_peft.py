"""ajusta beside stock transformers + PEFT: the same model, data, order and initial adapter, one optimizer step a turn.

Each side lives in a process of its own; the parent lets them step in turn, A, B, A, B, never both at once, so that a
machine's drift meets both alike. A speed is the median of the pairwise ratios, never a ratio of two medians. What the
columns mean and what favours whom: bench/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measures import ENVIRONMENT, ROOT, Case, Job, Resident, Rung, Step, commit, cores, cpu_name, keep, say
from side import Side, SideError

SIDES = ("ours", "stock")
MIB = 1024 * 1024
LONG_TOKENS = 512  # above this many tokens a step, the loss curve is only as long as the timed steps
GOAL = 1e-4  # relative difference of each loss, fp32


@dataclass(kw_only=True)
class Taken:
    """What one side did in one case."""

    steps: list[Step]
    resident: Resident
    allocated_bytes: int
    table: str = ""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Steps of each kind: the first ones warm up, the next are timed in pairs, more only lengthen the curve."""

    warm_up: int
    pairs: int
    losses: int

    def steps(self, tokens: int) -> int:
        """Return the steps that are taken in turn."""
        timed = self.warm_up + self.pairs
        return timed if tokens > LONG_TOKENS else max(timed, self.losses)


def main() -> int:
    """Run what was asked for; the table goes to stdout, or with --json the rows; progress goes to stderr."""
    asked = _arguments()
    for name, value in ENVIRONMENT.items():
        os.environ[name] = value
    os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
    cases = [
        Case(dtype=dtype, bits=bits, tokens=tokens, checkpointing=checkpointing)
        for tokens, dtype, bits, checkpointing in itertools.product(
            asked.tokens, asked.dtype, asked.bits, asked.checkpointing
        )
    ]
    lengths = Lengths(warm_up=asked.warm_up, pairs=asked.pairs, losses=asked.losses)
    rows = []
    with tempfile.TemporaryDirectory(prefix="ajusta-bench-") as scratch:
        folder = Path(scratch)
        enough = max((lengths.steps(case.tokens) + 2) * case.tokens for case in cases)
        text = _elsewhere("make", asked.model, folder, enough)
        say(f"text: {text}")
        for case in cases:
            row = {**asdict(case), "cpu": cpu_name(), "commit": commit(), "text": text}
            row |= _compare(case, asked.model, folder, lengths, asked.profile)
            rows.append(row)
            say(_line(row))
    print(json.dumps(rows, indent=2) if asked.json else _table(rows))
    if asked.keep:
        say(f"kept: {keep(rows, 'versus_peft')}")
    return 1 if any("ours" not in row for row in rows) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="GGUF file (default: the demo model)")
    parser.add_argument("--tokens", type=_numbers, default=[512], metavar="512,2048")
    parser.add_argument("--dtype", type=_several("fp32", "bf16"), default=["fp32"], metavar="fp32,bf16")
    parser.add_argument("--bits", type=_several("none", "nf4"), default=["none"], metavar="none,nf4")
    parser.add_argument("--checkpointing", type=_several("keep", "full"), default=["keep"], metavar="keep,full")
    parser.add_argument("--pairs", type=int, default=7, help="timed pairs of steps (default 7)")
    parser.add_argument("--warm-up", type=int, default=2, help="untimed steps before (default 2)")
    parser.add_argument("--losses", type=int, default=20, help=f"steps of the loss curve up to {LONG_TOKENS} tokens")
    parser.add_argument("--profile", action="store_true", help="print both sides' costliest operations to stderr")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    parser.add_argument("--keep", action="store_true", help="write the rows into bench/results/")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 64 tokens, 2 pairs")
    asked = parser.parse_args()
    if asked.quick:
        asked.tokens, asked.pairs, asked.warm_up, asked.losses = [64], 2, 1, 3
    asked.model = asked.model or next(iter((ROOT / "demo" / "model").glob("*.gguf")), None)
    if asked.model is None or not asked.model.is_file():
        parser.error(f"no model file {asked.model or 'under demo/model'}; do `make demo`, or give --model FILE")
    return asked


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _several(*allowed: str) -> Callable[[str], list[str]]:
    """Return a reader of comma-separated names."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if set(names) - set(allowed):
            raise argparse.ArgumentTypeError(f"{text!r} came; expected one or more of {', '.join(allowed)}")
        return names

    return read


def _elsewhere(name: str, *arguments: Any) -> Any:
    """Call a function of `material` in a process that ends with it, so that the parent stays small."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_call_material, name, arguments).result()


def _call_material(name: str, arguments: tuple[Any, ...]) -> Any:
    import material  # torch and all of ajusta: only in the child

    return getattr(material, name)(*arguments)


def _compare(case: Case, gguf: Path, folder: Path, lengths: Lengths, profile: bool) -> dict[str, Any]:
    """Return the figures of one case; a side that could not run leaves its error, and the other one's own figures."""
    rung: Rung = _elsewhere("plan", gguf, case)
    job = Job(
        case=case, gguf=gguf, folder=folder / "model", adapter=folder / "adapter", ids=folder / "ids.npy", rung=rung
    )
    taken: dict[str, Taken] = {}
    errors: list[str] = []
    with contextlib.ExitStack() as stack:
        sides = []
        for name in SIDES:
            with _noting(errors):
                sides.append(stack.enter_context(Side(name, job)))
        steps = _in_turn(sides, lengths.steps(case.tokens), errors)
        for side in sides:
            with _noting(errors):
                taken[side.name] = _take(side, steps[side.name], profile)
    for name, what in taken.items():
        if what.table:
            say(f"{name}, {case.tokens} tokens\n{what.table}")
    timed = slice(lengths.warm_up, lengths.warm_up + lengths.pairs)
    row: dict[str, Any] = {"threads": int(os.environ["OMP_NUM_THREADS"]), "planned_allocated_bytes": rung.planned_bytes}
    if errors:
        row["error"] = "; ".join(errors)
    else:
        row |= _ratios(taken["ours"], taken["stock"], timed)
    return row | {name: _side_figures(case, what, timed) for name, what in taken.items()}


@contextlib.contextmanager
def _noting(errors: list[str]) -> Iterator[None]:
    """Keep a side's error for its row instead of stopping."""
    try:
        yield
    except SideError as error:
        errors.append(str(error))


def _in_turn(sides: list[Side], count: int, errors: list[str]) -> dict[str, list[Step]]:
    """Let each side take `count` steps, one at a time and never both at once; one that fails leaves the list."""
    steps: dict[str, list[Step]] = {side.name: [] for side in sides}
    for index in range(count):
        for side in list(sides):
            try:
                steps[side.name].append(side.step(index))
            except SideError as error:
                errors.append(str(error))
                sides.remove(side)
        told = ", ".join(f"{side.name} {steps[side.name][-1].seconds:.2f} s" for side in sides)
        say(f"step {index + 1} of {count}: {told}")
    return steps


def _take(side: Side, steps: list[Step], profile: bool) -> Taken:
    """Take a side's figures of memory, on steps after the timed ones."""
    return Taken(
        steps=steps,
        resident=side.resident(),  # before the profiler, which takes memory of its own
        allocated_bytes=side.allocated_bytes(len(steps)),
        table=side.profile(len(steps) + 1) if profile else "",
    )


def _ratios(ours: Taken, stock: Taken, timed: slice) -> dict[str, Any]:
    """Return ours over stock, pair by pair for the speed."""
    speeds = [b.seconds / a.seconds for a, b in zip(ours.steps[timed], stock.steps[timed], strict=True)]
    differences = [abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(ours.steps, stock.steps, strict=True)]
    return {
        "pairs": len(speeds),
        "speed_ratio": statistics.median(speeds),
        "speed_ratios": speeds,
        "allocated_ratio": ours.allocated_bytes / stock.allocated_bytes,
        "rss_ratio": ours.resident.peak_bytes / stock.resident.peak_bytes,
        "rss_above_imports_ratio": _above(ours) / _above(stock),
        "loss_difference": max(differences),
        "loss_differences": differences,
    }


def _above(taken: Taken) -> int:
    return taken.resident.peak_bytes - taken.resident.imported_bytes


def _side_figures(case: Case, taken: Taken, timed: slice) -> dict[str, Any]:
    return {
        "tokens_per_s": case.tokens / statistics.median(step.seconds for step in taken.steps[timed]),
        "allocated_bytes": taken.allocated_bytes,
        "peak_rss_bytes": taken.resident.peak_bytes,
        "peak_rss_above_imports_bytes": _above(taken),
        "losses": [step.loss for step in taken.steps],
    }


def _line(row: dict[str, Any]) -> str:
    """Return one row as a person reads it."""
    start = f"{row['tokens']:>6}  {row['dtype']}  {row['bits']:<4}  {row['checkpointing']}"
    if "error" in row:
        ran = [f"{name} alone {row[name]['tokens_per_s']:.1f} tokens/s" for name in SIDES if name in row]
        return "  ".join([start, *ran, f"cannot run: {row['error']}"])
    ours, stock = row["ours"], row["stock"]
    return (
        f"{start}  {row['speed_ratio']:5.2f}x {ours['tokens_per_s']:6.1f} /{stock['tokens_per_s']:6.1f}"
        f"  {row['allocated_ratio']:5.2f}x {ours['allocated_bytes'] / MIB:6.0f} /{stock['allocated_bytes'] / MIB:6.0f}"
        f"  {row['rss_ratio']:5.2f}x {ours['peak_rss_bytes'] / MIB:6.0f} /{stock['peak_rss_bytes'] / MIB:6.0f}"
        f"  {row['loss_difference']:.1e}{_verdict(row)}"
    )


def _verdict(row: dict[str, Any]) -> str:
    return " over the goal" if row["dtype"] == "fp32" and row["loss_difference"] > GOAL else ""


def _table(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    head = (
        f"{first['cpu']}; commit {first['commit']}; {first['text']}\n"
        "ours over stock; speed is the median of pairwise ratios, loss the largest relative difference of a step\n\n"
        "tokens  dtype bits  ckpt   speed  tokens/s         allocated MiB           peak RSS MiB            loss\n"
    )
    return head + "\n".join(_line(row) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
