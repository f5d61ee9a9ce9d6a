"""Trace the phases of a run on a counting place: the same load, step and evaluation that will run, only weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW
from ajusta.engine.assemble import AdapterSpec, Assembled, assemble
from ajusta.engine.generate import new_cache, next_logits
from ajusta.engine.phases import adopt_model, loss_only, make_optimizer, run_step
from ajusta.engine.skeleton import build_skeleton
from ajusta.engine.weights import TensorInfo, WeightSource
from ajusta.memory.place import Category, CountingPlace
from ajusta.spec.data import MicroBatch
from ajusta.spec.plan import PhasePeak, Rung


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned for: a model, how it is stored and adapted. `infos` is empty where only a config is at hand."""

    config: PretrainedConfig
    source: WeightSource | None
    dtype: torch.dtype
    bits: str
    adapter: AdapterSpec | None
    optimizer: AdamWSettings


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


class Traced:
    """One model on a counting place, ready to be run through its phases as often as needed."""

    def __init__(self, subject: Subject) -> None:
        self.place = CountingPlace()
        skeleton = build_skeleton(subject.config, subject.dtype)
        with self.place.counting() as ledger:
            self.model: Assembled = assemble(
                skeleton,
                None if subject.source is None else ShapesOnly(subject.source),
                self.place,
                dtype=subject.dtype,
                bits=subject.bits,
                adapter=subject.adapter,
            )
            adopt_model(self.model, self.place)  # before the peak is read: torch.tensor() on `meta` passes unseen
            self.load = self._peak("load")
            self.optimizer: FlatAdamW = make_optimizer(self.model, subject.optimizer, self.place)
        self._ledger = ledger

    @property
    def blocks(self) -> int:
        """Decoder blocks, or 1 where the model could not be taken apart."""
        return len(self.model.chain.blocks)

    def step(self, micro: tuple[MicroBatch, ...], rung: Rung) -> PhasePeak:
        """Trace one optimizer step."""
        with self.place.counting() as ledger:
            ledger.start_over()
            run_step(self.model, self.place, micro, rung, self.optimizer, 0.0, 0)
        return self._peak("train")

    def evaluate(self, micro: MicroBatch, rung: Rung) -> PhasePeak:
        """Trace the loss of one micro-batch without gradients."""
        with self.place.counting() as ledger:
            ledger.start_over()
            loss_only(self.model.chain, self.place, micro, rung.loss_chunk)
        return self._peak("evaluate")

    def answer(self, rows: int, tokens: int) -> PhasePeak:
        """Trace an exam: `rows` questions side by side, `tokens` long with their answers."""
        chain = self.model.chain
        with self.place.counting() as ledger:
            ledger.start_over()
            cache = new_cache(chain)
            valid = self.place.empty(rows, tokens - 1, dtype=torch.bool, category=Category.TEMPORARY)
            ids = self.place.empty(rows, tokens - 1, dtype=torch.int64, category=Category.TEMPORARY)
            next_logits(chain, ids, valid, cache)
            valid = self.place.empty(rows, tokens, dtype=torch.bool, category=Category.TEMPORARY)
            next_logits(chain, ids[:, :1], valid, cache)
        return self._peak("exam")

    def _peak(self, phase: str) -> PhasePeak:
        assert self.place.ledger is not None
        peak = self.place.ledger.peak
        return PhasePeak(
            phase=phase,
            peak_bytes=peak.live_bytes,
            operation=peak.operation,
            by_category={str(category): size for category, size in peak.by_category.items()},
        )
