"""CSV: quoted breaks, huge cells, delimiters, ragged lines."""

from __future__ import annotations

import pytest

from ajusta.base.errors import DataError
from ajusta.data.tables import read_table, sniff


def _pairs(text: str) -> list[tuple[object, object]]:
    rows = read_table(text, "t.csv").rows
    return [(row.messages[0]["content"], row.messages[1]["content"]) for row in rows if row.messages]


def test_quoted_breaks_quotes_commas_and_a_huge_cell_stay_byte_exact() -> None:
    answer = 'one\r\ntwo\nthree, "four"'
    quoted = answer.replace('"', '""')
    huge = "x" * 200_000
    text = f'Question, Answer ,id\r\nq1,"{quoted}",1\r\nq2,{huge},2\r\n'
    assert _pairs(text) == [("q1", answer), ("q2", huge)]
    found = read_table(text, "t.csv")
    assert found.notes == ("t.csv: comma-separated, columns used: question, answer; not used: id",)
    assert not found.counts
    assert [row.source for row in found.rows] == ["t.csv:2", "t.csv:5"]


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_delimiter_is_found(mark: str) -> None:
    text = f"prompt{mark}completion\na, b; c\td | e{mark}x\n".replace(
        f"a, b; c\td | e{mark}", f'"a, b; c\td | e"{mark}'
    )
    assert sniff(text) == mark
    assert _pairs(text) == [("a, b; c\td | e", "x")]


def test_single_text_column_with_commas() -> None:
    found = read_table("text\nOne, two, three.\nFour, five.\n", "t.csv")
    assert [row.text for row in found.rows] == ["One, two, three.", "Four, five."]


def test_ragged_broken_and_blank_records_are_named_with_their_line() -> None:
    text = 'question,answer\nq,a\nq2,a,b\nq3\n\nq4,""\nq5,"a"x\nq6,b\nq7,"open\nq8,c\n'
    found = read_table(text, "t.csv")
    assert [row.source for row in found.rows] == ["t.csv:2", "t.csv:8"]
    reasons = {item.source: item.reason for item in found.dropped}
    assert list(reasons) == ["t.csv:3", "t.csv:4", "t.csv:6", "t.csv:7", "t.csv:9"]
    assert "3 fields, but the header has 2" in reasons["t.csv:3"]
    assert "blank" in reasons["t.csv:6"]
    assert "quotes" in reasons["t.csv:9"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "empty"), ("a,b\n1,2\n", "columns a, b"), ("text,Text\n1,2\n", "twice"), ('"open', "line 1")],
)
def test_files_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_table(text, "t.csv")
