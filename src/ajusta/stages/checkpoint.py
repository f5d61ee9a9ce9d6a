"""Saved training states: what a run needs to go on as if nothing had happened.

    checkpoints/step-000040/  state.safetensors   the adapters, their moments, the number of finite updates
                              state.json          where the run stands, and a SHA-256 of the other file

A checkpoint is written aside, flushed and renamed, so one that has its name is whole; the checksum guards against what
happens to a disk later. The newest whole one counts. The order of the data and the schedule are functions of the step,
and nothing in a step draws random numbers, so no random state has to be kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ajusta.base.errors import UserError
from ajusta.blocks.optimizer import FlatAdamW
from ajusta.stages.folder import naming_what_fails, write_whole

_TENSORS, _FACTS = "state.safetensors", "state.json"
_NAME = re.compile(r"step-\d+|\.step-\d+\.(partial|before)")


@dataclass(frozen=True, kw_only=True)
class Progressed:
    """Where a run stands after `step` optimizer steps."""

    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    last_loss: float = 0.0
    best_step: int | None = None
    best_loss: float | None = None
    evaluations_without_gain: int = 0
    bad_in_a_row: int = 0


def save_checkpoint(folder: Path, optimizer: FlatAdamW, progress: Progressed, identity: dict[str, str]) -> Path:
    """Write a checkpoint and delete the others, unfinished ones too; return its folder.

    `identity` says what the state belongs to: each setting by name, the data and the base as digests.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    path = folder / f"step-{progress.step:06d}"

    def write(aside: Path) -> None:
        aside.mkdir(parents=True)
        tensors = {"weights": optimizer.weights, **optimizer.state()}
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, aside / _TENSORS)
        facts = {"progress": asdict(progress), "identity": identity, "sha256": _digest(aside / _TENSORS)}
        (aside / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")

    with naming_what_fails(path):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, write)
    for old in folder.iterdir():
        if old != path and _NAME.fullmatch(old.name) and old.is_dir():
            shutil.rmtree(old)
    return path


def require_same(folder: Path, identity: dict[str, str]) -> None:
    """Hold that the newest whole checkpoint, if there is one, belongs to this run; it is not loaded.

    Raises:
        UserError: it belongs to other settings, other data or another base; each is named.
    """
    for path in reversed(_all(folder)):
        facts = _facts(path)
        if facts is not None:
            _require_same(path, facts["identity"], identity)
            return


def _require_same(path: Path, saved: dict[str, str], now: dict[str, str]) -> None:
    changed = [name for name in now if saved.get(name) != now[name]]
    if changed:
        told = [_difference(name, saved.get(name), now[name]) for name in changed]
        raise UserError(
            f"{path} was saved with another {' and another '.join(told)}; expected the same to resume; "
            f"put back what was, or start anew with another --out"
        )


def _difference(name: str, before: str | None, now: str) -> str:
    """Name a setting with both values; data and base have digests, which tell a person nothing."""
    return name if before is None or len(before) > 40 or len(now) > 40 else f"{name} ({before}, now {now})"


def load_newest(folder: Path, optimizer: FlatAdamW, identity: dict[str, str]) -> tuple[Progressed, tuple[str, ...]]:
    """Load the newest whole checkpoint in place; return where the run stands and a note for each one passed over.

    Without any checkpoint the run stands at its beginning.

    Raises:
        UserError: the checkpoint belongs to other settings, other data or another base.
    """
    notes = []
    for path in reversed(_all(folder)):
        facts = _facts(path)
        if facts is None:
            notes.append(f"{path.name} is damaged and was passed over")
            continue
        _require_same(path, facts["identity"], identity)
        with safe_open(path / _TENSORS, framework="pt") as file:
            optimizer.weights.copy_(file.get_tensor("weights"))
            optimizer.load({name: file.get_tensor(name) for name in optimizer.state()})
        return Progressed(**facts["progress"]), tuple(notes)
    return Progressed(), tuple(notes)


def digest_of(value: object) -> str:
    """Return a SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _all(folder: Path) -> list[Path]:
    """Checkpoints, the oldest first; unfinished ones have another name."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def _facts(path: Path) -> dict[str, Any] | None:
    """Return a checkpoint's facts if all of it is as it was written."""
    try:
        facts: dict[str, Any] = json.loads((path / _FACTS).read_text(encoding="utf-8"))
        if facts["sha256"] != _digest(path / _TENSORS):
            return None
        with safe_open(path / _TENSORS, framework="pt"):
            return facts
    except (OSError, ValueError, KeyError, SafetensorError):
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


__all__ = ["Progressed", "digest_of", "load_newest", "require_same", "save_checkpoint"]
