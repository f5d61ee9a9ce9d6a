"""Conversations become ids with a trained mark on exactly the assistant's turns and their turn ends.

No marks in the template are needed. For an assistant turn i, with P_i = template(turns before i, with the generation
prompt) and F_i = template(turns up to i):

    F_i = P_i | answer, turn end | rest     trained: from the end of P_i through the first end token behind the answer

If every F_i is a prefix of the last one, the conversation is one example with all its turns trained. If not, the
template rewrites earlier turns (it strips reasoning, say), and each assistant turn becomes an example of its own, F_i
with only turn i trained: exactly the text that the model sees at chat time. Where F_i does not start with P_i, the
answer is found by rendering the turn with another content and comparing. Everything goes by position: pad = eos hides
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ajusta.data.roles import Message, settle
from ajusta.data.template import Tools, ensure_template, folds_system, render, renderable
from ajusta.data.tokens import Encoded, encode, encode_turns, missing_opening, opening_ids
from ajusta.spec.data import IntArray, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of these three, one differs from any answer in its first and in its last letter.
_SENTINELS = ("Qz7 sentinel 7zQ", "9kW sentinel Wk9", "~xY sentinel Yx~")


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """What has to be known of a tokenizer to render conversations, found out once."""

    tokenizer: PreTrainedTokenizerBase
    opening: tuple[int, ...]  # (bos,) or nothing
    end_ids: frozenset[int]
    end_id: int | None  # eos: put where a template leaves the last turn open
    fold_system: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Marked:
    """One sequence with its trained mark, not yet cut to a length."""

    ids: IntArray  # [S]
    trained: NDArray[np.bool_]  # [S]


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as one sequence, or as one a turn, with the policies that were applied."""

    sequences: tuple[Marked, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """One assistant turn: P_i, F_i, and the characters of F_i where the answer starts and where its tail starts."""

    prompt: str
    whole: str
    start: int
    tail: int  # the first character behind the answer: turn end, line break


def chat_format(tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int] = ()) -> ChatFormat:
    """Look at a tokenizer once; without a template it is given the default one. Further end tokens may be named."""
    note = ensure_template(tokenizer)
    eos = tokenizer.eos_token_id
    ends = frozenset(int(index) for index in end_token_ids) | (frozenset() if eos is None else {int(eos)})
    warning = "the tokenizer has no end token: a tuned model will not know where to stop" if not ends else None
    return ChatFormat(
        tokenizer=tokenizer,
        opening=opening_ids(tokenizer),
        end_ids=ends,
        end_id=int(eos) if eos is not None else min(ends, default=None),
        fold_system=folds_system(tokenizer),
        notes=tuple(text for text in (note, warning) if text),
    )


def chat_prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    *,
    system: str | None = None,
    tools: Tools = None,
) -> list[int]:
    """Return the ids [S] that ask for the next answer: those before the same answer in training, one by one.

    Raises:
        DataError: the conversation does not end with a user turn, or the template refuses it.
    """
    chat = chat_format(tokenizer)
    turns = settle(messages, system=system, fold_system=chat.fold_system, training=False)
    variant = renderable(tokenizer, turns.messages, tools)
    text = render(tokenizer, variant, tools, prompt=True)
    answers = [index for index, turn in enumerate(variant) if turn["role"] == "assistant"]
    prompts = [render(tokenizer, variant[:index], tools, prompt=True) for index in answers]
    ids = encode_turns(tokenizer, text, _boundaries(text, prompts)).ids
    return [*missing_opening(ids, chat.opening), *ids]


