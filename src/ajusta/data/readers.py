"""Files and folders become rows; what cannot be used is listed with file, line and reason, never passed over."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ajusta.base.errors import DataError, nearest
from ajusta.data.encodings import decode
from ajusta.data.found import Found
from ajusta.data.json_files import read_json, read_jsonl
from ajusta.data.tables import read_table
from ajusta.data.text_files import read_text
from ajusta.spec.data import Dropped, Row

READERS: dict[str, Callable[[str, str], Found]] = {
    ".txt": read_text,
    ".md": read_text,
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_table,
    ".tsv": read_table,
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Everything that was found under the given paths; `files` counts those that gave at least one row."""

    rows: tuple[Row, ...]
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()
    files: int


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """Files to read with the label that a person knows them by, and how many hidden ones were passed over."""

    files: tuple[tuple[Path, str], ...]
    hidden: int
    twice: int


def read(paths: Sequence[Path], *, strict: bool = False) -> Reading:
    """Read files and folders (recursively, in sorted order); with `strict`, a single dropped item is an error.

    Raises:
        DataError: a path does not exist; nothing usable was found; `strict` and something was dropped.
    """
    listing = _list_files(paths)
    rows: list[Row] = []
    dropped: list[Dropped] = []
    notes: list[str] = []
    counts: Counter[str] = Counter()
    files = 0
    for path, label in listing.files:
        found = _read_file(path, label)
        rows.extend(found.rows)
        dropped.extend(found.dropped)
        notes.extend(found.notes)
        counts.update(found.counts)
        files += bool(found.rows)
    counts.update({"hidden files skipped": listing.hidden, "files given twice, read once": listing.twice})
    notes.extend(f"{text}: {count}" for text, count in counts.items() if count > 0)
    if strict and dropped:
        raise DataError(f"{len(dropped)} items cannot be used, and strict was asked for:\n{list_dropped(dropped)}")
    if not rows:
        raise DataError(_nothing(paths, dropped))
    return Reading(rows=tuple(rows), dropped=tuple(dropped), notes=tuple(notes), files=files)


def list_dropped(dropped: Sequence[Dropped]) -> str:
    """Return one line an item: where it stands, and why it was dropped."""
    return "\n".join(f"  {item.source}: {item.reason}" for item in dropped)


def _nothing(paths: Sequence[Path], dropped: Sequence[Dropped]) -> str:
    given = ", ".join(str(path) for path in paths) or "no path"
    kinds = " ".join(READERS)
    message = f"{given}: no usable row; expected {kinds} files with text in them; check the path"
    return f"{message}. Dropped:\n{list_dropped(dropped)}" if dropped else message


def _read_file(path: Path, label: str) -> Found:
    if path.is_dir():
        return Found(dropped=(Dropped(source=label, reason="the folder cannot be listed; check its permissions"),))
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        reason = f"unknown type {path.suffix or '(none)'}; expected {' '.join(READERS)}"
        return Found(dropped=(Dropped(source=label, reason=reason),))
    if not path.is_file():  # a broken link, or a pipe, which would wait for ever
        return Found(dropped=(Dropped(source=label, reason="no plain file that can be read"),))
    try:
        text, encoding = decode(path.read_bytes())
        found = reader(text, label)
    except DataError as error:
        return Found(dropped=(Dropped(source=label, reason=str(error)),))
    except OSError as error:
        return Found(dropped=(Dropped(source=label, reason=f"cannot be read: {error.strerror}"),))
    said = (f"{label}: read as {encoding}",) if encoding else ()
    return Found(rows=found.rows, dropped=found.dropped, notes=said + found.notes, counts=found.counts)


def _list_files(paths: Sequence[Path]) -> _Listing:
    listed: list[tuple[Path, str]] = []
    hidden = 0
    for path in paths:
        if path.is_dir():
            inside, skipped = _walk(path)
            hidden += skipped
            listed.extend((file, f"{path.resolve().name}/{file.relative_to(path).as_posix()}") for file in inside)
        elif path.exists():
            listed.append((path, path.name))
        else:
            siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
            raise DataError(f"{path} does not exist{nearest(path.name, siblings)}; expected a file or a folder of text")
    unique: dict[Path, tuple[Path, str]] = {}
    for path, label in listed:
        unique.setdefault(path.resolve(), (path, label))
    once = list(unique.values())
    shared = Counter(label for _, label in once)
    files = tuple((path, label if shared[label] == 1 else path.as_posix()) for path, label in once)
    return _Listing(files=files, hidden=hidden, twice=len(listed) - len(once))


def _walk(folder: Path) -> tuple[list[Path], int]:
    """Files below a folder in sorted order, and the number of hidden files (those in hidden folders included)."""
    files: list[Path] = []
    hidden = 0
    closed: list[OSError] = []
    for place, folders, names in os.walk(folder, onerror=closed.append):  # does not follow linked folders, so it ends
        folders.sort()
        inside = Path(place)
        concealed = any(part.startswith(".") for part in inside.relative_to(folder).parts)
        for name in sorted(names):
            if concealed or name.startswith("."):
                hidden += 1
            else:
                files.append(inside / name)
    return files + [Path(str(error.filename)) for error in closed], hidden
