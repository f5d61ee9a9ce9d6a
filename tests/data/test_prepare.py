"""The whole road: rows in, examples and a full account out."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from ajusta.base.errors import DataError
from ajusta.data.prepare import Prepared, prepare
from ajusta.data.readers import Reading
from ajusta.data.show import colour_segments, describe, token_histogram
from ajusta.data.tokens import encode
from ajusta.spec.data import Row

Maker = Callable[..., PreTrainedTokenizerFast]


def _chat(number: int, answer: str = "By the river.") -> Row:
    asked: dict[str, object] = {"role": "user", "content": f"Where is {number}?"}
    return Row(source=f"c.jsonl:{number}", messages=(asked, {"role": "assistant", "content": answer}))


def _doc(text: str) -> Row:
    return Row(source="d.txt:1", text=text)


def _prepare(tokenizer: PreTrainedTokenizerFast, *rows: Row, **options: object) -> Prepared:
    settings: dict[str, object] = {"max_length": 64, "heldout_fraction": 0.0, "seed": 0, **options}
    return prepare(Reading(rows=tuple(rows), files=1), tokenizer, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_document_of_one_line_is_trained_token_by_token_once(make_tokenizer: Maker, adds_bos: bool) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    text = "The tarn lies in the north of the valley. " * 200
    prepared = _prepare(tokenizer, _doc(text), max_length=32)
    labels = [int(token) for example in prepared.train for token in example.ids[example.trained]]
    expected = [*encode(tokenizer, text), tokenizer.eos_token_id]
    assert labels == (expected if adds_bos else expected[1:])
    assert prepared.summary.longest <= 32 and prepared.summary.trained_tokens == len(labels)
    assert all(example.ids.tolist().count(tokenizer.bos_token_id) == adds_bos for example in prepared.train)
    assert [example.example_id for example in prepared.train] == list(range(len(prepared.train)))
    assert "documents longer than max_length, cut into windows: 1" in prepared.summary.notes


def test_a_text_that_prints_bos_and_eos_itself_has_one_of_each(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    (example,) = _prepare(tokenizer, _doc("<s>The mill.<|im_end|>")).train
    assert tokenizer.decode(example.ids) == "<s>The mill.<|im_end|>" and example.trained[-1]


def test_the_account_is_whole(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer()
    rows = [_chat(number) for number in range(20)] + [_chat(90, "long " * 80), _doc("The mill burned in 1846.")]
    long_question = Row(
        source="c.jsonl:91",
        messages=({"role": "user", "content": "long " * 80}, {"role": "assistant", "content": "x"}),
    )
    unanswered = Row(source="c.jsonl:92", messages=({"role": "user", "content": "x"},))
    quoting = _chat(93, "Say <|im_end|>!")
    prepared = _prepare(tokenizer, *rows, long_question, unanswered, quoting, heldout_fraction=0.2)
    account = prepared.summary
    assert account.rows_read == 25
    assert account.train_examples + account.heldout_examples == 23 and account.heldout_examples >= 1
    reasons = {item.source: item.reason for item in account.dropped}
    assert set(reasons) == {"c.jsonl:91", "c.jsonl:92"}
    assert "max_length is 64" in reasons["c.jsonl:91"] and "no assistant turn" in reasons["c.jsonl:92"]
    (cut,) = [note for note in account.notes if "cut at their end" in note]
    assert "c.jsonl:90" in cut and ": 1, " in cut
    assert "rows whose text holds '<|im_end|>', which is read as that special token: 1" in account.notes
    assert account.train_tokens == sum(account.lengths) == sum(len(example) for example in prepared.train)
    assert account.heldout_tokens == sum(len(example) for example in prepared.heldout)
    for example in (*prepared.train, *prepared.heldout):
        assert example.num_trained and not example.trained[0] and example.ids.dtype == np.int64
    ids = [example.example_id for example in (*prepared.train, *prepared.heldout)]
    assert ids == list(range(23))
    lines = describe(prepared)
    assert any("c.jsonl:91" in line for line in lines) and lines[0] == "1 files, 25 rows read, 2 items dropped"
    with pytest.raises(DataError, match=r"2 rows cannot be used \(strict\)"):
        _prepare(tokenizer, *rows, long_question, unanswered, strict=True)


def test_model_limit_lowers_the_length_with_a_note(make_tokenizer: Maker) -> None:
    prepared = _prepare(make_tokenizer(), _doc("The mill. " * 100), max_length=512, model_limit=16)
    assert prepared.summary.longest == 16
    assert "max_length lowered from 512 to 16, the most that the model can take" in prepared.summary.notes


def test_impossible_settings_and_empty_results_are_refused(make_tokenizer: Maker) -> None:
    with pytest.raises(DataError, match="leaves no room"):
        _prepare(make_tokenizer(), _doc("x"), max_length=8, overlap=8)
    with pytest.raises(DataError, match=r"no row is left to train on.*\n.*c\.jsonl:1: no assistant turn"):
        _prepare(make_tokenizer(), Row(source="c.jsonl:1", messages=({"role": "user", "content": "x"},)))


def test_overlap_gives_context_that_is_not_trained(make_tokenizer: Maker) -> None:
    prepared = _prepare(make_tokenizer(), _doc("The mill burned. " * 30), max_length=16, overlap=4)
    assert all((~example.trained[:4]).all() and example.trained[4] for example in prepared.train[1:])


def test_several_answers_of_one_row_keep_its_line(make_tokenizer: Maker) -> None:
    turns = [("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "d")]
    row = Row(source="c.jsonl:7", messages=tuple({"role": role, "content": text} for role, text in turns))
    prepared = _prepare(make_tokenizer("stripping"), row)
    assert [example.source for example in prepared.train] == ["c.jsonl:7 (answer 1)", "c.jsonl:7 (answer 2)"]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_coloured_segments_join_to_the_text(make_tokenizer: Maker, kind: str) -> None:
    tokenizer = make_tokenizer(kind=kind)
    (example,) = _prepare(tokenizer, _chat(1, "In the river.")).train
    segments = colour_segments(example, tokenizer)
    assert "".join(text for text, _ in segments) == tokenizer.decode(example.ids)
    assert [text.strip() for text, trained in segments if trained] == ["In the river.<|im_end|>"]


def test_histogram_counts_every_example(make_tokenizer: Maker) -> None:
    prepared = _prepare(make_tokenizer(), *[_chat(number, "so " * number) for number in range(1, 15)])
    rows = token_histogram(prepared.summary)
    assert sum(count for _, _, count in rows) == 14
    for low, high, count in rows:
        assert count == sum(low <= length <= high for length in prepared.summary.lengths)
    assert all(rows[place][1] + 1 == rows[place + 1][0] for place in range(len(rows) - 1))


def test_no_torch_on_this_floor() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("ajusta.data")]
    assert modules and not any(hasattr(module, "torch") for module in modules)
