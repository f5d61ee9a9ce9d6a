"""Turn settings, model, data and machine into a request to plan for."""

from __future__ import annotations

import numpy as np
from transformers import PretrainedConfig

from ajusta.blocks.optimizer import AdamWSettings
from ajusta.data.demand import Demand
from ajusta.data.order import Order
from ajusta.engine.assemble import AdapterSpec
from ajusta.engine.weights import WeightSource
from ajusta.memory.dtypes import DTYPES
from ajusta.planning.search import Request
from ajusta.planning.trace import Subject
from ajusta.spec.config import Config
from ajusta.spec.data import Example
from ajusta.spec.device import Machine


def adapter_spec(config: Config) -> AdapterSpec:
    """Return the adapters that the settings ask for."""
    lora = config.lora
    return AdapterSpec(
        rank=lora.r,
        alpha=lora.alpha,
        rank_stabilized=lora.rank_stabilized,
        dropout=lora.dropout,
        seed=config.seed,
        targets=None if lora.targets == "all-linear" else lora.targets,
        exclude=lora.exclude,
    )


def optimizer_settings(config: Config) -> AdamWSettings:
    """Return the optimizer that the settings ask for."""
    chosen = config.optimizer
    return AdamWSettings(
        beta1=chosen.beta1,
        beta2=chosen.beta2,
        epsilon=chosen.epsilon,
        weight_decay=chosen.weight_decay,
        max_grad_norm=chosen.max_grad_norm,
    )


def make_request(
    config: Config,
    shape: PretrainedConfig,
    source: WeightSource | None,
    machine: Machine,
    demand: Demand,
    *,
    with_savings: bool = False,
) -> Request:
    """Return what to plan for: this model on this machine, at the worst that this data will ask of it.

    `source` is None where the model is known by its `shape` alone.
    """
    return Request(
        subject=Subject(
            config=shape,
            source=source,
            dtype=DTYPES[machine.dtype],
            bits=config.bits,
            adapter=adapter_spec(config),
            optimizer=optimizer_settings(config),
            kind=machine.device.kind,
        ),
        batches=demand.heaviest,
        fullest=demand.fullest,
        measured=demand.fullest_measured,
        exam_tokens=demand.exam_tokens,
        step_tokens=demand.heaviest_tokens,
        longest=demand.longest,
        machine=machine,
        recompute=config.gradient_checkpointing,
        with_savings=with_savings,
        micro_tokens=None if config.micro_batch == "auto" else config.micro_batch * demand.longest,
    )


def imagined_demand(config: Config, vocabulary: int, limit: int | None) -> Demand:
    """Return one step's worth of examples of full length, to plan for where no data is given."""
    length = min(config.max_length, limit or config.max_length)
    trained = np.ones(length, dtype=np.bool_)
    trained[0] = False
    ids = np.arange(length, dtype=np.int64) % vocabulary
    examples = tuple(
        Example(ids=ids, trained=trained, source="imagined", example_id=number) for number in range(config.batch_size)
    )
    order = Order(lengths=(length,) * len(examples), batch_size=config.batch_size, seed=config.seed)
    return Demand(examples=examples, order=order, steps=1, packing=config.text.packing)
