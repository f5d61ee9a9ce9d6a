"""Side A: ajusta, through the same engine functions that `ajusta train` calls."""

from __future__ import annotations

import numpy as np
from measures import ALPHA, RANK, RATE, Job
from numpy.typing import NDArray

from ajusta.blocks.optimizer import AdamWSettings
from ajusta.engine.adapter_files import load_into, read_adapter
from ajusta.engine.assemble import AdapterSpec, assemble
from ajusta.engine.phases import make_optimizer, run_step
from ajusta.engine.skeleton import build_skeleton
from ajusta.engine.weights import open_weights
from ajusta.memory.dtypes import DTYPES
from ajusta.memory.place import RealPlace
from ajusta.spec.data import MicroBatch
from ajusta.spec.plan import Rung


def adapter_spec() -> AdapterSpec:
    """Return the adapters' settings, as the file that both sides load has them."""
    return AdapterSpec(rank=RANK, alpha=ALPHA, rank_stabilized=False)


def optimizer_settings() -> AdamWSettings:
    """Return AdamW as the other side has it: no decay, no clipping."""
    return AdamWSettings(weight_decay=0.0, max_grad_norm=0.0)


def one_example(ids_T: NDArray[np.int64]) -> MicroBatch:
    """Return a chunk of the book as one row, every token but the first trained."""
    length = len(ids_T)
    return MicroBatch(
        input_ids_T=ids_T,
        position_ids_T=np.arange(length),
        example_ids_T=np.zeros(length, dtype=np.int64),
        segment_ends=(length,),
        positions_N=np.arange(length - 1),
        labels_N=ids_T[1:],
    )


class Ours:
    """The model on its place, with the adapter of the file."""

    def __init__(self, job: Job) -> None:
        source = open_weights(job.gguf)
        dtype = DTYPES[job.case.dtype]
        self._place = RealPlace("cpu")
        self._model = assemble(
            build_skeleton(source.config, dtype),
            source,
            self._place,
            dtype=dtype,
            bits=job.case.bits,
            adapter=adapter_spec(),
        )
        load_into(self._model.adapters, read_adapter(job.adapter))
        self._optimizer = make_optimizer(self._model, optimizer_settings(), self._place)
        self._rung = Rung(
            recompute_blocks=job.rung.recompute_blocks,
            micro_tokens=job.case.tokens,
            loss_chunk=job.rung.loss_chunk,
            peak_bytes=0,
        )
        self._chunks = job.chunks()
        self._steps = 0

    def step(self, index: int) -> float:
        """Take one optimizer step on chunk `index`; return its mean loss."""
        micro = (one_example(self._chunks[index]),)
        result = run_step(self._model, self._place, micro, self._rung, self._optimizer, RATE, self._steps)
        self._steps += 1
        return result.mean_loss()

    def held_bytes(self) -> int:
        """Return the flat gradient buffer, which exists from the start; stock makes its gradients in each step."""
        return self._optimizer.grads.nbytes


open_trainer = Ours
