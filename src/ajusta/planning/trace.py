"""Trace the phases of a run on a counting place: the same load, step and evaluation that will run, only weighed.

Of a deep model a few blocks of each kind are traced and the rest is told again (planning/depth.py), to the byte; where
blocks of one kind should not come out equal, the whole depth is traced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PretrainedConfig

from ajusta.blocks.lora import LoraLinear
from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW
from ajusta.blocks.storage import Storage
from ajusta.engine.assemble import AdapterSpec, Assembled, Fitting, assemble, fit
from ajusta.engine.excerpt import block_kinds, excerpt, narrowed
from ajusta.engine.generate import new_cache, next_logits
from ajusta.engine.phases import adopt_model, loss_only, make_optimizer, run_step
from ajusta.engine.skeleton import Skeleton, build_skeleton
from ajusta.engine.weights import TensorInfo, WeightSource, with_storages
from ajusta.memory.ledger import Section
from ajusta.memory.place import Category, CountingPlace
from ajusta.planning.depth import Levels, Short, fullest, proven, shorten, told_again, whole_row
from ajusta.planning.reserved import Reserved, reserve
from ajusta.spec.data import MicroBatch
from ajusta.spec.plan import PhasePeak, Rung
from ajusta.spec.roofline import Roofline


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned for: a model, how it is stored and adapted, on which kind of device.

    `source` is None where only a config is at hand.
    """

    config: PretrainedConfig
    source: WeightSource | None
    dtype: torch.dtype
    bits: str
    adapter: AdapterSpec | None
    optimizer: AdamWSettings
    kind: str = "cpu"  # cpu | cuda


class ShapesOnly:
    """A weight source whose tensors have shape and dtype but no bytes."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.config = source.config
        self.infos: Mapping[str, TensorInfo] = source.infos
        self.reference, self.fingerprint = source.reference, source.fingerprint
        self.generation, self.files = source.generation, source.files

    def read(self, name: str) -> torch.Tensor:
        """Return a `meta` tensor as large as what the source would read."""
        info = self.infos[name]
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return a `meta` tensor as large as those rows."""
        info = self.infos[name]
        return torch.empty((stop - start, *info.shape[1:]), dtype=info.dtype, device="meta")

    @property
    def kinds(self) -> Mapping[str, str]:
        """How the source stores its quantized weights."""
        return {} if (quantized := with_storages(self._source)) is None else quantized.kinds

    def storage(self, name: str, *, shapes_only: bool = True) -> Storage:
        """Return a quantized weight as it is stored, on `meta`."""
        assert shapes_only, "a planner reads nothing"
        quantized = with_storages(self._source)
        assert quantized is not None, name
        return quantized.storage(name, shapes_only=True)