def render_conversation(chat: ChatFormat, row: Row, *, system: str | None = None) -> Rendered:
    """Render a row's conversation into sequences of ids with their trained marks.

    Raises:
        DataError: an unknown role, no assistant turn, or a template that refuses.
    """
    assert row.messages is not None
    turns = settle(row.messages, system=system, fold_system=chat.fold_system, training=True)
    variant = renderable(chat.tokenizer, turns.messages, row.tools)
    notes = list(turns.notes)
    answers = [index for index, turn in enumerate(variant) if turn["role"] == "assistant"]
    asked = [_turn(chat.tokenizer, variant[: index + 1], row.tools) for index in answers]
    last = asked[-1].whole
    if row.tools and last == render(chat.tokenizer, variant, None, prompt=False):
        notes.append("tools list left out (the chat template does not show it)")
    if all(last.startswith(turn.whole) for turn in asked):
        return Rendered(sequences=(_marked(chat, asked, trained=asked),), notes=tuple(notes))
    notes.append("one example for each answer (the chat template rewrites earlier turns)")
    sequences = [_marked(chat, asked[: count + 1], trained=[turn]) for count, turn in enumerate(asked)]
    return Rendered(sequences=tuple(sequences), notes=tuple(notes))


def _boundaries(text: str, prompts: Sequence[str]) -> list[int]:
    """Characters of `text` where answers start, as chat time saw it: the ends of the prompts that it begins with."""
    return sorted({len(prompt) for prompt in prompts if text.startswith(prompt)})


def _turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools) -> _Turn:
    """Render the last turn of `messages`, an assistant's, and find the answer in it."""
    *before, answer = messages
    prompt = render(tokenizer, before, tools, prompt=True)
    whole = render(tokenizer, messages, tools, prompt=False)
    content = str(answer.get("content", "")).strip()
    sentinel = next(text for text in _SENTINELS if content[:1] != text[0] and content[-1:] != text[-1])
    twin = render(tokenizer, [*before, {**answer, "content": sentinel}], tools, prompt=False)
    start = len(prompt) if whole.startswith(prompt) else _shared(whole, twin)
    tail = len(whole) - _shared(whole[start:][::-1], twin[start:][::-1])
    return _Turn(prompt=prompt, whole=whole, start=start, tail=tail)


def _shared(one: str, other: str) -> int:
    """Length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _marked(chat: ChatFormat, turns: Sequence[_Turn], *, trained: Sequence[_Turn]) -> Marked:
    """Encode the last turn's text and mark the `trained` turns; a last turn without an end token is given eos."""
    last = turns[-1]
    ended = any(index in chat.end_ids for index in encode(chat.tokenizer, last.whole[last.tail :]))
    text = last.whole if ended else last.whole[: last.start] + last.whole[last.start :].rstrip()
    boundaries = sorted({*_boundaries(text, [turn.prompt for turn in turns]), *(turn.start for turn in trained)})
    encoded = encode_turns(chat.tokenizer, text, boundaries)
    token_at = dict(zip(boundaries, encoded.starts, strict=True))
    closing = [] if ended or chat.end_id is None else [chat.end_id]
    opening = missing_opening(encoded.ids, chat.opening)
    mark = np.zeros(len(encoded.ids), dtype=np.bool_)
    for turn in trained:
        start = token_at[turn.start]
        mark[start : _stop(chat, encoded, start, turn)] = True
    ids = np.asarray([*opening, *encoded.ids, *closing], dtype=np.int64)
    whole_mark = np.concatenate([np.zeros(len(opening), np.bool_), mark, np.ones(len(closing), np.bool_)])
    whole_mark[:1] = False
    return Marked(ids=ids, trained=whole_mark)


def _stop(chat: ChatFormat, encoded: Encoded, start: int, turn: _Turn) -> int:
    """Index behind the last trained token of a turn: its end token, or the last token that is not blank."""
    visible = turn.start + len(turn.whole[turn.start :].rstrip())
    stop = start
    for index in range(start, len(encoded.ids)):
        first = encoded.offsets[index][0]
        if first >= len(turn.whole):
            break
        if first >= turn.tail and encoded.ids[index] in chat.end_ids:
            return index + 1
        if first < visible:
            stop = index + 1
    return stop
