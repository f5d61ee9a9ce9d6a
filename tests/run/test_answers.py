"""Answers come in pieces that are whole text, and fit into the model's positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import settings, tune, write_data, write_exam, write_model

from ajusta.base.errors import UserError
from ajusta.base.events import Event, Note
from ajusta.data.chat import chat_prompt_ids
from ajusta.run import load
from ajusta.stages import answer as answering
from ajusta.stages.answer import Speaker

ASKED = [{"role": "user", "content": "Where is key 3?"}]
SAID = "\u00dcber \u6570\u636e, \u00e9\U0001f44d\U0001f3fd!"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuned GPT-2 with 128 positions."""
    place = tmp_path_factory.mktemp("narrow")
    base = write_model(place / "base", "gpt2", n_positions=128)
    tune(settings(base, write_data(place / "data"), place / "run", steps=1))
    return place / "run"


@pytest.fixture
def speaker(finished: Path) -> Speaker:
    return load(finished)


def test_the_pieces_are_the_answer(speaker: Speaker) -> None:
    pieces = list(speaker.answer(ASKED, max_tokens=20))
    assert len(pieces) > 1 and all(pieces)
    assert list(speaker.answer(ASKED, max_tokens=20)) == pieces
    drawn = ["".join(speaker.answer(ASKED, max_tokens=20, temperature=1.5, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_no_character_is_cut_in_two(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = speaker.tokenizer(SAID)["input_ids"]
    assert len(ids) == len(SAID.encode())
    ended = [*ids, speaker.end_token_ids[0], *ids]
    monkeypatch.setattr(answering, "stream", lambda *_, **__: iter([token] for token in ended))
    pieces = list(speaker.answer(ASKED))
    assert pieces == list(SAID)
    monkeypatch.setattr(answering, "stream", lambda *_, **__: iter([token] for token in ids[:-2]))
    assert "".join(speaker.answer(ASKED)).startswith(SAID[:-2])


def test_an_old_history_gives_way_and_that_is_said(narrow: Path) -> None:
    told: list[Event] = []
    speaker = load(narrow, told.append)
    turns = []
    for number in range(6):
        turns += [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": f"It is {number}."},
        ]
    turns.append({"role": "user", "content": "And now?"})
    prompt = speaker.prompt_ids(turns, room_for=30)
    assert len(prompt) + 30 <= 128
    assert prompt == chat_prompt_ids(speaker.tokenizer, turns[10:])
    notes = [event.text for event in told if isinstance(event, Note)]
    assert notes == ["the 10 oldest turns were left out: the model takes 128 tokens at most"]
    with_system = [{"role": "system", "content": "Be kind."}, *turns]
    assert speaker.tokenizer.decode(speaker.prompt_ids(with_system, room_for=30)).count("Be kind.") == 1


def test_an_answer_ends_where_the_positions_end(narrow: Path) -> None:
    speaker = load(narrow)
    asked = [{"role": "user", "content": "x" * 20}]
    room = 128 - len(speaker.prompt_ids(asked, room_for=1000))
    assert room >= 64
    speaker.end_token_ids = ()
    pieces = "".join(speaker.answer(asked, max_tokens=1000))
    assert pieces
    with pytest.raises(UserError, match="expected at most 64, the model's 128 positions"):
        list(speaker.answer([{"role": "user", "content": "x" * 200}]))


def test_a_question_of_an_exam_that_is_too_long_is_named_before_training(narrow: Path, tmp_path: Path) -> None:
    exam = write_exam(tmp_path / "exam.jsonl")
    exam.write_text('{"question": "' + "x" * 200 + '", "answer": "y"}\n', encoding="utf-8")
    place = narrow.parent
    with pytest.raises(UserError, match=r"the question of exam\.jsonl:1 has \d+ tokens; expected at most 116"):
        tune(settings(place / "base", place / "data", tmp_path / "run", steps=1, exam=[str(exam)]))


def test_long_data_is_cut_to_the_models_positions_and_that_is_said(narrow: Path, tmp_path: Path) -> None:
    place = narrow.parent
    record, told = tune(settings(place / "base", place / "data", tmp_path / "run", steps=1, max_length=512))
    assert record.data.longest <= 128
    assert "max_length lowered from 512 to 128" in " ".join(event.text for event in told if isinstance(event, Note))
    assert torch.isfinite(torch.tensor(record.trained.last_loss))
