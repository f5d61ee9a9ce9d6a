"""Turn settings, model, data and machine into a request to plan for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ajusta.blocks.optimizer import AdamWSettings
from ajusta.data.order import Order, worst_step
from ajusta.data.pack import lay_out, micro_batches
from ajusta.engine.assemble import AdapterSpec
from ajusta.engine.weights import WeightSource
from ajusta.memory.dtypes import DTYPES
from ajusta.planning.search import Request
from ajusta.planning.trace import Subject
from ajusta.spec.config import Config
from ajusta.spec.data import Example, MicroBatch
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
    source: WeightSource,
    machine: Machine,
    examples: Sequence[Example],
    order: Order,
    steps: int,
    *,
    with_savings: bool = False,
) -> Request:
    """Return what to plan for: this model on this machine, at the worst that this data will ask of it."""
    packing = config.text.packing
    longest = max(len(example) for example in examples)
    heaviest = worst_step(order, longest, steps, packing=packing)

    def batches(micro_tokens: int) -> tuple[MicroBatch, ...]:
        chosen = [examples[index] for index in order.examples_of_step(heaviest.step)]
        return micro_batches(chosen, micro_tokens, packing=packing)

    def fullest(micro_tokens: int) -> MicroBatch:
        worst = worst_step(order, micro_tokens, steps, packing=packing)
        return lay_out([examples[index] for index in worst.fullest])

    return Request(
        subject=Subject(
            config=source.config,
            source=source,
            dtype=DTYPES[machine.dtype],
            bits=config.bits,
            adapter=adapter_spec(config),
            optimizer=optimizer_settings(config),
        ),
        batches=batches,
        fullest=fullest,
        step_tokens=heaviest.step_tokens,
        longest=longest,
        machine=machine,
        recompute=config.gradient_checkpointing,
        with_savings=with_savings,
        micro_tokens=None if config.micro_batch == "auto" else config.micro_batch * longest,
    )


def imagined_examples(config: Config, vocabulary: int, limit: int | None) -> tuple[Example, ...]:
    """Return one step's worth of examples of full length, to plan for where no data is given."""
    length = min(config.max_length, limit or config.max_length)
    trained = np.ones(length, dtype=np.bool_)
    trained[0] = False
    ids = np.arange(length, dtype=np.int64) % vocabulary
    return tuple(
        Example(ids=ids, trained=trained, source="imagined", example_id=number) for number in range(config.batch_size)
    )
