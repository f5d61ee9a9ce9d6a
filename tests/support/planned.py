"""Requests to plan for tiny models, and the same phases counted on real tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PretrainedConfig
from tuned import ALPHA, RANK, ModelSource, examples

from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW
from ajusta.data.pack import micro_batches
from ajusta.engine.assemble import AdapterSpec, Assembled, assemble
from ajusta.engine.phases import adopt_model, loss_only, make_optimizer, run_step
from ajusta.engine.skeleton import build_skeleton
from ajusta.engine.weights_base import TensorInfo, WeightSource
from ajusta.memory.ledger import Category, Peak
from ajusta.memory.place import RealPlace
from ajusta.planning.search import Request
from ajusta.planning.trace import Subject
from ajusta.spec.data import MicroBatch
from ajusta.spec.device import Device, Machine
from ajusta.spec.plan import Rung
from ajusta.spec.speeds import typical_processor

GIB = 1 << 30
LENGTHS = [30, 12, 25, 40, 8, 17, 33, 21]


class StoredModel(ModelSource):
    """A model in memory with what a planner asks of a checkpoint."""

    fingerprint = "none"
    generation: Mapping[str, object] = {}
    files: tuple[Path, ...] = ()

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._plain = {name: tensor.detach() for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return a fresh tensor, as a file would give it: a view of the model in memory would count it too."""
        info = self.infos[name]
        return torch.empty(info.shape, dtype=info.dtype).copy_(self._plain[name])

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.read(name)[start:stop].clone()


class ShapedModel:
    """A checkpoint of which only the shapes are known; for models that are never made."""

    reference, fingerprint = "shapes", "none"
    generation: Mapping[str, object] = {}
    files: tuple[Path, ...] = ()

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        self.config = config
        skeleton = build_skeleton(config, dtype)
        tied = {name for name, _ in skeleton.tied}
        self.infos = {
            name: TensorInfo(shape=tuple(tensor.shape), dtype=dtype, stored_bytes=tensor.nbytes)
            for name, slot in skeleton.slots.items()
            if name not in tied and (tensor := slot.holder._parameters[slot.leaf]) is not None
        }
        self.infos |= {
            name: TensorInfo(shape=tuple(slot.tensor.shape), dtype=slot.dtype, stored_bytes=slot.tensor.nbytes)
            for name, slot in skeleton.buffers.items()
        }

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError("a planner reads nothing")

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        raise AssertionError("a planner reads nothing")


def adapter() -> AdapterSpec:
    return AdapterSpec(rank=RANK, alpha=ALPHA)


def subject(source: WeightSource, bits: str = "none", dtype: torch.dtype = torch.float32) -> Subject:
    return Subject(
        config=source.config, source=source, dtype=dtype, bits=bits, adapter=adapter(),
        optimizer=AdamWSettings(),
    )  # fmt: skip


def machine(budget_bytes: int) -> Machine:
    device = Device(
        kind="cpu", name="a processor", total_bytes=64 * GIB, free_bytes=64 * GIB, cpu_threads=1, dtypes=("fp32",)
    )
    return Machine(
        device=device, dtype="fp32", dtype_because="the only one", budget_bytes=budget_bytes, budget_because="so told",
        roofline=typical_processor(1),
    )  # fmt: skip


def batches(micro_tokens: int, lengths: Sequence[int] = LENGTHS) -> tuple[MicroBatch, ...]:
    return micro_batches(examples(lengths), micro_tokens)


def fullest(micro_tokens: int, lengths: Sequence[int] = LENGTHS) -> MicroBatch:
    return max(batches(micro_tokens, lengths), key=lambda micro: micro.num_tokens)


def request(
    what: Subject, budget_bytes: int, *, recompute: str | int = "auto", micro_tokens: int | None = None,
    lengths: Sequence[int] = LENGTHS, with_savings: bool = False,
) -> Request:  # fmt: skip
    return Request(
        subject=what, batches=lambda tokens: batches(tokens, lengths), fullest=lambda tokens: fullest(tokens, lengths),
        measured=lambda tokens: fullest(tokens, lengths),
        step_tokens=sum(lengths), longest=max(lengths), machine=machine(budget_bytes), recompute=recompute,
        micro_tokens=micro_tokens, with_savings=with_savings,
    )  # fmt: skip


class Real:
    """The same phases on real tensors, counted by the same ledger."""

    def __init__(self, what: Subject) -> None:
        self.place = RealPlace("cpu")
        skeleton = build_skeleton(what.config, what.dtype)
        with self.place.counting() as ledger:
            self.model: Assembled = assemble(
                skeleton, what.source, self.place, dtype=what.dtype, bits=what.bits,
                adapter=what.adapter,
            )  # fmt: skip
            self.load, self.held = ledger.peak, ledger.now
        self.optimizer: FlatAdamW = make_optimizer(self.model, what.optimizer, self.place)

    def step(self, micro: tuple[MicroBatch, ...], rung: Rung) -> Peak:
        with self.place.counting() as ledger:
            self._adopt()
            run_step(self.model, self.place, micro, rung, self.optimizer, 0.0, 0)
            return ledger.peak

    def evaluate(self, micro: MicroBatch, rung: Rung) -> Peak:
        with self.place.counting() as ledger:
            self._adopt()
            loss_only(self.model.chain, self.place, micro, rung.loss_chunk)
            return ledger.peak

    def _adopt(self) -> None:
        ledger = self.place.ledger
        assert ledger is not None
        adopt_model(self.model, self.place)
        ledger.adopt((self.optimizer.grads,), Category.GRADIENTS)
        ledger.adopt((self.optimizer.first, self.optimizer.second, self.optimizer.updates), Category.OPTIMIZER)
        ledger.start_over()
