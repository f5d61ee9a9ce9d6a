"""What is measured, and the words for it: the same figures taken the same way on either side. No torch in here.

The sides run in processes of their own; the nouns below are what travels between them and the parent.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

# glibc keeps freed memory by default, which makes a peak RSS mostly its own; both sides run with these.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
RANK, ALPHA, RATE = 16, 32, 2e-4  # plain alpha / r on both sides; AdamW at a constant rate, no decay, no clipping


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: what both sides are to train, and how."""

    dtype: str  # fp32 | bf16
    bits: str  # none | nf4
    tokens: int  # of each step: one chunk of the book
    checkpointing: str  # keep | full


@dataclass(frozen=True, kw_only=True)
class Rung:
    """How ours is to run its step, and what its planner says that takes above weights, adapters and optimizer state."""

    recompute_blocks: int
    loss_chunk: int
    planned_bytes: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a side needs, to be sent to its process."""

    case: Case
    gguf: Path  # what ours reads
    folder: Path  # the same numbers as an fp32 safetensors model, which stock reads
    adapter: Path  # PEFT's format, read by both
    ids: Path  # the book, int64 [tokens in all]
    rung: Rung

    def chunks(self) -> NDArray[np.int64]:
        """Return the book as [chunks, tokens a step]."""
        ids, tokens = np.load(self.ids), self.case.tokens
        return ids[: len(ids) // tokens * tokens].reshape(-1, tokens)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step: its mean loss, and the seconds it took, the loss read back."""

    loss: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Main memory of one side's process, bytes: the peak of its whole life, and what it held once it had imported."""

    peak_bytes: int
    imported_bytes: int


def resident_bytes() -> int:
    """Return what this process has in main memory now (VmRSS)."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Return the most this process has had in main memory (VmHWM)."""
    return _status("VmHWM")


def resident_file_bytes() -> int:
    """Return what of it mirrors files, such as libraries' code (RssFile): shared, and given back at need."""
    return _status("RssFile")


def _status(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert match is not None, "Linux tells this of every process"
    return int(match[1]) * 1024


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """Return the processor as its maker names it, with family and model, since virtual machines shorten the name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    found = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    name = found.get("model name", platform.processor() or platform.machine())
    kind = f" (family {found['cpu family']} model {found['model']})" if "cpu family" in found else ""
    return f"{name}{kind}, {cores()} cores"


def commit() -> str:
    """Return the commit that is measured, marked where the tree differs from it."""
    git = ["git", "--no-optional-locks", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    if found.returncode:
        return "unknown"
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False).stdout
    return found.stdout.strip() + ("-dirty" if changed.strip() else "")


def keep(rows: Sequence[dict[str, Any]], bench: str) -> Path:
    """Write the rows of a bench into bench/results/, under its name, their processor and commit."""
    path = results_path(bench, rows[0]["cpu"], rows[0]["commit"], "json")
    path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return path


def results_path(bench: str, device: str, at_commit: str, suffix: str) -> Path:
    """Return where a bench keeps its rows; the folder is there afterwards."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{bench}-{slug}-{at_commit}.{suffix}"


def say(text: str) -> None:
    """Tell how far it is: on standard error, at once, so that results on standard output can be piped."""
    print(text, file=sys.stderr, flush=True)
