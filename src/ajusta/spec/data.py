"""What the data becomes on its way to the model: rows, examples, micro-batches, and the account of it all.

Shape letters: T tokens of a micro-batch laid end to end, N trained positions among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that was read: a plain document (`text`) or a conversation (`messages`), never both."""

    source: str  # "folder/file.jsonl:12": where a person finds it again
    text: str | None = None
    messages: tuple[dict[str, object], ...] | None = None
    tools: tuple[dict[str, object], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A row that could not be used, and why."""

    source: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """One sequence of tokens; `trained[i]` says whether token i is to be predicted (never token 0)."""

    ids: IntArray  # [S]
    trained: NDArray[np.bool_]  # [S]
    source: str
    example_id: int  # stable within a run: LoRA dropout and the data order are functions of it

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        """Trained tokens of this example."""
        return int(self.trained.sum())


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Several examples laid end to end in one row of T tokens; attention never crosses `segment_ends`.

    Everything that a step would otherwise have to read back from a tensor is here as a plain number, so that the
    same step runs on `meta`. Position i predicts token i + 1: `positions_N` are the i, `labels_N` the tokens i + 1.
    """

    input_ids_T: IntArray
    position_ids_T: IntArray  # restart at 0 in each segment
    example_ids_T: IntArray
    segment_ends: tuple[int, ...]  # ascending, last one is T
    positions_N: IntArray
    labels_N: IntArray

    @property
    def num_tokens(self) -> int:
        """Tokens that pass through the model."""
        return len(self.input_ids_T)

    @property
    def num_trained(self) -> int:
        """Tokens that the loss falls on."""
        return len(self.labels_N)


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """The account of the data: nothing that was given is missing here."""

    files: int
    rows_read: int
    train_examples: int
    heldout_examples: int
    train_tokens: int
    heldout_tokens: int
    trained_tokens: int
    longest: int  # tokens of the longest example
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()  # policies applied, with counts: "system turn folded into the first user turn: 3"
    lengths: tuple[int, ...] = field(default=(), repr=False)  # one a training example, for the histogram
