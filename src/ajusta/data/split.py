"""Train and held-out rows: decided by a hash of the row's own text, so the split is stable when data is added.

The key of a document is its text, of a conversation its first user turn, both without case, punctuation and spacing.
Rows with equal keys always fall on one side: nothing that is examined was trained on in another spelling.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ajusta.base.errors import DataError
from ajusta.data.roles import role_of
from ajusta.spec.data import Row

MIN_ROWS_FOR_HELDOUT = 10
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, kw_only=True)
class Split:
    """Indices of the rows on each side, ascending, and remarks about doubles."""

    train: tuple[int, ...]
    heldout: tuple[int, ...]
    notes: tuple[str, ...] = ()


def fold_text(text: str) -> str:
    """Return the words of a text in lower case with single spaces; the text itself where it has no word."""
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return " ".join(words) or text.strip()


def split_key(row: Row) -> str:
    """Return the folded text that decides on which side a row falls."""
    if row.messages is None:
        return fold_text(row.text or "")
    first = next((turn for turn in row.messages if _is_user(turn)), None)
    turns = row.messages if first is None else (first,)
    return fold_text("\n".join(str(turn.get("content", "")) for turn in turns))


def _is_user(turn: dict[str, object]) -> bool:
    try:
        return role_of(turn) == "user"
    except DataError:  # an unknown role is refused with its line later on
        return False


def split(rows: Sequence[Row], fraction: float, seed: int) -> Split:
    """Split rows by sha256(seed, key) < fraction.

    With `fraction` > 0 and at least 10 rows, at least one row is held out; at least one row is always left to train on.
    """
    keys = [split_key(row) for row in rows]
    places = {key: _place(key, seed) for key in keys}
    held = {key for key, place in places.items() if place < fraction}
    ordered = sorted(places, key=lambda key: (places[key], key))
    if not held and fraction > 0 and len(rows) >= MIN_ROWS_FOR_HELDOUT and len(ordered) > 1:
        held = {ordered[0]}
    if len(held) == len(ordered) and ordered:
        held.discard(ordered[-1])
    return Split(
        train=tuple(index for index, key in enumerate(keys) if key not in held),
        heldout=tuple(index for index, key in enumerate(keys) if key in held),
        notes=_doubles(rows, keys),
    )


def _place(key: str, seed: int) -> float:
    """A number in [0, 1) that depends on seed and key only."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / float(1 << 48)


def _doubles(rows: Sequence[Row], keys: Sequence[str]) -> tuple[str, ...]:
    exact = Counter(repr((row.text, row.messages, row.tools)) for row in rows)
    doubles = sum(count - 1 for count in exact.values())
    near = len(keys) - len(set(keys)) - doubles
    notes = [f"exact duplicates of another row (kept, on the same side): {doubles}"] if doubles else []
    if near:
        notes.append(f"rows that start like another one after folding case and punctuation (on the same side): {near}")
    return tuple(notes)
