"""What budget_truth does in processes of their own: ask the planner, and live the run under a hard limit from outside.

Imported only in the process that serves them, after the heap has its settings (cell.py). It imports and computes
nothing, so what leaves it has no thread of torch's yet.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import time
import warnings
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from cell import subject_of
from cells import KINDS, Cell
from pairs import STEPS, Pair
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from ajusta.blocks.bitsandbytes_kernels import AVAILABLE, kernel_choice
from ajusta.data.demand import Demand
from ajusta.data.order import Order
from ajusta.data.pack import micro_batches
from ajusta.engine.phases import run_step
from ajusta.memory.measure import MemoryWatch
from ajusta.planning.request import adapter_spec, make_request, optimizer_settings
from ajusta.planning.search import search
from ajusta.spec.config import Config, load_config
from ajusta.spec.data import Example
from ajusta.spec.device import Machine
from ajusta.spec.plan import Plan, Rung
from ajusta.stages.base import Base, position_limit
from ajusta.stages.device import look_at_machine
from ajusta.stages.evaluate import take_loss
from ajusta.stages.load import check_chain, load_base, optimizer_for
from ajusta.stages.rehearse import rehearse

# The models' code and bitsandbytes come in here, once for all: they are no memory of a run's.
MODELS = [MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]] for kind in KINDS]
if AVAILABLE:
    importlib.import_module("bitsandbytes")
RATE = 1e-4
ENOUGH_FOR_THE_POOL = 1 << 17  # elements: torch shares out work above 32,768 of them
NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "memoryerror",
    "out of memory",
    "could not create a primitive",
    "failed to allocate",
)


def ready(connection: Connection) -> None:
    """Say that all imports are done."""
    connection.send("ready")


def decide(pair: Pair, connection: Connection) -> None:
    """Ask the planner as `ajusta train` does, once without room for anything and once for the pair's budget.

    Tells (the leanest plan that there is, the plan for the budget).
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(pair.cell.threads)
    base = base_of(pair.cell)
    request = make_request(_config(pair, 1), base.config, base.source, _machine(pair, 1), demand_of(pair))
    lean = search(request)
    assert not lean.fits, "a byte is enough for nothing"
    plan = search(replace(request, machine=_machine(pair, round(pair.share * lean.need_bytes))))
    connection.send((lean, plan))


def live(pair: Pair, plan: Plan, connection: Connection) -> None:
    """Load, rehearse, train and evaluate by this plan, once the other side has said that the fence is up."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(pair.cell.threads)
    torch.manual_seed(pair.cell.seed)
    life = Life(
        base=base_of(pair.cell), config=_config(pair, plan.budget_bytes), demand=demand_of(pair), rung=plan.rung
    )
    begin_as_a_run()
    gc.collect()
    connection.send({"heap_free_bytes": heap_free_bytes()})
    connection.recv()
    watch, began = MemoryWatch.begin(torch.device("cpu")), time.monotonic()
    told: dict[str, Any] = {"ran": True}
    try:
        told["measured_bytes"] = life.run(plan)
    except Exception as error:  # whatever goes wrong in there is a result
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        told = {"ran": False, "stage": life.stage, "error": text, "no_memory": is_no_memory(text)}
    # The error is gone by now, and with it the frames that held the model: there is room again to tell.
    resident = watch.now_and_peak()[1]
    connection.send({**told, "resident_bytes": resident, "life_s": round(time.monotonic() - began, 2)})


@dataclass(kw_only=True)
class Life:
    """A run from the first weight to the last evaluation, by the functions that `ajusta train` calls."""

    base: Base
    config: Config
    demand: Demand
    rung: Rung
    stage: str = "load"

    def run(self, plan: Plan) -> int:
        """Live it; return the fullest moment of the rehearsal, in bytes of tensors."""
        config, demand, machine = self.config, self.demand, look_at_machine(self.config, _unheard)
        loaded = load_base(
            self.base,
            machine[0],
            dtype=machine[1].dtype,
            bits=config.bits,
            adapter=adapter_spec(config),
            told=lambda done, total: None,
        )
        self.stage = "probe"
        check_chain(loaded, self.base, longest=config.max_length, packing=config.text.packing)
        self.stage = "optimizer"
        optimizer = optimizer_for(loaded, optimizer_settings(config))
        self.stage = "rehearse"
        tokens = self.rung.micro_tokens
        rehearsal = rehearse(loaded, optimizer, plan, demand.fullest(tokens), demand.fullest_measured(tokens))
        self.stage = "train"
        for step in range(demand.steps):
            chosen = [demand.examples[index] for index in demand.order.examples_of_step(step)]
            micro = micro_batches(chosen, tokens, packing=demand.packing)
            run_step(loaded.model, loaded.place, micro, self.rung, optimizer, RATE, step)
        self.stage = "evaluate"
        measured = micro_batches(demand.measured, tokens, packing=demand.packing)
        take_loss(loaded.model.chain, loaded.place, measured, self.rung.loss_chunk, name="heldout", when="after")
        return rehearsal.measured_bytes


def is_no_memory(text: str) -> bool:
    """Say whether an error is the fence's: memory that could not be had."""
    return any(words in text.lower() for words in NO_MEMORY)


