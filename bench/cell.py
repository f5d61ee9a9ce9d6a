"""One cell of plan_accuracy in a process of its own: what the planner traces, and what the same phases really hold.

A cell is a small model of made-up weights with some data to train on. The phases are the engine's own, called as a run
calls them. Imported only in the process that serves cells, after the heap has its settings.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cells import Cell
from measures import resident_file_bytes
from numpy.typing import NDArray

from ajusta.memory.heap import limit_kernel_caches, return_freed_memory

limit_kernel_caches()  # as the command does; torch reads these when it is imported
return_freed_memory()

import torch  # noqa: E402
from profiling import allocated_peak  # noqa: E402
from transformers import CONFIG_MAPPING, PretrainedConfig  # noqa: E402

from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW  # noqa: E402
from ajusta.data.pack import lay_out  # noqa: E402
from ajusta.engine.assemble import AdapterSpec, Assembled, assemble  # noqa: E402
from ajusta.engine.phases import adopt_model, loss_only, make_optimizer, run_step  # noqa: E402
from ajusta.engine.skeleton import build_skeleton  # noqa: E402
from ajusta.engine.weights import TensorInfo  # noqa: E402
from ajusta.memory.dtypes import DTYPES  # noqa: E402
from ajusta.memory.ledger import Category  # noqa: E402
from ajusta.memory.measure import MemoryWatch  # noqa: E402
from ajusta.memory.place import RealPlace  # noqa: E402
from ajusta.planning.search import LOSS_BYTES, margin  # noqa: E402
from ajusta.planning.trace import Subject, Traced  # noqa: E402
from ajusta.spec.data import Example, MicroBatch  # noqa: E402
from ajusta.spec.plan import Rung  # noqa: E402


class RandomSource:
    """A checkpoint of which each tensor is drawn anew when it is read, as a file would give it: fresh, and no copy."""

    reference, fingerprint = "drawn", "drawn"
    generation: Mapping[str, object] = {}
    files: tuple[Path, ...] = ()

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        self.config = config
        skeleton = build_skeleton(config, torch.bfloat16)  # only its names and shapes are asked
        tied = {name for name, _ in skeleton.tied}
        self.infos = {
            name: TensorInfo(shape=tuple(tensor.shape), dtype=dtype, stored_bytes=tensor.numel() * dtype.itemsize)
            for name, slot in skeleton.slots.items()
            if name not in tied and (tensor := slot.holder._parameters[slot.leaf]) is not None
        }

    def read(self, name: str) -> torch.Tensor:
        info = self.infos[name]
        return torch.empty(info.shape, dtype=info.dtype).uniform_(-0.05, 0.05)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        info = self.infos[name]
        return torch.empty((stop - start, *info.shape[1:]), dtype=info.dtype).uniform_(-0.05, 0.05)


class CopyingPlace(RealPlace):
    """The processor, where arrays are copied: in numpy's own memory they would be out of torch's allocator's sight."""

    def take(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(array).clone()


@dataclass(kw_only=True)
class Life:
    """The phases of one run on real tensors."""

    subject: Subject
    place: RealPlace
    model: Assembled | None = None
    optimizer: FlatAdamW | None = None

    def load(self) -> None:
        """Read, quantize and adapt the model, in a skeleton of its own."""
        skeleton = build_skeleton(self.subject.config, self.subject.dtype)
        self.model = assemble(
            skeleton,
            self.subject.source,
            self.place,
            dtype=self.subject.dtype,
            bits=self.subject.bits,
            adapter=self.subject.adapter,
        )

    def make_optimizer(self) -> None:
        assert self.model is not None
        self.optimizer = make_optimizer(self.model, self.subject.optimizer, self.place)

    def train(self, micro: tuple[MicroBatch, ...], rung: Rung) -> None:
        assert self.model is not None and self.optimizer is not None
        run_step(self.model, self.place, micro, rung, self.optimizer, 1e-4, 0)

    def evaluate(self, micro: MicroBatch, rung: Rung) -> None:
        assert self.model is not None
        loss_only(self.model.chain, self.place, micro, rung.loss_chunk)

    def held_bytes(self) -> int:
        """Return what lives between the phases: weights, adapters, gradients, moments."""
        assert self.model is not None and self.optimizer is not None
        optimizer = self.optimizer
        with self.place.counting() as ledger:
            adopt_model(self.model, self.place)
            ledger.adopt((optimizer.grads,), Category.GRADIENTS)
            ledger.adopt((optimizer.first, optimizer.second, optimizer.updates), Category.OPTIMIZER)
            return ledger.now


def measure(cell: Cell) -> dict[str, Any]:
    """Return the cell's figures in bytes: by phase what was traced and measured, and the resident peak of its life."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(cell.threads)
    torch.manual_seed(cell.seed)
    subject, micro = subject_of(cell), micro_batches(cell)
    traced = Traced(subject)
    rung = rung_of(cell, traced.blocks)
    phases = [traced.load, traced.step(micro, rung), traced.evaluate(micro[0], rung)]
    peak = max(phase.peak_bytes for phase in phases)
    del traced
    gc.collect()
    watch, files = MemoryWatch.begin(torch.device("cpu")), resident_file_bytes()
    life = Life(subject=subject, place=CopyingPlace("cpu"))
    life.load()
    life.make_optimizer()
    life.train(micro, rung)
    life.train(micro, rung)
    life.evaluate(micro[0], rung)
    # A process that has left a server meets the libraries' code page by page; that is no memory of the run's.
    resident = watch.now_and_peak()[1] - max(0, resident_file_bytes() - files)
    held = life.held_bytes()
    measured = {
        "train": held + allocated_peak(lambda: life.train(micro, rung)),
        "evaluate": held + allocated_peak(lambda: life.evaluate(micro[0], rung)),
    }
    life.model = life.optimizer = None
    gc.collect()
    measured["load"] = allocated_peak(life.load)
    return {
        "phases": {
            phase.phase: {
                "traced_bytes": phase.peak_bytes,
                "measured_bytes": measured[phase.phase],
                "operation": phase.operation,
            }
            for phase in phases
        },
        "traced_bytes": peak,
        "planned_bytes": peak + margin(peak, "cpu", cell.dtype),
        "resident_bytes": resident,
        "recompute_blocks": rung.recompute_blocks,
        "loss_chunk": rung.loss_chunk,
    }


def subject_of(cell: Cell) -> Subject:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = CONFIG_MAPPING[cell.kind](**cell.settings())
    dtype = DTYPES[cell.dtype]
    return Subject(
        config=config,
        source=RandomSource(config, DTYPES[cell.stored]),
        dtype=dtype,
        bits=cell.bits,
        adapter=AdapterSpec(rank=cell.rank, alpha=float(2 * cell.rank)),
        optimizer=AdamWSettings(),
    )


def rung_of(cell: Cell, blocks: int) -> Rung:
    """Return the way that the step is run; a chunk of logits as the planner bounds it."""
    count = {"keep": 0, "mixed": blocks // 2, "recompute": blocks}[cell.policy]
    chunk = max(16, LOSS_BYTES // (2 * 4 * cell.vocabulary))
    return Rung(recompute_blocks=count, micro_tokens=cell.tokens, loss_chunk=chunk, peak_bytes=0)


def micro_batches(cell: Cell) -> tuple[MicroBatch, ...]:
    """Return the data of one step, the longest micro-batch first: one of several examples, or several of one."""
    chance = np.random.default_rng(cell.seed)
    if cell.layout == "packed":
        return (lay_out(_examples(cell, _lengths(cell.tokens, chance), chance)),)
    made = _examples(cell, (cell.tokens, max(cell.tokens // 2, 16)), chance)
    return tuple(lay_out([example]) for example in made)


def _lengths(total: int, chance: np.random.Generator) -> list[int]:
    """Cut a row of tokens into two to six uneven examples."""
    cuts = np.unique(chance.integers(8, total - 8, int(chance.integers(1, 6))))
    lengths = np.diff([0, *cuts, total])
    return [int(length) for length in lengths if length > 1]


def _examples(cell: Cell, lengths: Sequence[int], chance: np.random.Generator) -> list[Example]:
    made = []
    for number, length in enumerate(lengths):
        trained = chance.random(length) < cell.trained
        trained[0], trained[-1] = False, True
        ids = chance.integers(0, cell.vocabulary, length)
        made.append(Example(ids=ids, trained=trained, source="drawn", example_id=number))
    return made
