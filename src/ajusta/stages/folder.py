"""The run folder: everything a run leaves behind lies in it, and nothing is ever written outside of it.

    config.yaml  plan.json  before.json  record.json  events.jsonl  adapter/  best/  tokenizer/  checkpoints/  exams/

Files and folders appear whole or not at all: they are written aside, flushed to the disk, and renamed.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ajusta.base.errors import UserError
from ajusta.base.events import Event, Progress

LOCK, EVENTS = ".lock", "events.jsonl"


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file or folder beside `path`, flush it, and rename it into place; a folder there is replaced.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    aside, before = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.before")
    with naming_what_fails(path):
        for left_over in (aside, before):
            if left_over.is_dir():
                shutil.rmtree(left_over)
        write(aside)
        for entry in [*aside.rglob("*"), aside]:
            _flush(entry)
        if path.is_dir():
            os.rename(path, before)  # a folder cannot be renamed over another one that holds something
        os.replace(aside, path)
        _flush(path.parent)
        if before.is_dir():
            shutil.rmtree(before)


@contextmanager
def naming_what_fails(path: Path) -> Iterator[None]:
    """Turn a failure of the disk into one line about the path.

    Raises:
        UserError: something inside could not be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"{path} cannot be written ({reason}); expected a disk with room that may be written to; "
            f"make room, or choose another --out"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""

    def write(aside: Path) -> None:
        aside.write_text(text, encoding="utf-8")

    write_whole(path, write)


def write_json(path: Path, value: object) -> None:
    """Write plain values as JSON, whole; a number that is not finite becomes null, since JSON has no word for it."""
    write_text(path, json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class RunFolder:
    """The paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.record = path / "record.json"
        self.events = path / EVENTS
        self.before = path / "before.json"
        self.adapter = path / "adapter"
        self.best = path / "best"
        self.tokenizer = path / "tokenizer"
        self.checkpoints = path / "checkpoints"
        self.exams = path / "exams"

    def log(self, event: Event) -> None:
        """Append an event as one line of JSON; counts of progress are left out."""
        if isinstance(event, Progress):
            return
        line = json.dumps(_finite(event.as_json()), ensure_ascii=False, allow_nan=False)
        with naming_what_fails(self.events), self.events.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@contextmanager
def open_for_training(path: Path, *, resume: bool) -> Iterator[RunFolder]:
    """Make or reopen a run folder and keep others out of it while it is used.

    A folder in which an earlier try was refused before it began (it holds the events of that try and nothing else) is
    as good as a new one.

    Raises:
        UserError: the folder holds something already and `resume` is off; or another run uses it; or it is a file.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; expected a folder for the run; choose another --out")
    there = sorted(entry.name for entry in path.iterdir() if not _left_over(entry)) if path.is_dir() else []
    if there and not resume:
        known = "a run" if "config.yaml" in there else f"other things ({', '.join(there[:3])})"
        cure = "add --resume to go on with that run, or choose another --out"
        raise UserError(
            f"{path} holds {known} already; expected a new folder; "
            f"{cure if 'config.yaml' in there else 'choose another --out'}"
        )
    if there and "config.yaml" not in there:
        raise UserError(f"{path} is no run folder (no config.yaml); expected one to resume; check --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK).open("w")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is using {path}; wait for it, or choose another --out") from None
        if not there:
            (path / EVENTS).unlink(missing_ok=True)
        yield RunFolder(path)


def _left_over(entry: Path) -> bool:
    """Whether a try that never began leaves this behind."""
    return entry.name in (LOCK, EVENTS) or (entry.name.startswith(".") and entry.name.endswith(".partial"))


def open_finished(path: Path) -> RunFolder:
    """Open the folder of a finished run.

    Raises:
        UserError: it is no run folder, or its run has not got as far as an adapter.
    """
    folder = RunFolder(path)
    if not folder.config.is_file():
        there = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) if path.is_dir() else "nothing"
        raise UserError(
            f"{path} is no run folder: it has no config.yaml (found: {there}); give the folder that ajusta train wrote"
        )
    if not folder.adapter.is_dir():
        raise UserError(
            f"the run in {path} has no adapter yet; finish it: ajusta train --config {folder.config} --resume"
        )
    return folder
