"""The loss and the gradient of a step do not depend on how the step is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import settings

from ajusta.data.pack import micro_batches
from ajusta.engine.assemble import AdapterSpec, assemble
from ajusta.engine.phases import make_optimizer, run_step
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.measure import MemoryWatch
from ajusta.memory.place import RealPlace
from ajusta.planning.request import optimizer_settings
from ajusta.spec.plan import Rung
from ajusta.stages.base import open_base
from ajusta.stages.evaluate import take_loss
from ajusta.stages.train import Job, step_batches
from ajusta.stages.work import read_work


@pytest.fixture(scope="module")
def job(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job in fp64, whose rung and packing are to be replaced."""
    out = tmp_path_factory.mktemp("truth")
    config = settings(model, data, out, batch_size=5, micro_batch=5)
    base = open_base(config)
    work = read_work(config, base)
    place = RealPlace("cpu")
    assembled = assemble(
        build_skeleton(base.config, torch.float64),
        base.source,
        place,
        dtype=torch.float64,
        bits="none",
        adapter=AdapterSpec(rank=4, alpha=8.0, dropout=0.3, dtype=torch.float64),
    )
    generator = torch.Generator().manual_seed(1)
    for layer in assembled.adapters.values():
        layer.lora_B.data.normal_(0.0, 0.1, generator=generator)
    return Job(
        config=config,
        model=assembled,
        place=place,
        optimizer=make_optimizer(assembled, optimizer_settings(config), place),
        rung=Rung(recompute_blocks=0, micro_tokens=10_000, loss_chunk=1000, peak_bytes=0),
        order=work.demand.order,
        examples=work.demand.examples,
        heldout=work.batches(work.prepared.heldout, 10_000),
        total_steps=work.total_steps,
        checkpoints=out,
        identity={},
        save_best=lambda: out,
        watch=MemoryWatch.begin(place.device),
        started=0.0,
    )


CUTS: dict[str, dict[str, Any]] = {
    "one example at a time": {"micro_tokens": 1},
    "two bins, small chunks": {"micro_tokens": 150, "loss_chunk": 16},
    "recomputed": {"recompute_blocks": 2, "micro_tokens": 100},
}


def gradients(job: Job, *, packing: bool = True, **cut: Any) -> tuple[float, torch.Tensor]:
    """The step's loss and its mean gradient, before anything is updated."""
    seen: list[torch.Tensor] = []
    text = job.config.text.model_copy(update={"packing": packing})
    cut_job = replace(job, rung=replace(job.rung, **cut), config=job.config.model_copy(update={"text": text}))
    weights = job.optimizer.weights.clone()
    batches = step_batches(cut_job, 1)
    result = run_step(
        job.model, job.place, batches, cut_job.rung, job.optimizer, 0.0, 1, lambda o: seen.append(o.grads.clone())
    )
    assert torch.equal(job.optimizer.weights, weights)
    return result.mean_loss(), seen[0] / result.trained_tokens


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("packing", [True, False])
def test_the_gradient_is_the_same_for_every_cut(job: Job, cut: str, packing: bool) -> None:
    loss, whole = gradients(job)
    other_loss, other = gradients(job, packing=packing, **CUTS[cut])
    assert other_loss == pytest.approx(loss, rel=1e-12)
    assert (other - whole).abs().max() <= 1e-10 * whole.abs().max()


def test_a_measured_loss_is_the_same_for_every_cut(job: Job) -> None:
    examples = job.examples
    found = [
        take_loss(job.model.chain, job.place, micro_batches(examples, size, packing), chunk, name="x", when="before")
        for size, packing, chunk in ((10_000, True, 1000), (1, True, 7), (120, True, 64), (500, False, 1000))
    ]
    assert len({result.tokens for result in found}) == 1
    assert max(result.loss for result in found) - min(result.loss for result in found) <= 1e-12 * found[0].loss
