"""What one file gave: rows, what was dropped, and remarks. Every reader returns this, so that nothing gets lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ajusta.base.errors import DataError
from ajusta.data.rows import take_row
from ajusta.spec.data import Dropped, Row


@dataclass(frozen=True, kw_only=True)
class Found:
    """Rows of one file, its dropped items, remarks of the file (`notes`) and countable policies (`counts`)."""

    rows: tuple[Row, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What stands in one place of a file, not yet looked at."""

    source: str
    value: object


def take_records(records: Iterable[Record | Dropped]) -> Found:
    """Turn records into rows, in the file's order; a record that is no usable row is dropped with its reason."""
    rows: list[Row] = []
    refused: list[Dropped] = []
    counts: Counter[str] = Counter()
    for record in records:
        if isinstance(record, Dropped):
            refused.append(record)
            continue
        try:
            row, remarks = take_row(record.value, record.source)
        except DataError as error:
            refused.append(Dropped(source=record.source, reason=str(error)))
            continue
        rows.append(row)
        counts.update(remarks)
    return Found(rows=tuple(rows), dropped=tuple(refused), counts=counts)
