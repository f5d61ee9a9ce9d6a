"""Windows: each token of a document is trained exactly once, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajusta.base.errors import DataError
from ajusta.data.windows import cut_conversation, document_windows


@given(
    count=st.integers(1, 200),
    max_length=st.integers(2, 40),
    overlap=st.integers(0, 12),
    bos=st.lists(st.just(-1), max_size=2),
)
def test_every_token_is_a_label_exactly_once(count: int, max_length: int, overlap: int, bos: list[int]) -> None:
    tokens = list(range(count))
    if max_length <= len(bos) + max(1, overlap):
        with pytest.raises(DataError, match="leaves no room"):
            document_windows(tokens, bos, max_length=max_length, overlap=overlap)
        return
    windows = document_windows(tokens, bos, max_length=max_length, overlap=overlap)
    labels = [int(token) for window in windows for token in window.ids[window.trained]]
    assert labels == (tokens if bos else tokens[1:])
    for number, window in enumerate(windows):
        body = window.ids[len(bos) :].tolist()
        assert len(window.ids) <= max_length and window.ids[: len(bos)].tolist() == bos
        assert body == list(range(body[0], body[0] + len(body)))  # nothing between is missing
        assert not window.trained[0]
        context = int((~window.trained).sum()) - len(bos)
        assert context == (max(1, overlap) if number else 0 if bos else 1)


def test_conversation_keeps_its_start_and_counts_what_is_lost() -> None:
    ids, trained = np.arange(10), np.array([False] * 4 + [True, True, False, False, True, True])
    window = cut_conversation(ids, trained, max_length=9)
    assert window.ids.tolist() == list(range(9))
    assert (window.lost, window.lost_trained) == (1, 1)
    whole = cut_conversation(ids, trained, max_length=10)
    assert (len(whole.ids), whole.lost, whole.lost_trained) == (10, 0, 0)
