"""The turns of a conversation as they stand in files (OpenAI, ShareGPT), brought to one form.

Out comes `{"role": ..., "content": text, ...}`: a list of text parts is joined by line breaks, the arguments of a tool
call are an object, keys whose value is null are left out (templates loop over null and fail), all other keys stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ajusta.base.errors import DataError

MAY_BE_BLANK = ("system", "tool", "function", "observation", "developer")


def text_of(value: object, name: str, remarks: list[str]) -> str:
    """Return `value` as text that is not blank; a number is accepted and remarked.

    Raises:
        DataError: null, blank, or neither text nor number.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        remarks.append(f"{name} is a number, read as text")
        value = str(value)
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise DataError(f"{name} is {kind}; expected text; fill it in or delete the row")
    if not value.strip():
        raise DataError(f"{name} is blank; expected text; fill it in or delete the row")
    check_characters(value, name)
    return value


def check_characters(text: str, name: str) -> None:
    """Refuse characters that no tokenizer can take.

    Raises:
        DataError: a NUL character, or half of a surrogate pair.
    """
    if "\0" in text:
        raise DataError(f"{name} holds a NUL character (position {text.index(chr(0))}); delete it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{name} holds half of a surrogate pair (position {error.start}); delete it") from error


def take_messages(value: object, remarks: list[str]) -> tuple[dict[str, object], ...]:
    """Bring a list of turns to the common form; roles keep their own names here (`roles.py` settles them).

    Raises:
        DataError: not a list of objects with role and content, or a turn without text.
    """
    if not isinstance(value, list):
        raise DataError(f"messages is a {type(value).__name__}; expected a list of turns")
    if not value:
        raise DataError("the conversation has no turns; delete the row")
    turns = [_turn(raw, number, remarks) for number, raw in enumerate(value, start=1)]
    return tuple(turn for turn in turns if turn is not None)


def _turn(raw: object, number: int, remarks: list[str]) -> dict[str, object] | None:
    if not isinstance(raw, Mapping):
        raise DataError(f"turn {number} is a {type(raw).__name__}; expected an object with role and content")
    turn = {str(key): item for key, item in raw.items() if item is not None}
    role = turn.pop("role", None) or turn.pop("from", None)
    if not isinstance(role, str) or not role.strip():
        raise DataError(f"turn {number} has no role; expected role and content (or from and value)")
    role = role.strip().lower()
    content = turn.pop("content", None) if "content" in turn else turn.pop("value", None)
    calls = _tool_calls(turn.pop("tool_calls", None), number)
    name = f"turn {number} ({role})"
    parts: dict[str, object] = {"role": role}
    if isinstance(content, list):
        content = _joined_parts(content, name)
    if isinstance(content, str) and not content.strip() and (calls or role in MAY_BE_BLANK):
        if role in ("system", "developer"):
            remarks.append("blank system turn left out")
            return None
        parts["content"] = content
    elif content is not None or not calls:
        parts["content"] = text_of(content, name, remarks)
    return {**parts, **turn, **({"tool_calls": calls} if calls else {})}


def _joined_parts(parts: list[object], name: str) -> str:
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(f"{name} has a part of type {kind}; expected text parts only; delete the row")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(value: object, number: int) -> list[dict[str, object]]:
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise DataError(f"tool_calls of turn {number} is no list of objects")
    return [_tool_call(call, number) for call in value]


def _tool_call(raw: Mapping[str, object], number: int) -> dict[str, object]:
    call = {key: item for key, item in raw.items() if item is not None}
    function = call.get("function")
    if isinstance(function, Mapping):
        inner = {key: item for key, item in function.items() if item is not None}
        call["function"] = _with_object_arguments(inner, number)
        return call
    return _with_object_arguments(call, number)


def _with_object_arguments(function: dict[str, object], number: int) -> dict[str, object]:
    """JSON text and object must render alike, so the arguments are always an object."""
    if not isinstance(function.get("name"), str):
        raise DataError(f"a tool call of turn {number} has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise DataError(f"tool arguments of turn {number} are no JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise DataError(f"tool arguments of turn {number} are a {type(arguments).__name__}; expected an object")
    return {**function, "arguments": arguments}
