"""Exams: questions with short checkable answers, and a strict grader.

The grader takes a given answer as right if an accepted one stands in it as whole words. Case and spacing do not count,
accents do. A letter, digit, underscore, combining mark, or a hyphen that joins letters makes a word longer: "tarn" is
not in "tarns" nor in "tarn-side"; "4" is not in "4.5". The caller gives the text of the first 12 generated tokens only.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ajusta.base.errors import DataError
from ajusta.data.encodings import decode
from ajusta.data.json_files import split_lines

GRADED_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question of an exam with the answers that count as right."""

    question: str
    accepted: tuple[str, ...]
    source: str  # "exam.jsonl:12"


def read_exam(path: Path) -> tuple[Question, ...]:
    """Read an exam: JSON lines with `question`, and `answer` as one string or a list of accepted ones.

    Raises:
        DataError: the file cannot be read, is empty, or a line is no question; all bad lines are listed.
    """
    try:
        text, _ = decode(path.read_bytes())
    except OSError as error:
        raise DataError(f"exam {path} cannot be read: {error.strerror}; expected a JSONL file") from error
    questions: list[Question] = []
    wrong: list[str] = []
    for number, line in enumerate(split_lines(text), start=1):
        if not line.strip():
            continue
        try:
            questions.append(_question(line, f"{path.name}:{number}"))
        except DataError as error:
            wrong.append(f"  {path.name}:{number}: {error}")
    if wrong or not questions:
        lines = "\n".join(wrong) or "  the file is empty"
        raise DataError(f'exam {path}: expected lines like {{"question": "...", "answer": "..."}}; mend:\n{lines}')
    return tuple(questions)


def _question(line: str, source: str) -> Question:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"no valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError("no JSON object")
    question, answer = record.get("question"), record.get("answer")
    accepted = answer if isinstance(answer, list) else [answer]
    texts = [_answer(item) for item in accepted]
    if not isinstance(question, str) or not question.strip():
        raise DataError("question is missing or blank")
    if not all(texts) or not texts:
        raise DataError("answer is missing, blank, or no text")
    return Question(question=question, accepted=tuple(texts), source=source)


def _answer(value: object) -> str:
    """Text or number as text; an empty string for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) and value.strip() else ""


def grade(answer_text: str, accepted: Sequence[str]) -> bool:
    """Return whether an accepted answer stands in `answer_text` as whole words."""
    given = _folded(answer_text)
    return any(_stands_in(_folded(wanted), given) for wanted in accepted)


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold()).split())


def _stands_in(wanted: str, given: str) -> bool:
    if not wanted:
        return False
    start = given.find(wanted)
    while start >= 0:
        end = start + len(wanted)
        before, after = given[:start][::-1], given[end:]
        if not _goes_on(wanted[0], before) and not _goes_on(wanted[-1], after):
            return True
        start = given.find(wanted, start + 1)
    return False


def _goes_on(edge: str, outside: str) -> bool:
    """Whether a word goes on from its edge character into the text outside (read away from the word)."""
    if not outside or not _in_word(edge):
        return bool(outside) and unicodedata.category(outside[0])[0] == "M"
    if _in_word(outside[0]):
        return True
    further = outside[1:2]
    if outside[0] == "-":
        return bool(further) and _in_word(further)
    return outside[0] in ".,:" and edge.isdigit() and further.isdigit()


def _in_word(character: str) -> bool:
    return character == "_" or unicodedata.category(character)[0] in "LNM"
