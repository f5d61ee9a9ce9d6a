"""One record (a JSON object or a table's line) becomes a Row: which formats are known, and which values count.

| keys                                              | becomes                                            |
|---------------------------------------------------|----------------------------------------------------|
| messages (role, content), conversations (from, value) | a conversation; optional `tools`, `system`     |
| instruction [input] output, prompt completion, question answer | a conversation of two turns (and `system`) |
| text                                              | a plain document                                   |

Keys are compared without case and surrounding spaces. Values are kept byte for byte: nothing is trimmed or normalised.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ajusta.base.errors import DataError
from ajusta.data.messages import take_messages, text_of
from ajusta.spec.data import Row

PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("input", "output"),
)
EXPECTED = (
    "expected one of: messages; conversations; instruction, input, output; prompt, completion; question, answer; text"
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """The columns of a record that are used."""

    kind: str  # messages | pair | text
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def used(self, keys: Collection[str]) -> tuple[str, ...]:
        """Return the columns that are used out of `keys`."""
        return self.columns + tuple(name for name in self.optional if name in keys)


def fold_key(key: object) -> str:
    """Return a column's name without case, surrounding spaces or a left-over byte order mark."""
    return str(key).lstrip("\ufeff").strip().lower()


def format_of(keys: Collection[str]) -> Format | None:
    """Recognise the format by its folded keys; None if there is none."""
    for name in ("messages", "conversations"):
        if name in keys:
            return Format(kind="messages", columns=(name,), optional=("tools", "system"))
    for question, answer in PAIRS:
        if question in keys and answer in keys:
            extra = ("input", "system") if question == "instruction" else ("system",)
            return Format(kind="pair", columns=(question, answer), optional=extra)
    return Format(kind="text", columns=("text",)) if "text" in keys else None


def take_row(record: object, source: str) -> tuple[Row, tuple[str, ...]]:
    """Make a Row of one record; returns it with the policies that were applied, to be counted.

    Raises:
        DataError: the record is no object, has no known format, or its text is null, blank or no text.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"a JSON {_json_name(record)}, not an object; {EXPECTED}")
    values = {fold_key(key): value for key, value in record.items()}
    found = format_of(values)
    if found is None:
        keys = ", ".join(sorted(values)) or "none"
        raise DataError(f"keys {keys}; {EXPECTED}; rename the keys")
    remarks: list[str] = [f"key {key!r} is not used" for key in values if key not in found.used(values)]
    system = _system_turn(values, found, remarks)
    if found.kind == "text":
        row = Row(source=source, text=text_of(values["text"], "text", remarks))
    elif found.kind == "pair":
        row = Row(source=source, messages=system + _pair(values, found, remarks))
    else:
        messages = take_messages(values[found.columns[0]], remarks)
        row = Row(source=source, messages=system + messages, tools=_tools(values.get("tools")))
    return row, tuple(remarks)


def _system_turn(values: Mapping[str, object], found: Format, remarks: list[str]) -> tuple[dict[str, object], ...]:
    value = values.get("system") if "system" in found.optional else None
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    return ({"role": "system", "content": text_of(value, "system", remarks)},)


def _pair(values: Mapping[str, object], found: Format, remarks: list[str]) -> tuple[dict[str, object], ...]:
    question, answer = (values[name] for name in found.columns)
    if isinstance(question, list) and isinstance(answer, list):  # TRL's conversational form of prompt, completion
        return take_messages([*question, *answer], remarks)
    asked = text_of(question, found.columns[0], remarks)
    extra = values.get("input") if "input" in found.optional else None
    if extra is not None and str(extra).strip():
        asked = f"{asked}\n\n{text_of(extra, 'input', remarks)}"
    answered = text_of(answer, found.columns[1], remarks)
    return ({"role": "user", "content": asked}, {"role": "assistant", "content": answered})


def _tools(value: object) -> tuple[dict[str, object], ...] | None:
    """Accept a list of tool descriptions, or the same as JSON text; an empty one counts as none."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"tools is text that is no JSON ({error}); expected a list of objects") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"tools is a {_json_name(value)}; expected a list of objects")
    return tuple(value)


def _json_name(value: object) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "true or false", int: "number", float: "number"}
    return names.get(type(value), "null")
