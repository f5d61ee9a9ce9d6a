"""One step of full fine-tuning: every weight is trained. The yardstick that a plan's savings are measured by.

The same chain, attention, norms and loss as in engine/step.py, so that what LoRA takes off is LoRA's doing: nothing is
recomputed, and all trained positions meet the head at once. Two things are different. The whole step is one graph, for
every part of the model has a gradient; hooks on the blocks' outputs tell where its way back has come to. And the
optimizer holds gradient and moments of every weight (blocks/optimizer.py; for 16-bit weights an fp32 copy besides):
16 bytes a weight in all, as in Rajbhandari 2020, arXiv 1910.02054, section 3.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ajusta.blocks.attention import Segments, using
from ajusta.blocks.loss import cross_entropy_sum
from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW
from ajusta.blocks.rebuild import rebuilding
from ajusta.engine.chain import Chain
from ajusta.engine.head import head_backward
from ajusta.engine.masks import block_diagonal_mask
from ajusta.memory.place import Category, Place
from ajusta.spec.data import MicroBatch


class FullTraining:
    """A model on a place, every weight of it trained. `optimizers` are one for each dtype among the weights."""

    def __init__(self, chain: Chain, settings: AdamWSettings, place: Place) -> None:
        self.chain, self.place = chain, place
        if any(parameter.device.type != place.device.type for parameter in chain.model.parameters()):
            chain.model.to(place.device)  # a few families draw a parameter on the processor, wherever they are built
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for parameter in chain.model.parameters():
            by_dtype[parameter.requires_grad_(True).dtype].append(parameter)
        self.optimizers = [FlatAdamW(parameters, settings, place) for parameters in by_dtype.values()]
        self.parameters = sum(optimizer.count for optimizer in self.optimizers)
        if place.ledger is not None:
            place.ledger.adopt(chain.model.buffers(), Category.BASE)

    def resident_bytes(self) -> list[int]:
        """Return the bytes of each storage that is there before and after a step."""
        held = [each for o in self.optimizers for each in (o.weights, o.grads, o.master, o.first, o.second, o.updates)]
        storages = [tensor.untyped_storage() for tensor in (*held, *self.chain.model.buffers())]
        return list({storage._cdata: storage.nbytes() for storage in storages}.values())

    def step(self, micro: MicroBatch, rate: float) -> Tensor:
        """Run one optimizer step over one micro-batch; return its summed loss, 0-dim."""
        loss = self.accumulate(micro)
        self.place.mark("update")
        for optimizer in self.optimizers:
            optimizer.step(rate, micro.num_trained)
        return loss

    def accumulate(self, micro: MicroBatch) -> Tensor:
        """Add one micro-batch's summed gradient to every weight's; return its summed loss, 0-dim."""
        with using(Segments(ends=micro.segment_ends)):
            with self.place.category(Category.SAVED):
                hidden = self._forward(micro)
            self.place.mark("loss")
            with self.place.category(Category.LOGITS):
                loss, ready, grad = self._loss(hidden, micro)
            del hidden
            torch.autograd.backward(ready, grad)
        return loss

    def _forward(self, micro: MicroBatch) -> Tensor:
        """Return the last hidden state [1, T, H] with the graph behind it."""
        chain, place = self.chain, self.place
        place.mark("prelude")
        with torch.enable_grad():
            mask = block_diagonal_mask(micro.segment_ends, chain.dtype, place) if chain.needs_mask else None
            hidden, calls = chain.prelude(place.take(micro.input_ids_T), place.take(micro.position_ids_T), mask)
            for index, call in enumerate(calls):
                place.mark("forward", index)
                with rebuilding():
                    hidden = chain.run_block(index, hidden, call)
                hidden.register_hook(self._marking(index))
        return hidden

    def _marking(self, index: int) -> Callable[[Tensor], None]:
        return lambda _: self.place.mark("backward", index)

    def _loss(self, hidden: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the summed loss, what the head received [N, H], and the gradient of that."""
        chain, place = self.chain, self.place
        positions, labels = place.take(micro.positions_N), place.take(micro.labels_N)
        with torch.enable_grad():
            ready = chain.finish(hidden[0].index_select(0, positions))
        with torch.no_grad():
            logits = chain.head(ready.detach())
            loss, grad_logits = cross_entropy_sum(
                logits, labels, scale=chain.logits.scale, softcap=chain.logits.softcap
            )
            assert grad_logits is not None
            del logits
            _add_head_gradient(chain.head, grad_logits, ready)
            return loss, ready, head_backward(chain.head, grad_logits)


def _add_head_gradient(head: nn.Module, grad_logits_NV: Tensor, ready_NH: Tensor) -> None:
    """Add dl^T h to the head's weight, and the sum of dl to its bias."""
    weight = head.get_parameter("weight")
    assert weight.grad is not None
    weight.grad.addmm_(grad_logits_NV.t(), ready_NH.detach())
    bias = getattr(head, "bias", None)
    if isinstance(bias, Tensor) and bias.grad is not None:
        bias.grad.add_(grad_logits_NV.sum(0))
