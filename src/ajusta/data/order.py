"""The order of the data and the worst step of a run, both known before it starts.

The order is a pure function of (seed, step, batch size, rank, world): a resumed run, a replayed step and another number
of cards see the same examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ajusta.data.pack import bins


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    return tuple(int(index) for index in np.random.default_rng([seed, epoch]).permutation(count))


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which examples each optimizer step takes. Steps count from 0; `batch_size` is that of all ranks together."""

    lengths: tuple[int, ...] = field(repr=False)  # tokens of each training example
    batch_size: int
    seed: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        """Hold our own callers to the ranges of the fields."""
        assert self.lengths and self.batch_size > 0 and self.seed >= 0 and 0 <= self.rank < self.world

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last one may be smaller, and is never left out."""
        return -(-len(self.lengths) // self.batch_size)

    def all_of_step(self, step: int) -> tuple[int, ...]:
        """Indices of the examples that all ranks take in `step` (0-based), freshly shuffled in each epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _permutation(self.seed, epoch, len(self.lengths))
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def examples_of_step(self, step: int) -> tuple[int, ...]:
        """Indices of the examples that this rank takes in `step` (0-based); may be empty in a small last step."""
        return self.all_of_step(step)[self.rank :: self.world]

    def step_tokens(self, step: int) -> int:
        """Tokens that pass through the model in `step`, all ranks together."""
        return sum(self.lengths[index] for index in self.all_of_step(step))

    def total_tokens(self, steps: int) -> int:
        """Tokens that pass through the model in the first `steps` steps, all ranks together."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        done = epochs * self.steps_per_epoch
        return epochs * sum(self.lengths) + sum(self.step_tokens(done + step) for step in range(rest))


@dataclass(frozen=True, kw_only=True)
class WorstStep:
    """What the rehearsal runs: the step with the most tokens, and the fullest micro-batch of the run."""

    step: int  # 0-based
    step_tokens: int
    fullest: tuple[int, ...]  # examples of the fullest micro-batch
    fullest_step: int
    fullest_tokens: int
    longest_segment: int  # of the fullest micro-batch


def worst_step(order: Order, max_tokens: int, steps: int, *, packing: bool = True) -> WorstStep:
    """Find the worst of the first `steps` steps of this rank; ties go to the earlier step.

    The fullest micro-batch is the one with the most tokens, among equals the one with the longest segment.
    """
    assert steps > 0
    heaviest = (-1, 0)
    fullest: tuple[tuple[int, int], int, tuple[int, ...]] = ((-1, -1), 0, ())
    for step in range(steps):
        indices = order.examples_of_step(step)
        lengths = [order.lengths[index] for index in indices]
        if sum(lengths) > heaviest[0]:
            heaviest = (sum(lengths), step)
        for group in bins(lengths, max_tokens, packing=packing):
            size = _size(lengths, group)
            if size > fullest[0]:
                fullest = (size, step, tuple(indices[place] for place in group))
    return WorstStep(
        step=heaviest[1],
        step_tokens=heaviest[0],
        fullest=fullest[2],
        fullest_step=fullest[1],
        fullest_tokens=fullest[0][0],
        longest_segment=fullest[0][1],
    )


def _size(lengths: Sequence[int], group: Sequence[int]) -> tuple[int, int]:
    members = [lengths[place] for place in group]
    return sum(members), max(members)
