"""The run folder: everything a run leaves behind lies in it, and nothing is ever written outside of it.

    config.yaml  record.json  events.jsonl  adapter/  tokenizer/  checkpoints/  exams/  plan.json  state.json

Files appear whole or not at all: they are written aside, flushed to the disk, and renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ajusta.base.errors import UserError
from ajusta.base.events import Event, Progress


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file or folder beside `path`, flush it, and rename it into place; a folder there is replaced."""
    aside = path.with_name(path.name + ".partial")
    if aside.is_dir():
        shutil.rmtree(aside)
    write(aside)
    files = [entry for entry in aside.rglob("*") if entry.is_file()] if aside.is_dir() else [aside]
    for file in files:
        _flush(file)
    if path.is_dir():
        shutil.rmtree(path)
    os.replace(aside, path)
    _flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""
    write_whole(path, lambda aside: None if aside.write_text(text, encoding="utf-8") else None)


def write_json(path: Path, value: object) -> None:
    """Write plain values as JSON, whole."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


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
        self.events = path / "events.jsonl"
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
        with self.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event.as_json(), ensure_ascii=False) + "\n")


@contextmanager
def open_for_training(path: Path, *, resume: bool) -> Iterator[RunFolder]:
    """Make or reopen a run folder and keep others out of it while it is used.

    Raises:
        UserError: the folder holds something already and `resume` is off; or another run uses it; or it is a file.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; expected a folder for the run; choose another --out")
    there = sorted(entry.name for entry in path.iterdir() if entry.name != ".lock") if path.is_dir() else []
    if there and not resume:
        known = "a run" if "config.yaml" in there else f"other things ({', '.join(there[:3])})"
        raise UserError(
            f"{path} holds {known} already; expected a new folder; "
            f"add --resume to go on with that run, or choose another --out"
        )
    if resume and there and "config.yaml" not in there:
        raise UserError(f"{path} is no run folder (no config.yaml); expected one to resume; check --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is using {path}; wait for it, or choose another --out") from None
        yield RunFolder(path)


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