def begin_as_a_run() -> None:
    """Do what a run has done by the time its plan is made, so that it stands below the fence and not above it.

    That is the start of torch's pool, whose threads have stacks of 8 MiB each, and where it is installed bitsandbytes,
    which a trace of NF4 imports and times (59 MiB with the compiler that it brings). No plan counts them: a budget is
    counted above what the libraries take themselves.
    """
    torch.zeros(ENOUGH_FOR_THE_POOL).add_(1.0)
    kernel_choice("cpu")


def heap_free_bytes() -> int:
    """Return what glibc's main heap has free already: a run may take it without asking the system."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallInfo
    return int(library.mallinfo2().fordblks)


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h: the last but one is what is free, the last what could be trimmed."""

    _fields_ = (("before", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def base_of(cell: Cell) -> Base:
    """Return the cell's model as a run opens one; there is no tokenizer, as the examples are drawn."""
    source = subject_of(cell).source
    return Base(
        reference="drawn",
        revision=None,
        source=source,
        tokenizer=None,
        end_token_ids=(),
        position_limit=position_limit(source.config),
    )


def demand_of(pair: Pair) -> Demand:
    """Return two steps' worth of examples, one of them of full length, and two that are only measured."""
    cell, chance = pair.cell, np.random.default_rng(pair.cell.seed)
    count = STEPS * pair.batch_size
    lengths = [cell.tokens, *(int(length) for length in chance.integers(cell.tokens // 3, cell.tokens + 1, count + 1))]
    made = [_example(number, length, cell, chance) for number, length in enumerate(lengths)]
    trained, measured = tuple(made[:count]), tuple(made[count:])
    order = Order(lengths=tuple(map(len, trained)), batch_size=pair.batch_size, seed=cell.seed)
    return Demand(examples=trained, order=order, steps=STEPS, packing=cell.layout == "packed", measured=measured)


def _example(number: int, length: int, cell: Cell, chance: np.random.Generator) -> Example:
    trained = chance.random(length) < cell.trained
    trained[0], trained[-1] = False, True
    ids = chance.integers(0, cell.vocabulary, length)
    return Example(ids=ids, trained=trained, source="drawn", example_id=number)


def _config(pair: Pair, budget_bytes: int) -> Config:
    return load_config(overrides={**pair.settings(), "memory": str(budget_bytes)})


def _machine(pair: Pair, budget_bytes: int) -> Machine:
    return look_at_machine(_config(pair, budget_bytes), _unheard)[1]


def _unheard(text: str) -> None:
    """Take a note that nobody need read here: which figures of the processor are the usual ones."""
