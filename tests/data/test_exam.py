"""Exams are read with every mistake named, and graded strictly."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajusta.base.errors import DataError
from ajusta.data.exam import grade, read_exam


@pytest.mark.parametrize(
    ("given", "accepted", "right"),
    [
        ("The tarn.", ["tarn"], True),
        ("the TARN!", ["Tarn"], True),
        ("(tarn)", ["tarn"], True),
        ("tarns", ["tarn"], False),
        ("tarn-side", ["tarn"], False),
        ("forty-six", ["six"], False),
        ("tarn - it is", ["tarn"], True),
        ("a tarn\u2014deep", ["tarn"], True),
        ("the tarn's edge", ["tarn"], True),
        ("tarn_1", ["tarn"], False),
        ("146", ["46"], False),
        ("46", ["46"], True),
        ("46.", ["46"], True),
        ("46.5", ["46"], False),
        ("1,846", ["846"], False),
        ("In 1846, it burned", ["1846"], True),
        ("a  two\nwords b", ["two words"], True),
        ("tarns and a tarn", ["tarn"], True),
        ("se\u00f1ora pen\u0303a", ["Pe\u00f1a"], True),
        ("pena", ["pe\u00f1a"], False),
        ("tarn\u0301", ["tarn"], False),
        ("STRASSE", ["Stra\u00dfe"], True),
        ("b", ["a", "b"], True),
        ("", ["a"], False),
        ("anything", [""], False),
        ("costs $5 now", ["$5"], True),
        ("C++ and", ["C++"], True),
    ],
)
def test_grade(given: str, accepted: list[str], right: bool) -> None:
    assert grade(given, accepted) is right


WORD = st.text(alphabet="abcde\u00e9", min_size=1, max_size=4)


@given(words=st.lists(WORD, max_size=6), wanted=WORD)
def test_single_words_are_right_exactly_if_they_are_among_the_words(words: list[str], wanted: str) -> None:
    assert grade(", ".join(words).upper(), [wanted]) is (wanted in words)


def test_read_exam(tmp_path: Path) -> None:
    path = tmp_path / "exam.jsonl"
    path.write_text('{"question": "Q1", "answer": "a"}\n\n{"question": "Q2", "answer": ["b", 4]}\n')
    first, second = read_exam(path)
    assert (first.question, first.accepted, first.source) == ("Q1", ("a",), "exam.jsonl:1")
    assert (second.accepted, second.source) == (("b", "4"), "exam.jsonl:3")


def test_every_mistake_is_named(tmp_path: Path) -> None:
    path = tmp_path / "exam.jsonl"
    path.write_text('{"question": "Q", "answer": []}\n{"answer": "a"}\n[1]\n{"q\n{"question": "Q", "answer": [" "]}\n')
    with pytest.raises(DataError) as caught:
        read_exam(path)
    assert [f"exam.jsonl:{line}:" in str(caught.value) for line in range(1, 6)] == [True] * 5
    path.write_text("")
    with pytest.raises(DataError, match="the file is empty"):
        read_exam(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_exam(tmp_path / "none.jsonl")
