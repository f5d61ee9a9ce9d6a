"""The formats of a record, and what becomes of tool calls."""

from __future__ import annotations

import pytest

from ajusta.base.errors import DataError
from ajusta.data.rows import take_row
from ajusta.spec.data import Row

TURNS = [("user", "Q"), ("assistant", "A")]


def _turns(record: object) -> list[tuple[object, object]]:
    row, _ = take_row(record, "f:1")
    assert row.messages is not None
    return [(turn["role"], turn.get("content")) for turn in row.messages]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Q"}]},
                {"role": "assistant", "content": "A"},
            ]
        },
        {"instruction": "Q", "input": "", "output": "A"},
        {"instruction": "Q", "output": "A"},
        {"prompt": "Q", "completion": "A"},
        {"prompt": [{"role": "user", "content": "Q"}], "completion": [{"role": "assistant", "content": "A"}]},
        {" Question": "Q", "ANSWER ": "A"},
        {"question": "Q", "answer": "A", "system": None},
    ],
)
def test_formats_of_two_turns(record: object) -> None:
    assert _turns(record) == TURNS


def test_sharegpt_input_and_system() -> None:
    assert _turns(
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "system": "S"}
    ) == [
        ("system", "S"),
        ("human", "Q"),
        ("gpt", "A"),
    ]
    assert _turns({"instruction": "Q", "input": "I", "output": "A"})[0] == ("user", "Q\n\nI")
    assert _turns({"question": "Q", "answer": "A", "system": "S"})[0] == ("system", "S")


def test_text_is_a_document_kept_as_it_is_and_unused_keys_are_remarked() -> None:
    row, remarks = take_row({"text": "  x\n", "id": 3}, "f:1")
    assert row == Row(source="f:1", text="  x\n")
    assert remarks == ("key 'id' is not used",)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (["a"], "a JSON list"),
        ("a", "a JSON text"),
        (None, "a JSON null"),
        ({"chosen": "a", "rejected": "b"}, "keys chosen, rejected"),
        ({"question": "q", "answer": ["a"]}, "answer is a list"),
        ({"messages": "x"}, "messages is a str"),
        ({"messages": []}, "no turns"),
        ({"messages": ["x"]}, "turn 1 is a str"),
        ({"messages": [{"content": "x"}]}, "turn 1 has no role"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]},
            "turn 2 (assistant) is null",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type image_url"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}]}, "no function name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "no JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]},
            "are a int",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "{"}, "tools is text that is no JSON"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}, "tools is a object"),
    ],
)
def test_refusals_say_what_came(record: object, words: str) -> None:
    with pytest.raises(DataError) as caught:
        take_row(record, "f:1")
    assert words in str(caught.value)


def test_tool_calls_are_brought_to_objects_without_null_keys() -> None:
    def row(arguments: object, **content: object) -> Row:
        call = {"id": None, "type": "function", "function": {"name": "f", "arguments": arguments, "strict": None}}
        turn = {"role": "assistant", "tool_calls": [call, call], "name": None, **content}
        asked = {"role": "user", "content": "q", "tool_calls": None}
        return take_row(
            {"messages": [asked, turn, {"role": "tool", "content": ""}], "tools": '[{"name": "f"}]'}, "f:1"
        )[0]

    as_object, as_text = row({"x": "é", "y": [1]}), row('{"x": "é", "y": [1]}')
    assert as_object == as_text == row({"x": "é", "y": [1]}, content=None)
    assert as_object.tools == ({"name": "f"},)
    assert as_object.messages is not None
    user, call, result = as_object.messages
    assert user == {"role": "user", "content": "q"} and result == {"role": "tool", "content": ""}
    function = {"name": "f", "arguments": {"x": "é", "y": [1]}}
    assert call == {"role": "assistant", "tool_calls": [{"type": "function", "function": function}] * 2}
    assert row("", content="").messages[1]["content"] == ""  # type: ignore[index]


def test_blank_system_turn_is_left_out() -> None:
    row, remarks = take_row({"messages": [{"role": "system", "content": " "}, {"role": "user", "content": "q"}]}, "f:1")
    assert row.messages == ({"role": "user", "content": "q"},)
    assert remarks == ("blank system turn left out",)
