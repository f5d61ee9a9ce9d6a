"""The whole road from rows to examples, with an account in which nothing that was given is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ajusta.base.errors import DataError
from ajusta.data.chat import ChatFormat, chat_format, render_conversation
from ajusta.data.readers import Reading, list_dropped
from ajusta.data.split import split
from ajusta.data.tokens import encode
from ajusta.data.windows import Window, cut_conversation, document_windows
from ajusta.spec.data import DataSummary, Dropped, Example, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_NAMED = 20  # rows named in one note; the count is always whole


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Examples to train on and to evaluate on, and the account of the data."""

    train: tuple[Example, ...]
    heldout: tuple[Example, ...]
    summary: DataSummary


@dataclass(frozen=True, kw_only=True)
class _Settings:
    chat: ChatFormat
    max_length: int
    overlap: int
    system: str | None
    special_texts: tuple[str, ...]


@dataclass(kw_only=True)
class _Account:
    """Grows while rows are turned into sequences."""

    counts: Counter[str] = field(default_factory=Counter)
    cut: list[str] = field(default_factory=list)
    cut_trained: int = 0
    dropped: list[Dropped] = field(default_factory=list)


def prepare(
    reading: Reading,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    heldout_fraction: float,
    seed: int,
    system: str | None = None,
    end_token_ids: Sequence[int] = (),
    overlap: int = 0,
    model_limit: int | None = None,
    strict: bool = False,
) -> Prepared:
    """Turn rows into examples of at most `max_length` tokens (lowered to `model_limit`), split into train and held-out.

    A tokenizer without a chat template is given the default one, here and for good. `end_token_ids` is the list of
    generation_config. With `strict`, a single dropped row is an error.

    Raises:
        DataError: nothing is left to train on; `overlap` does not fit; `strict` and something was dropped.
    """
    chat = chat_format(tokenizer, end_token_ids)
    notes = [*reading.notes, *chat.notes]
    if model_limit is not None and max_length > model_limit:
        notes.append(f"max_length lowered from {max_length} to {model_limit}, the most that the model can take")
        max_length = model_limit
    specials = tuple(text for text in tokenizer.all_special_tokens if text)
    settings = _Settings(chat=chat, max_length=max_length, overlap=overlap, system=system, special_texts=specials)
    document_windows([], chat.opening, max_length=max_length, overlap=overlap)  # refuses lengths that cannot work
    account = _Account()
    sides = split(reading.rows, heldout_fraction, seed)
    train = _examples([reading.rows[index] for index in sides.train], settings, account, first_id=0)
    heldout = _examples([reading.rows[index] for index in sides.heldout], settings, account, first_id=len(train))
    dropped = (*reading.dropped, *account.dropped)
    if not train or (strict and account.dropped):
        what = "no row is left to train on" if not train else f"{len(account.dropped)} rows cannot be used (strict)"
        raise DataError(f"{what}; expected rows with text to learn; mend these:\n{list_dropped(dropped)}")
    notes += [*sides.notes, *_notes_of(account, max_length)]
    summary = _summarize(reading, train, heldout, dropped, tuple(notes))
    return Prepared(train=train, heldout=heldout, summary=summary)


def _summarize(
    reading: Reading,
    train: tuple[Example, ...],
    heldout: tuple[Example, ...],
    dropped: tuple[Dropped, ...],
    notes: tuple[str, ...],
) -> DataSummary:
    return DataSummary(
        files=reading.files,
        rows_read=len(reading.rows),
        train_examples=len(train),
        heldout_examples=len(heldout),
        train_tokens=sum(len(example) for example in train),
        heldout_tokens=sum(len(example) for example in heldout),
        trained_tokens=sum(example.num_trained for example in train),
        longest=max(len(example) for example in (*train, *heldout)),
        dropped=dropped,
        notes=notes,
        lengths=tuple(len(example) for example in train),
    )


def _notes_of(account: _Account, max_length: int) -> list[str]:
    notes = [f"{text}: {count}" for text, count in account.counts.items()]
    if account.cut:
        named = ", ".join(account.cut[:_MOST_NAMED])
        more = f" and {len(account.cut) - _MOST_NAMED} more" if len(account.cut) > _MOST_NAMED else ""
        notes.append(
            f"conversations longer than max_length {max_length} cut at their end: {len(account.cut)}, "
            f"{account.cut_trained} trained tokens lost ({named}{more}); raise max_length to keep them"
        )
    return notes


def _examples(rows: Sequence[Row], settings: _Settings, account: _Account, *, first_id: int) -> tuple[Example, ...]:
    examples: list[Example] = []
    for row in rows:
        try:
            windows = _document(row, settings, account) if row.text is not None else _chat(row, settings, account)
        except DataError as error:
            account.dropped.append(Dropped(source=row.source, reason=str(error)))
            continue
        for source, window in windows:
            index = first_id + len(examples)
            examples.append(Example(ids=window.ids, trained=window.trained, source=source, example_id=index))
    return tuple(examples)


def _document(row: Row, settings: _Settings, account: _Account) -> list[tuple[str, Window]]:
    """The windows of a plain document, which ends with a trained eos."""
    assert row.text is not None
    chat = settings.chat
    _count_special(row.text, settings, account)
    ids = encode(chat.tokenizer, row.text)
    if chat.opening and tuple(ids[: len(chat.opening)]) == chat.opening:  # the text itself prints the BOS
        ids = ids[len(chat.opening) :]
    if chat.end_id is not None and ids[-1:] != [chat.end_id]:
        ids.append(chat.end_id)
    windows = document_windows(ids, chat.opening, max_length=settings.max_length, overlap=settings.overlap)
    useful = [window for window in windows if window.trained.any()]
    if not useful:
        raise DataError("no trained token: a single token has nothing before it; delete the row")
    if len(windows) > 1:
        account.counts["documents longer than max_length, cut into windows"] += 1
        account.counts["windows of such documents"] += len(windows)
    return [(row.source, window) for window in useful]


def _chat(row: Row, settings: _Settings, account: _Account) -> list[tuple[str, Window]]:
    """The sequences of a conversation, cut where they are too long."""
    assert row.messages is not None
    rendered = render_conversation(settings.chat, row, system=settings.system)
    _count_special("\n".join(str(turn.get("content", "")) for turn in row.messages), settings, account)
    account.counts.update(rendered.notes)
    several = len(rendered.sequences) > 1
    kept: list[tuple[str, Window]] = []
    for number, marked in enumerate(rendered.sequences, start=1):
        source = f"{row.source} (answer {number})" if several else row.source
        window = cut_conversation(marked.ids, marked.trained, max_length=settings.max_length)
        if not window.trained.any():
            account.dropped.append(Dropped(source=source, reason=_why_untrained(marked.trained, settings.max_length)))
            continue
        if window.lost:
            account.cut.append(source)
            account.cut_trained += window.lost_trained
        kept.append((source, window))
    return kept


def _why_untrained(trained: np.ndarray[tuple[int], np.dtype[np.bool_]], max_length: int) -> str:
    if not trained.any():
        return "no trained token: the chat template shows nothing of the assistant's turns"
    prompt = int(np.flatnonzero(trained)[0])
    return (
        f"no trained token: the prompt alone has {prompt} tokens, max_length is {max_length}; raise it or cut the row"
    )


def _count_special(text: str, settings: _Settings, account: _Account) -> None:
    for special in settings.special_texts:
        if special in text:
            account.counts[f"rows whose text holds {special!r}, which is read as that special token"] += 1
