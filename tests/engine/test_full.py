"""Full fine-tuning: every weight's gradient is stock transformers', and its bytes are the same on `meta`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import stock_model
from planned import fullest
from tiny_models import numel, tiny_config
from torch import Tensor, nn
from transformers import PretrainedConfig

from ajusta.blocks.optimizer import AdamWSettings
from ajusta.engine.full import FullTraining
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.ledger import Category, Section
from ajusta.memory.place import CountingPlace, RealPlace
from ajusta.spec.data import MicroBatch

KINDS = ["llama", "gpt2", "qwen3_moe"]
MORE = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3", "bloom", "gemma2", "gpt_oss")]


def training(config: PretrainedConfig, dtype: torch.dtype, device: str) -> FullTraining:
    torch.manual_seed(0)
    place = RealPlace(device) if device == "cpu" else CountingPlace()
    return FullTraining(build_skeleton(config, dtype, device).chain, AdamWSettings(), place)


def stock_loss(model: Any, micro: MicroBatch) -> Tensor:
    """Return the summed loss of the untouched model, one example after the other."""
    total, start = torch.zeros(()), 0
    for end in micro.segment_ends:
        at = [n for n, position in enumerate(micro.positions_N) if start <= position < end]
        logits = model(input_ids=torch.from_numpy(micro.input_ids_T[start:end])[None]).logits[0].float()
        chosen = logits[torch.from_numpy(micro.positions_N[at] - start)]
        total = total + nn.functional.cross_entropy(chosen, torch.from_numpy(micro.labels_N[at]), reduction="sum")
        start = end
    return total


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_every_weight_gets_stocks_gradient(kind: str) -> None:
    config = tiny_config(kind)
    stock = stock_model(config).requires_grad_(True)
    skeleton = build_skeleton(config, torch.float32, "cpu")
    theirs = dict(stock.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, slot in skeleton.slots.items():
            slot.holder.get_parameter(slot.leaf).copy_(theirs[name])
    place = RealPlace("cpu")
    ours = FullTraining(skeleton.chain, AdamWSettings(), place)
    assert ours.parameters == numel(stock)
    micro = fullest(45)
    assert len(micro.segment_ends) > 1
    loss, expected = ours.accumulate(micro), stock_loss(stock, micro)
    expected.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, slot in skeleton.slots.items():
        mine, other = slot.holder.get_parameter(slot.leaf).grad, theirs[name].grad
        assert mine is not None
        if other is None:
            assert not mine.any(), name
        else:  # fp32, other kernels
            assert float((mine - other).abs().max() / other.abs().max().clamp(min=1e-12)) < 1e-4, name


def account(ours: FullTraining, micro: MicroBatch) -> tuple[Section, ...]:
    with ours.place.counting() as ledger:
        for optimizer in ours.optimizers:
            ledger.adopt(ours.chain.model.parameters(), Category.ADAPTERS)
            ledger.adopt((optimizer.grads,), Category.GRADIENTS)
            state = {id(each): each for each in (optimizer.first, optimizer.second, optimizer.updates)}
            if optimizer.master is not optimizer.weights:
                state[id(optimizer.master)] = optimizer.master
            ledger.adopt(state.values(), Category.OPTIMIZER)
        ledger.adopt(ours.chain.model.buffers(), Category.BASE)
        ledger.start_over()
        ours.step(micro, 0.0)
        return ledger.cut()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_the_traced_step_is_the_real_one_to_the_byte(kind: str, dtype: torch.dtype) -> None:
    config = tiny_config(kind)
    real, traced = (account(training(config, dtype, device), fullest(100)) for device in ("cpu", "meta"))
    assert [(s.name, s.block) for s in real] == [(s.name, s.block) for s in traced]
    if kind in ("gpt2", "bloom") and dtype == torch.bfloat16:
        # torch's layer norm keeps mean and scale in bf16 on a processor, and says fp32 on `meta`: 4 bytes a row more.
        real, traced = (tuple(s for s in each if s.name == "update") for each in (real, traced))
    for ran, told in zip(real, traced, strict=True):
        assert (ran.peak, ran.end) == (told.peak, told.end), (ran.name, ran.block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_takes_sixteen_bytes_beside_the_activations(dtype: torch.dtype) -> None:
    ours = training(tiny_config("llama"), dtype, "meta")
    buffers = sum(buffer.nbytes for buffer in ours.chain.model.buffers())
    assert sum(ours.resident_bytes()) == 16 * ours.parameters + 8 + buffers


def test_a_step_at_a_rate_learns() -> None:
    ours = training(tiny_config("llama"), torch.float32, "cpu")
    losses = [float(ours.step(fullest(40), 1e-3)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.99 * losses[0]
    assert not any(bool(optimizer.grads.any()) for optimizer in ours.optimizers)


def test_a_parameter_that_was_made_elsewhere_is_brought_here() -> None:
    chain = build_skeleton(tiny_config("llama"), torch.float32).chain
    norm = copy.copy(chain.model.get_submodule("model.norm"))
    norm._parameters = {"weight": nn.Parameter(torch.ones(64))}
    chain.model.get_submodule("model").norm = norm
    chain.epilogue = [norm]
    ours = FullTraining(chain, AdamWSettings(), CountingPlace())
    assert all(parameter.is_meta for parameter in ours.chain.model.parameters())
    ours.step(fullest(40), 0.0)