class Traced:
    """One model on a counting place, ready to be run through its phases as often as needed.

    Args:
        subject: what is planned for.
        shortened: let a few blocks of each kind stand for all; False traces the whole depth.
        record: keep every coming and going of a storage, for the allocator's replay.
        roofline: of the device that the sections' seconds are those of; None leaves time out.
    """

    def __init__(
        self, subject: Subject, *, shortened: bool = True, record: bool = False, roofline: Roofline | None = None
    ) -> None:
        self.subject, self._record, self.roofline = subject, record, roofline
        self._build(shortened)

    def _build(self, shortened: bool) -> None:
        subject, self.shortened = self.subject, shortened
        self.place = CountingPlace(subject.kind, record=self._record, roofline=self.roofline)
        skeleton = build_skeleton(subject.config, subject.dtype)
        self.whole_because = skeleton.chain.whole_because
        self.parameters = _count(skeleton)
        fitting = fit(skeleton, subject.source, subject.adapter)
        self._kinds = _kinds(skeleton, fitting, subject.source)
        self._traces: dict[Hashable, tuple[Section, ...]] = {}
        self._reserved: dict[Hashable, Reserved] = {}
        self._load(excerpt(skeleton, self._needed()), fitting)

    @property
    def blocks(self) -> int:
        """Decoder blocks, or 1 where the model could not be taken apart."""
        return len(self._kinds)

    def typical(self, count: int) -> tuple[tuple[int, ...], int]:
        """Return positions of at most `count` blocks of the commonest kind that are there, and how many it has."""
        kind, alike = Counter(self._kinds).most_common(1)[0]
        return tuple(p for p, there in enumerate(self._there) if there == kind)[:count], alike

    @property
    def operations(self) -> int:
        """How many operations were weighed so far."""
        assert self.place.ledger is not None
        return self.place.ledger.operations

    @property
    def before_bytes(self) -> int:
        """The fullest moment before the first step."""
        return max(self.load.peak_bytes, self.prepare.peak_bytes)

    def step(self, micro: tuple[MicroBatch, ...], rung: Rung) -> PhasePeak:
        """Trace one optimizer step."""
        return _as_phase("train", self.step_sections(micro, rung))

    def step_sections(self, micro: tuple[MicroBatch, ...], rung: Rung) -> tuple[Section, ...]:
        """Trace one optimizer step; return its account block by block."""
        sections, short = self._short_step(micro, rung)
        told = told_again(sections, short.stands, self._made[-1].end)
        return (*told, *told_again(self._update, (), told[-1].end))

    def step_seconds(self, batches: Sequence[MicroBatch], rung: Rung) -> float:
        """Tell the time of one optimizer step over these micro-batches, by the roofline."""
        return seconds_of_step(batches, lambda micro: self.step_sections((micro,), rung))

    def reserve(self, micro: tuple[MicroBatch, ...], rung: Rung, capability: tuple[int, int] | None) -> Reserved:
        """Say what a card's allocator reserves for one optimizer step; `record` must be on."""
        assert self._record, "the comings and goings were not recorded"
        key = (*map(_weight, micro), replace(rung, peak_bytes=0), capability)
        if key not in self._reserved:
            sections, short = self._short_step(micro, rung)
            told = (*sections, *self._update)
            self._reserved[key] = reserve(told, short.stands, self._resident(), capability)
        return self._reserved[key]

    def _resident(self) -> Iterator[int]:
        """Yield the bytes of every storage that is there before the step."""
        blocks = self.model.chain.blocks
        adapters = {id(parameter) for parameter in self.model.parameters()}
        own = [_storages(block, adapters) for block in blocks]
        inside = {key for sizes in own for key in sizes}
        rest = _storages(self.model.chain.model, adapters)
        yield from (size for key, size in rest.items() if key not in inside)
        for position in self._stands:
            yield from own[position].values()
        yield from (*[4 * self.adapter_parameters] * 4, 8)  # the optimizer's flat buffers, and its count of updates

    def _short_step(self, micro: tuple[MicroBatch, ...], rung: Rung) -> tuple[tuple[Section, ...], Short]:

        def run(kept: list[tuple[int, bool]]) -> None:
            short = replace(rung, recompute_blocks=sum(recomputed for _, recomputed in kept))
            run_step(self.model, self.place, micro, short, self._optimizer, 0.0, 0)

        what = ("train", tuple(map(_weight, micro)), rung.loss_chunk)
        row = [(kind, number < rung.recompute_blocks) for number, kind in enumerate(self._kinds)]
        sections, short = self._trace(what, row, run)
        return tuple(section for section in sections if section.name != "update"), short

    def evaluate(self, micro: MicroBatch, rung: Rung) -> PhasePeak:
        """Trace the loss of one micro-batch without gradients."""
        what = ("evaluate", _weight(micro), rung.loss_chunk)
        row = [(kind, False) for kind in self._kinds]

        def run(_: object) -> None:
            loss_only(self.model.chain, self.place, micro, rung.loss_chunk)

        return _as_phase("evaluate", self._tell(what, row, run))

    def answer(self, rows: int, tokens: int) -> PhasePeak:
        """Trace an exam: `rows` questions side by side, `tokens` long with their answers."""
        row = [(kind, False) for kind in self._kinds]
        return _as_phase("exam", self._tell(("exam", rows, tokens), row, lambda _: self._answer(rows, tokens)))

    def _answer(self, rows: int, tokens: int) -> None:
        chain, place = self.model.chain, self.place
        chain.notes.entered = lambda number: place.mark("forward", number)
        cache = new_cache(chain)
        valid = place.empty(rows, tokens - 1, dtype=torch.bool, category=Category.TEMPORARY)
        ids = place.empty(rows, tokens - 1, dtype=torch.int64, category=Category.TEMPORARY)
        next_logits(chain, ids, valid, cache)
        place.mark("next token")
        valid = place.empty(rows, tokens, dtype=torch.bool, category=Category.TEMPORARY)
        next_logits(chain, ids[:, :1], valid, cache)
        chain.notes.entered = None

    def _needed(self) -> tuple[int, ...]:
        """Return which blocks must be there, so that every row of policies can be laid out of them."""
        if not self.shortened:
            return tuple(range(self.blocks))
        most: Counter[int] = Counter()
        for recomputed in range(self.blocks + 1):
            row = [(kind, number < recomputed) for number, kind in enumerate(self._kinds)]
            most |= Counter(self._kinds[number] for number in shorten(row).kept)
        seen: Counter[int] = Counter()
        needed = []
        for number, kind in enumerate(self._kinds):
            seen[kind] += 1
            if seen[kind] <= most[kind]:
                needed.append(number)
        return tuple(needed)

    def _load(self, skeleton: Skeleton, fitting: Fitting) -> None:
        """Load what is needed of the model and put the account together to that of the whole one."""
        subject, source = self.subject, self.subject.source
        numbers = skeleton.chain.numbers or tuple(range(self.blocks))
        self._there = tuple(self._kinds[number] for number in numbers)  # the kind of each block that is there
        with self.place.counting() as ledger:
            self.model: Assembled = assemble(
                skeleton,
                None if source is None else ShapesOnly(source),
                self.place,
                dtype=subject.dtype,
                bits=subject.bits,
                adapter=subject.adapter,
                fitting=fitting,
            )
            adopt_model(self.model, self.place)  # torch.tensor() on `meta` passes unseen
            sections = ledger.cut()
            self._optimizer: FlatAdamW = make_optimizer(self.model, subject.optimizer, self.place)
        alike = tuple(tuple(p for p, kind in enumerate(self._there) if kind == of) for of in set(self._there))
        if self.shortened and not proven(sections, alike):
            self._build(shortened=False)
            return
        own = {number: position for position, number in enumerate(numbers)}
        last = {kind: position for position, kind in enumerate(self._there)}
        self._stands = tuple(own.get(number, last[kind]) for number, kind in enumerate(self._kinds))
        loaded = told_again(sections, self._stands, {})
        self._trace_optimizer(loaded[-1].end)
        self.load, self.prepare = _as_phase("load", loaded), _as_phase("optimizer", self._made)

    def _trace_optimizer(self, loaded: Levels) -> None:
        """Trace the making of the optimizer and its update for the adapters of the whole depth."""
        shapes = [
            tuple(parameter.shape)
            for position in self._stands
            for part in self.model.chain.blocks[position].modules()
            if isinstance(part, LoraLinear)
            for parameter in (part.lora_A, part.lora_B)
        ]
        self.adapter_parameters = sum(math.prod(shape) for shape in shapes)
        spec = self.subject.adapter
        with self.place.counting() as ledger, self.place.category(Category.ADAPTERS):
            dtype = torch.float32 if spec is None else spec.dtype
            parameters = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes]
            ledger.start_over()
            ledger.mark("optimizer")
            optimizer = FlatAdamW(parameters, self.subject.optimizer, self.place)
            made = ledger.cut()
            ledger.start_over()
            ledger.mark("update")
            with self.place.category(Category.TEMPORARY):
                optimizer.step(0.0, 1)
            self._update = ledger.cut()
        self._made = told_again(made, (), loaded)

    def _tell(
        self, what: Hashable, row: list[tuple[int, bool]], run: Callable[[list[tuple[int, bool]]], object]
    ) -> tuple[Section, ...]:
        """Trace a phase on the short form of this row of blocks; return the account of the whole row."""
        sections, short = self._trace(what, row, run)
        return told_again(sections, short.stands, self._made[-1].end)

    def _trace(
        self, what: Hashable, row: list[tuple[int, bool]], run: Callable[[list[tuple[int, bool]]], object]
    ) -> tuple[tuple[Section, ...], Short]:
        """Trace a phase on the short form of this row of blocks, once."""
        short = shorten(row) if self.shortened else whole_row(len(row))
        kept = [row[number] for number in short.kept]
        key = (what, tuple(kept))
        if key not in self._traces:
            chosen = self._positions([kind for kind, _ in kept])
            with narrowed(self.model.chain, chosen), self.place.counting() as ledger:
                ledger.start_over()
                run(kept)
                self._traces[key] = ledger.cut()
        sections = self._traces[key]
        if not proven(sections, short.equal):
            self._build(shortened=False)
            return self._trace(what, row, run)
        return sections, short

    def _positions(self, kinds: Sequence[int]) -> tuple[int, ...]:
        """Return blocks that are there of these kinds, each once."""
        free = {kind: [p for p, there in enumerate(self._there) if there == kind] for kind in set(kinds)}
        return tuple(free[kind].pop(0) for kind in kinds)


