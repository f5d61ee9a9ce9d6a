"""The most that the data of a run will ask of the model at once: what a plan is made for and what is rehearsed."""

from __future__ import annotations

from dataclasses import dataclass

from ajusta.data.order import Order, worst_step
from ajusta.data.pack import lay_out, micro_batches
from ajusta.spec.data import Example, MicroBatch


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The examples of a run in their order, and what is only measured."""

    examples: tuple[Example, ...]
    order: Order
    steps: int
    packing: bool
    measured: tuple[Example, ...] = ()  # held-out and general text
    exam_tokens: int = 0  # of the longest question with its answer; 0 without an exam

    @property
    def longest(self) -> int:
        """Tokens of the longest example that is trained on: no micro-batch can be shorter."""
        return max(len(example) for example in self.examples)

    @property
    def heaviest_tokens(self) -> int:
        """Tokens of the heaviest step."""
        return worst_step(self.order, self.longest, self.steps, packing=self.packing).step_tokens

    def heaviest(self, micro_tokens: int) -> tuple[MicroBatch, ...]:
        """Cut the heaviest step into micro-batches of at most `micro_tokens` tokens."""
        worst = worst_step(self.order, micro_tokens, self.steps, packing=self.packing)
        chosen = [self.examples[index] for index in self.order.examples_of_step(worst.step)]
        return micro_batches(chosen, micro_tokens, packing=self.packing)

    def fullest(self, micro_tokens: int) -> MicroBatch:
        """Return the fullest micro-batch of the training."""
        worst = worst_step(self.order, micro_tokens, self.steps, packing=self.packing)
        return lay_out([self.examples[index] for index in worst.fullest])

    def fullest_measured(self, micro_tokens: int) -> MicroBatch:
        """Return the fullest micro-batch whose loss is only taken; without any, that of the training."""
        batches = micro_batches(self.measured, micro_tokens, packing=self.packing) if self.measured else ()
        return max(batches, key=lambda micro: (micro.num_tokens, micro.num_trained), default=self.fullest(micro_tokens))
