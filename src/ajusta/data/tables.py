"""CSV and TSV: a header line, then one row a record. Quoted line breaks stay byte for byte; cells may have any size.

The delimiter is the one of `, ; tab |` under which the header names a known format and most records have its width.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator

from ajusta.base.errors import DataError
from ajusta.data.found import Found, Record, take_records
from ajusta.data.rows import EXPECTED, fold_key, format_of
from ajusta.spec.data import Dropped

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_SNIFFED_RECORDS = 50

Line = tuple[int, list[str] | str]  # the line it starts on, and its cells, or why it cannot be read


def records_of(text: str, delimiter: str) -> Iterator[Line]:
    """Yield each record with its first line; blank lines are passed over, broken records give the reason as text."""
    csv.field_size_limit(sys.maxsize)  # the module's own limit of 131,072 characters is a setting of the process
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        first_line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield first_line, f"no valid CSV: {error}; check the quotes"
            continue
        if cells:
            yield first_line, cells


def sniff(text: str) -> str:
    """Return the delimiter that fits best; a comma where nothing tells."""
    return max(DELIMITERS, key=lambda delimiter: _fit(text, delimiter))


def _fit(text: str, delimiter: str) -> tuple[bool, int, int]:
    """Known header first, then records of the header's width, then more columns."""
    records = [cells for (_, cells), _ in zip(records_of(text, delimiter), range(_SNIFFED_RECORDS), strict=False)]
    if not records or isinstance(records[0], str):
        return False, 0, 0
    header = records[0]
    same = sum(len(cells) == len(header) for cells in records if not isinstance(cells, str))
    return format_of([fold_key(name) for name in header]) is not None, same, len(header)


def read_table(text: str, label: str) -> Found:
    """Read a table with a header; a ragged or broken record is dropped with its line.

    Raises:
        DataError: the file is empty, or its header names no known format.
    """
    delimiter = sniff(text)
    records = records_of(text, delimiter)
    first = next(records, None)
    if first is None:
        raise DataError("the file is empty")
    if isinstance(first[1], str):
        raise DataError(f"line {first[0]}: {first[1]}")
    header = [fold_key(name) for name in first[1]]
    known = format_of(header)
    if known is None:
        columns = ", ".join(header)
        raise DataError(f"header line with columns {columns}; {EXPECTED}; name the columns in the first line")
    doubled = sorted({name for name in header if header.count(name) > 1})
    if doubled:
        raise DataError(f"column {', '.join(doubled)} stands twice in the header; rename one")
    found = take_records(_take(records, header, label))
    used = known.used(header)
    unused = [name for name in header if name not in used]
    note = f"{label}: {DELIMITERS[delimiter]}-separated, columns used: {', '.join(used)}"
    note += f"; not used: {', '.join(unused)}" if unused else ""
    for name in unused:
        del found.counts[f"key {name!r} is not used"]  # said once for the file
    return Found(rows=found.rows, dropped=found.dropped, notes=(note,), counts=found.counts)


def _take(records: Iterator[Line], header: list[str], label: str) -> Iterator[Record | Dropped]:
    for line, cells in records:
        source = f"{label}:{line}"
        if isinstance(cells, str):
            yield Dropped(source=source, reason=cells)
        elif len(cells) != len(header):
            reason = f"{len(cells)} fields, but the header has {len(header)}; quote cells that hold the delimiter"
            yield Dropped(source=source, reason=reason)
        else:
            yield Record(source=source, value=dict(zip(header, cells, strict=True)))
