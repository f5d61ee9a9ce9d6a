"""Sequences are cut to the longest length that is trained: documents into windows, conversations at their end.

A document's windows overlap by context tokens that are not trained again, so each token is a label exactly once (the
very first one cannot be predicted where the tokenizer has no BOS). Each window starts with the opening (BOS), as a
model that has one expects of every sequence:

    window 0   [bos] t0 t1 t2 t3                trained t0..t3
    window 1   [bos] t3 | t4 t5 t6              trained t4..t6, one token of context (or `overlap` of them)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ajusta.base.errors import DataError
from ajusta.spec.data import IntArray


@dataclass(frozen=True, kw_only=True)
class Window:
    """A sequence that fits: ids [S], trained [S], and how many tokens and trained tokens were cut off behind it."""

    ids: IntArray
    trained: NDArray[np.bool_]
    lost: int = 0
    lost_trained: int = 0


def document_windows(
    ids: Sequence[int] | IntArray, opening: Sequence[int], *, max_length: int, overlap: int = 0
) -> tuple[Window, ...]:
    """Cut a document (ids without its opening, eos included) into windows of at most `max_length` tokens.

    Raises:
        DataError: `max_length` leaves no room for a new token beside opening and overlap.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    head = np.asarray(opening, dtype=np.int64)
    context = max(1, overlap)
    room = max_length - len(head) - context
    if room < 1:
        raise DataError(
            f"max_length {max_length} with overlap {overlap} leaves no room for new tokens; expected at least "
            f"{len(head) + context + 1}; raise max_length or lower overlap"
        )
    first = max_length - len(head)
    windows = [_window(head, tokens[:first], context=0)]
    for start in range(first, len(tokens), room):
        windows.append(_window(head, tokens[start - context : start + room], context=context))
    return tuple(windows)


def _window(head: IntArray, tokens: IntArray, *, context: int) -> Window:
    ids = np.concatenate([head, tokens])
    trained = np.ones(len(ids), dtype=np.bool_)
    trained[: max(1, len(head) + context)] = False
    return Window(ids=ids, trained=trained)


def cut_conversation(ids: IntArray, trained: NDArray[np.bool_], *, max_length: int) -> Window:
    """Keep a conversation from its start up to `max_length` tokens; the window says what was lost."""
    kept = trained[:max_length]
    return Window(
        ids=ids[:max_length],
        trained=kept,
        lost=max(0, len(ids) - max_length),
        lost_trained=int(trained.sum() - kept.sum()),
    )
