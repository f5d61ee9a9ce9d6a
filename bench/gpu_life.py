"""What gpu.py does on a card, in processes of their own: plan a run, live it under a limit, read torch's account.

Imported only there. Weights are drawn on the spot, in the shapes of known models.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from cell import RandomSource
from gpu_plan import Cell
from transformers import AutoConfig, PretrainedConfig

from ajusta.data.demand import Demand
from ajusta.engine.phases import run_step
from ajusta.planning.request import adapter_spec, imagined_demand, make_request, optimizer_settings
from ajusta.planning.search import Request, search
from ajusta.planning.trace import Traced
from ajusta.spec.config import Config, load_config
from ajusta.spec.models import find_model
from ajusta.spec.plan import Plan
from ajusta.stages.base import Base, position_limit
from ajusta.stages.card import machine_of
from ajusta.stages.device import look_at_machine
from ajusta.stages.evaluate import take_loss
from ajusta.stages.load import check_chain, load_base, optimizer_for
from ajusta.stages.rehearse import rehearse

STEPS, RATE, RANK = 2, 1e-4, 16
TINY_CARD = "rtx 3060 12gb"  # what tiny cells are planned for
POOL = 1 << 24  # random numbers drawn once; each tensor is a stretch of them, as drawing billions would take minutes
OLMOE = {
    "model_type": "olmoe",
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "pad_token_id": 1,
}
SHRUNK = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "n_layer": 6, "n_head": 4, "n_embd": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "query_pre_attn_scalar": 16,
}  # fmt: skip


def tell_card(connection: Connection) -> None:
    """Tell the card's name (None without one) and torch's version. In a process of its own: to ask makes a context."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    connection.send({"card": name, "torch": torch.__version__})


