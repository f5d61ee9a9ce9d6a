"""Packing: every example once, bins that hold, positions that restart, labels that never cross."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ajusta.data.pack import bins, lay_out, micro_batches
from ajusta.spec.data import Example


def _example(length: int, number: int) -> Example:
    trained = np.arange(length) % 3 != 0
    return Example(ids=np.arange(length) + 100 * number, trained=trained, source="f:1", example_id=number)


@given(lengths=st.lists(st.integers(1, 30), max_size=25), max_tokens=st.integers(1, 40), packing=st.booleans())
def test_bins_hold_everything_once(lengths: list[int], max_tokens: int, packing: bool) -> None:
    groups = bins(lengths, max_tokens, packing=packing)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or sum(lengths[index] for index in group) <= max_tokens
    if packing and groups:  # first fit: no bin could have gone into an earlier one as a whole
        sizes = [sum(lengths[index] for index in group) for group in groups]
        assert all(a + b > max_tokens for place, a in enumerate(sizes) for b in sizes[place + 1 :])
    else:
        assert len(groups) == len(lengths)


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_a_laid_out_row_is_its_examples_end_to_end(lengths: list[int]) -> None:
    examples = [_example(length, number + 1) for number, length in enumerate(lengths)]
    batch = lay_out(examples)
    assert batch.num_tokens == sum(lengths) and batch.segment_ends[-1] == batch.num_tokens
    assert batch.num_trained == sum(example.num_trained for example in examples)
    start, labels = 0, []
    for example, end in zip(examples, batch.segment_ends, strict=True):
        assert batch.input_ids_T[start:end].tolist() == example.ids.tolist()
        assert batch.position_ids_T[start:end].tolist() == list(range(len(example)))
        assert set(batch.example_ids_T[start:end].tolist()) == {example.example_id}
        inside = (batch.positions_N >= start) & (batch.positions_N < end - 1)  # predicts within its own segment
        assert int(inside.sum()) == example.num_trained
        labels += example.ids[example.trained].tolist()
        start = end
    assert batch.labels_N.tolist() == labels == batch.input_ids_T[batch.positions_N + 1].tolist()
    for array in (batch.input_ids_T, batch.position_ids_T, batch.example_ids_T, batch.positions_N, batch.labels_N):
        assert array.dtype == np.int64


def test_micro_batches_are_deterministic_and_an_overlong_example_is_alone() -> None:
    examples = [_example(length, number) for number, length in enumerate([5, 20, 5, 3, 2])]
    batches = micro_batches(examples, 10)
    assert [set(batch.example_ids_T.tolist()) for batch in batches] == [{1}, {0, 2}, {3, 4}]
    assert [len(batch.segment_ends) for batch in micro_batches(examples, 10, packing=False)] == [1] * 5
    assert micro_batches([], 10) == ()