def seconds_of_step(batches: Sequence[MicroBatch], trace: Callable[[MicroBatch], Sequence[Section]]) -> float:
    """Tell the time of one optimizer step over these micro-batches; `trace` gives the account of a step over one.

    The fullest and the leanest are traced. Those between take a time between, by their tokens: the expansion of weights
    and the calls are the same for all, the products grow with the tokens.
    """
    least, most = (pick(batches, key=lambda micro: micro.num_tokens) for pick in (min, max))
    sections = trace(most)
    update = sum(section.seconds for section in sections if section.name == "update")
    high = sum(section.seconds for section in sections) - update
    if most.num_tokens == least.num_tokens:
        return update + high * len(batches)
    low = sum(section.seconds for section in trace(least) if section.name != "update")
    a_token = (high - low) / (most.num_tokens - least.num_tokens)
    more = sum(micro.num_tokens - least.num_tokens for micro in batches)
    return update + low * len(batches) + a_token * more


def _storages(module: nn.Module, without: set[int]) -> dict[int, int]:
    """Return the bytes of each storage of a module by its address, those of these parameters left out."""
    tensors = (tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in without)
    return {storage._cdata: storage.nbytes() for tensor in tensors if (storage := tensor.untyped_storage())}


def _count(skeleton: Skeleton) -> int:
    """Return the model's parameters, tied ones once."""
    tied = {name for name, _ in skeleton.tied}
    slots = (slot for name, slot in skeleton.slots.items() if name not in tied)
    return sum(tensor.numel() for slot in slots if (tensor := slot.holder._parameters[slot.leaf]) is not None)


def _weight(micro: MicroBatch) -> Hashable:
    """Return all of a micro-batch that its memory depends on."""
    return micro.num_tokens, micro.segment_ends, micro.num_trained


def _kinds(skeleton: Skeleton, fitting: Fitting, source: WeightSource | None) -> tuple[int, ...]:
    """Return the kind of each block: by what it is, what gets an adapter, and in which dtype it is stored."""
    stored: dict[str, Hashable] = {}
    if source is not None:
        quantized = with_storages(source)
        kinds = {} if quantized is None else quantized.kinds
        stored = {name: (source.infos[at].dtype, kinds.get(at)) for name, at in fitting.stored.items()}
    return block_kinds(skeleton.chain, fitting.targets.adapted, stored)


def _as_phase(phase: str, sections: Sequence[Section]) -> PhasePeak:
    peak = fullest(sections)
    return PhasePeak(
        phase=phase,
        peak_bytes=peak.live_bytes,
        operation=peak.operation,
        by_category={str(category): size for category, size in peak.by_category.items()},
    )
