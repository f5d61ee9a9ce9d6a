"""Examples become micro-batches: laid end to end in bins of at most `max_tokens` tokens, first fit, longest first.

No padding: attention is cut at `segment_ends` and positions restart, so a packed example has the same loss as alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ajusta.spec.data import Example, MicroBatch


def bins(lengths: Sequence[int], max_tokens: int, *, packing: bool = True) -> tuple[tuple[int, ...], ...]:
    """Return the indices of each bin; an example longer than `max_tokens` has a bin of its own.

    Without `packing`, each example has its own bin, in the order given.
    """
    if not packing:
        return tuple((index,) for index in range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    filled: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        place = next((number for number, left in enumerate(room) if left >= length), None)
        if place is None:
            filled.append([index])
            room.append(max_tokens - length)
        else:
            filled[place].append(index)
            room[place] -= length
    return tuple(tuple(members) for members in filled)


def micro_batches(examples: Sequence[Example], max_tokens: int, packing: bool = True) -> tuple[MicroBatch, ...]:
    """Pack the examples of one optimizer step (or of an evaluation) into micro-batches; the same in, the same out."""
    groups = bins([len(example) for example in examples], max_tokens, packing=packing)
    return tuple(lay_out([examples[index] for index in group]) for group in groups)


def lay_out(examples: Sequence[Example]) -> MicroBatch:
    """Lay examples end to end in one micro-batch of T tokens; position i predicts token i + 1 of the same example."""
    assert examples, "a micro-batch needs an example"
    lengths = np.asarray([len(example) for example in examples], dtype=np.int64)
    ends = np.cumsum(lengths)
    ids = np.concatenate([example.ids for example in examples])
    trained = np.concatenate([example.trained for example in examples])
    assert not trained[ends - lengths].any(), "nothing stands before a first token that could predict it"
    labelled = np.flatnonzero(trained)
    return MicroBatch(
        input_ids_T=ids,
        position_ids_T=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        example_ids_T=np.repeat(np.asarray([example.example_id for example in examples], dtype=np.int64), lengths),
        segment_ends=tuple(int(end) for end in ends),
        positions_N=(labelled - 1).astype(np.int64),
        labels_N=ids[labelled],
    )