def plan_cell(cell: Cell, tiny: bool, connection: Connection) -> None:
    """Tell what is planned of a cell, then what is measured; an error is a figure like any other."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if tiny:
        torch.set_num_threads(1)  # there is nothing to share out
    try:
        run = _Run.planned(cell, tiny)
        connection.send({"planned": run.predicted()})
        told = run.live() if run.plan.fits else {"error": run.plan.sentence()}
    except Exception as error:  # whatever goes wrong in there is a result
        told = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    connection.send({**told, "done": True})


class DrawnSource(RandomSource):
    """A checkpoint in memory of its own for each tensor that is read, filled from one pool of random numbers."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self._pool = torch.empty(POOL, dtype=dtype).uniform_(-0.05, 0.05)

    def read(self, name: str) -> torch.Tensor:
        info = self.infos[name]
        return self._drawn(*info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._drawn(stop - start, *self.infos[name].shape[1:])

    def _drawn(self, *shape: int) -> torch.Tensor:
        drawn = torch.empty(shape, dtype=self._pool.dtype)
        for piece in drawn.view(-1).split(POOL):
            piece.copy_(self._pool[: len(piece)])
        return drawn


def shape_of(name: str, tiny: bool) -> PretrainedConfig:
    """Return the configuration of a known model, with `tiny` its sizes shrunk."""
    known = find_model(name)
    settings = OLMOE if known is None else known.config
    if tiny:
        settings = settings | {key: value for key, value in SHRUNK.items() if key in settings}
    config: PretrainedConfig = AutoConfig.for_model(**settings)
    return config


class Meter:
    """torch's account of a card's memory, stage by stage; on a processor there is none, and each figure is None."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_card = device, device.type == "cuda"
        self.stages: dict[str, dict[str, int | None]] = {}
        self.free_at_first = torch.cuda.mem_get_info(device)[0] if self.is_card else None

    def limit(self, size_bytes: int) -> None:
        """Let torch's allocator reserve so much and no more; what it keeps for later is given back before."""
        if self.is_card:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, size_bytes / total), self.device)

    def note(self, stage: str) -> None:
        """Write down the fullest moments since the last note."""
        if not self.is_card:
            self.stages[stage] = {"allocated_bytes": None, "reserved_bytes": None}
            return
        torch.cuda.synchronize(self.device)
        self.stages[stage] = {
            "allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
        }
        torch.cuda.reset_peak_memory_stats(self.device)

    def most(self, name: str) -> int | None:
        """Return the most of all stages so far."""
        return max((size for stage in self.stages.values() if (size := stage[name]) is not None), default=None)

    def others(self) -> dict[str, int | None]:
        """Return what is held beside torch's allocator, and how often that had to try again or gave up."""
        if not self.is_card or self.free_at_first is None:
            return dict.fromkeys(("beside_bytes", "retries", "refusals"))
        stats = torch.cuda.memory_stats(self.device)
        gone = self.free_at_first - torch.cuda.mem_get_info(self.device)[0]
        return {
            "beside_bytes": gone - torch.cuda.memory_reserved(self.device),
            "retries": stats["num_alloc_retries"],
            "refusals": stats["num_ooms"],
        }


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A cell, planned, by the functions that `ajusta train` calls."""

    config: Config
    base: Base
    device: torch.device
    demand: Demand
    request: Request
    plan: Plan

    @classmethod
    def planned(cls, cell: Cell, tiny: bool) -> _Run:
        """Ask the planner; a tiny cell is planned for a card too, though it will live on the processor."""
        config = load_config(overrides=_settings(cell, tiny))
        shape = shape_of(cell.model, tiny)
        base = Base(
            reference=cell.model,
            revision=None,
            source=DrawnSource(shape, torch.bfloat16),
            tokenizer=None,
            end_token_ids=(),
            position_limit=position_limit(shape),
        )
        device, machine = look_at_machine(config, lambda text: None)
        machine = machine_of(TINY_CARD, config) if tiny else machine
        demand = imagined_demand(config, shape.get_text_config().vocab_size, base.position_limit)
        request = make_request(config, shape, base.source, machine, demand)
        return cls(config=config, base=base, device=device, demand=demand, request=request, plan=search(request))

    def predicted(self) -> dict[str, Any]:
        """Return what the plan says, in bytes."""
        plan, request = self.plan, self.request
        traced = Traced(request.subject, record=True)
        capability = request.machine.device.compute_capability
        told = traced.reserve((request.fullest(plan.rung.micro_tokens),), plan.rung, capability)
        return {
            "tensors_bytes": plan.peak_bytes,
            "allocated_bytes": told.allocated_bytes,
            "reserved_bytes": plan.reserved_bytes,
            "beside_bytes": sum(size for _, size in plan.beside),
            "recompute_blocks": plan.rung.recompute_blocks,
            "blocks": plan.blocks,
            "micro_tokens": plan.rung.micro_tokens,
        }

    def live(self) -> dict[str, Any]:
        """Live the run under the plan's budget, then one more step with no more than the plan says is reserved."""
        plan, meter = self.plan, Meter(self.device)
        meter.limit(plan.budget_bytes - sum(size for _, size in plan.beside))
        loaded = load_base(
            self.base,
            self.device,
            dtype=self.request.machine.dtype,
            bits=self.config.bits,
            adapter=adapter_spec(self.config),
            told=lambda done, total: None,
        )
        check_chain(loaded, self.base, longest=self.demand.longest, packing=self.demand.packing)
        optimizer = optimizer_for(loaded, optimizer_settings(self.config))
        meter.note("load")
        tokens = plan.rung.micro_tokens
        fullest, measured = self.demand.fullest(tokens), self.demand.fullest_measured(tokens)
        rehearsal = rehearse(loaded, optimizer, plan, fullest, measured)
        meter.note("rehearse")

        def step(number: int) -> None:
            run_step(loaded.model, loaded.place, self.demand.heaviest(tokens), plan.rung, optimizer, RATE, number)

        for number in range(STEPS):
            step(number)
        meter.note("train")
        take_loss(loaded.model.chain, loaded.place, (measured,), plan.rung.loss_chunk, name="heldout", when="after")
        meter.note("evaluate")
        found = {
            "tensors_bytes": rehearsal.measured_bytes,
            "allocated_bytes": meter.most("allocated_bytes"),
            "reserved_bytes": meter.most("reserved_bytes"),
            "stages": dict(meter.stages),
            **meter.others(),
        }
        return {"measured": found, "runs_in_reserved": self._again(meter, lambda: step(STEPS))}

    def _again(self, meter: Meter, step: Callable[[], None]) -> bool | None:
        """Say whether a step runs with no more than the plan says is reserved; None where nothing can hold it to."""
        if not meter.is_card or self.plan.reserved_bytes is None:
            step()
            return None
        meter.limit(self.plan.reserved_bytes)
        try:
            step()
            torch.cuda.synchronize(meter.device)
        except torch.OutOfMemoryError:
            return False
        return True


def _settings(cell: Cell, tiny: bool) -> dict[str, object]:
    return {
        "model": cell.model,
        "data": ["drawn"],
        "device": "cpu" if tiny else "cuda",
        "dtype": "fp32" if tiny else cell.dtype,
        "bits": cell.bits,
        "memory": f"{cell.budget_gib}GiB",
        "max_length": 64 if tiny else cell.tokens,
        "batch_size": cell.batch_size,
        "lora.r": RANK,
    }
