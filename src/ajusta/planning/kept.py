"""What the forward pass of one block keeps for its backward pass, and whose gradient asks for it.

Two blocks of the commonest kind are run forwards on a counting place, as the step runs them (`Keep`). The first one's
stretch of the account is cut wherever the pass enters or leaves a module; a storage that came there and is still live
at the end is kept. Who reads it is told by autograd, as it asks for each tensor (blocks/rebuild.py: `telling`). The
second block is there to read what the first one returns.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ajusta.blocks.attention import Segments, using
from ajusta.blocks.gated import GatedMlp
from ajusta.blocks.linear import FrozenLinear
from ajusta.blocks.lora import LoraLinear
from ajusta.blocks.norm import RmsNorm
from ajusta.blocks.rebuild import RecomputedActivation, telling
from ajusta.blocks.recompute import Keep
from ajusta.blocks.targets import has_stacked_weights
from ajusta.engine.excerpt import narrowed
from ajusta.engine.masks import block_diagonal_mask
from ajusta.memory.ledger import Section
from ajusta.memory.place import Category
from ajusta.planning.trace import Traced
from ajusta.spec.data import MicroBatch
from ajusta.spec.explanation import BlockMemory, Kept, KeptTensor
from ajusta.spec.plan import Rung

# Whose a tensor is that several read: the first of these.
_PARTS = ("norm", "attention", "gated", "activation", "experts", "adapter", "frozen", "other")


def block_memory(traced: Traced, micro: MicroBatch, rung: Rung) -> BlockMemory:
    """Say what one block of the commonest kind keeps of this micro-batch; `rung` recomputes nothing."""
    positions, alike = traced.typical(2)
    chain, place = traced.model.chain, traced.place
    with narrowed(chain, positions), place.counting() as ledger:
        block = chain.blocks[0]
        watch = _Watch(traced)
        ledger.start_over()
        recorded, ledger.record = ledger.record, True
        with using(Segments(ends=micro.segment_ends)), place.category(Category.SAVED), torch.no_grad():
            place.mark("prelude")
            mask = block_diagonal_mask(micro.segment_ends, chain.dtype, place) if chain.needs_mask else None
            hidden, calls = chain.prelude(place.take(micro.input_ids_T), place.take(micro.position_ids_T), mask)
            islands = []
            for index, call in enumerate(calls):
                with watch.at(index, chain.blocks[index]):
                    islands.append(
                        Keep().forward(chain.runner(index, call), hidden, wants_grad=hidden.is_floating_point())
                    )
                hidden = islands[-1].output
        sections = ledger.cut()
        ledger.record = recorded
        kept = watch.kept(sections)
        del islands, hidden, calls
        ledger.start_over()
    return BlockMemory(
        block=type(block).__name__,
        alike=alike,
        tokens=micro.num_tokens,
        kept=kept,
        rebuilt_bytes=watch.rebuilt_bytes,
        backward_bytes=_backward_bytes(traced, micro, rung),
    )


class _Watch:
    """Follows a forward pass through the modules of blocks. A place is (block, path of the module in it)."""

    def __init__(self, traced: Traced) -> None:
        self._place, self._ledger = traced.place, traced.place.ledger
        self._modules: dict[tuple[int, str], nn.Module] = {}
        self._inside: list[tuple[int, str]] = []
        self._readers: dict[int, list[tuple[int, str]]] = defaultdict(list)  # by the storage's number
        self._rebuilt: dict[int, int] = {}

    @property
    def rebuilt_bytes(self) -> int:
        """What the first block would keep too, had it no recipe."""
        return sum(self._rebuilt.values())

    @contextlib.contextmanager
    def at(self, number: int, block: nn.Module) -> Iterator[None]:
        """Follow the pass through block `number`."""
        handles = []
        for path, module in block.named_modules():
            where = (number, path)
            self._modules[where] = module
            handles.append(module.register_forward_pre_hook(lambda *_, where=where: self._enter(where)))
            handles.append(module.register_forward_hook(lambda *_: self._leave()))
        self._enter((number, ""))
        try:
            with telling(self._told):
                yield
        finally:
            self._leave()
            for handle in handles:
                handle.remove()

    def _enter(self, where: tuple[int, str]) -> None:
        self._inside.append(where)
        self._place.mark(where[1], where[0])

    def _leave(self) -> None:
        self._inside.pop()
        number, path = self._inside[-1] if self._inside else (None, "between")
        self._place.mark(path, number)

    def _told(self, tensor: Tensor, exchanged: bool) -> None:
        assert self._ledger is not None
        number = self._ledger.number_of(tensor)
        if number is None:
            return
        if not exchanged:
            self._readers[number].append(self._inside[-1])
        elif self._inside[-1][0] == 0:
            self._rebuilt[number] = tensor.untyped_storage().nbytes()

    def kept(self, sections: Sequence[Section]) -> tuple[Kept, ...]:
        """Return what of the first block's making is left, by the part that it is kept for."""
        gone = {event.storage for section in sections for event in section.events if event.bytes < 0}
        attention = {
            (0, section.name)
            for section in sections
            if section.block == 0 and any(_is_attention(self._modules, section, e.operation) for e in section.events)
        }
        found: dict[str, list[KeptTensor]] = defaultdict(list)
        asking: dict[str, set[tuple[int, str]]] = defaultdict(set)
        for section in sections:
            for event in section.events if section.block == 0 else ():
                if event.bytes <= 0 or event.storage in gone:
                    continue
                readers = self._readers.get(event.storage, [])
                parts = [self._part(where, attention) for where in readers or [(0, section.name)]]
                part = min(parts, key=_PARTS.index)
                asking[part].update(where for where, own in zip(readers, parts, strict=False) if own == part)
                found[part].append(
                    KeptTensor(
                        made_in=section.name,
                        operation=event.operation,
                        read_by=tuple(dict.fromkeys(_shown(where) for where in readers)),
                        bytes=event.bytes,
                    )
                )
                self._rebuilt.pop(event.storage, None)
        return tuple(
            Kept(part=part, modules=len(asking[part]), tensors=tuple(found[part])) for part in _PARTS if part in found
        )

    def _part(self, where: tuple[int, str], attention: set[tuple[int, str]]) -> str:
        module = self._modules[where]
        if (0, where[1]) in attention:
            return "attention"
        if isinstance(module, (RmsNorm, nn.LayerNorm)):
            return "norm"
        if isinstance(module, GatedMlp):
            return "gated"
        if isinstance(module, (LoraLinear, FrozenLinear)):
            return "adapter" if isinstance(module, LoraLinear) else "frozen"
        if has_stacked_weights(module):
            return "experts"
        plain = not list(module.children()) and not list(module.parameters())
        return "activation" if plain or isinstance(module, RecomputedActivation) else "other"


def _is_attention(modules: dict[tuple[int, str], nn.Module], section: Section, operation: str) -> bool:
    """Say whether this operation is attention: the fused one, or a softmax inside of a module that is called so."""
    name = type(modules[0, section.name]).__name__.lower()
    return "attention" in operation or ("softmax" in operation and "attention" in name)


def _shown(where: tuple[int, str]) -> str:
    block, path = where
    return path if block == 0 else f"next block: {path}"


def _backward_bytes(traced: Traced, micro: MicroBatch, rung: Rung) -> int:
    """Return what the backward pass of a block in the middle has live at most beyond what it begins with."""
    sections = [s for s in traced.step_sections((micro,), rung) if s.name == "backward"]
    middle = sections[len(sections) // 2]
    return middle.peak.live_bytes - sum(middle.begin.values())
