r"""JSON lines (`.jsonl`) and JSON documents (`.json`: a list of rows, one row, or `{"data": [...]}`).

Lines end at \n, \r\n or \r only: the other line breaks of Unicode (U+2028, U+0085) may stand inside a JSON string,
raw carriage returns may not. A list is read element by element, so that each row has its line and a file that was cut
off still gives the rows before the cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ajusta.base.errors import DataError
from ajusta.data.found import Found, Record, take_records
from ajusta.spec.data import Dropped

_BLANK = re.compile(r"[ \t\r\n]*")
_BAD_JSON = (ValueError, RecursionError)


def split_lines(text: str) -> list[str]:
    r"""Split at \n, \r\n and \r, and at nothing else."""
    return re.split(r"\r\n|\n|\r", text)


def read_jsonl(text: str, label: str) -> Found:
    """Read one JSON object a line; a broken line is dropped with its number.

    Raises:
        DataError: the file is blank.
    """
    records: list[Record | Dropped] = []
    lines = split_lines(text)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        source = f"{label}:{number}"
        try:
            records.append(Record(source=source, value=json.loads(line)))
        except _BAD_JSON as error:
            records.append(Dropped(source=source, reason=_why(line, error)))
    if not records:
        raise DataError("the file is empty")
    found = take_records(records)
    blank = sum(not line.strip() for line in lines[:-1])
    found.counts.update({"blank lines skipped": blank} if blank else {})
    return found


def read_json(text: str, label: str) -> Found:
    """Read a list of rows, one row, or an object whose `data` is a list of rows.

    Raises:
        DataError: the file is blank or no JSON.
    """
    start = _skip(text, 0)
    if start == len(text):
        raise DataError("the file is empty")
    if text[start] == "[":
        return take_records(_elements(text, start + 1, label))
    try:
        whole = json.loads(text)
    except _BAD_JSON as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return read_jsonl(text, label)  # JSON lines under the name .json are common
        raise DataError(_why(text, error)) from error
    inner = whole.get("data") if isinstance(whole, dict) else None
    if isinstance(inner, list):
        return take_records(
            Record(source=f"{label}:1 (item {number})", value=item) for number, item in enumerate(inner, start=1)
        )
    return take_records([Record(source=f"{label}:1", value=whole)])


def _elements(text: str, position: int, label: str) -> Iterator[Record | Dropped]:
    """Yield the elements of a list whose bracket stands before `position`; stop at the first break in the syntax."""
    decoder = json.JSONDecoder()
    line, counted = 1, 0
    position = _skip(text, position)
    if text[position : position + 1] == "]":
        return
    while True:
        line, counted = line + text.count("\n", counted, position), position
        source = f"{label}:{line}"
        try:
            value, position = decoder.raw_decode(text, position)
        except _BAD_JSON as error:
            yield Dropped(source=source, reason=_why(text, error) + "; the rest of the file was not read")
            return
        yield Record(source=source, value=value)
        position = _skip(text, position)
        mark = text[position : position + 1]
        if mark == "]":
            return
        if mark != ",":
            yield Dropped(source=source, reason="the list is not closed after this row; the file is cut off")
            return
        position = _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    return match.end() if match else position


def _why(text: str, error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        if "\0" in text:
            return f"NUL byte at column {text.index(chr(0)) + 1}; delete it"
        return f"no valid JSON: {error.msg} at column {error.colno}"
    return f"no valid JSON: {type(error).__name__}"
