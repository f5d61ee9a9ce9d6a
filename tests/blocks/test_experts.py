"""Experts of ours against a plain loop over experts and against transformers' own: values, gradients, bytes kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.aria.configuration_aria import AriaTextConfig
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ajusta.base.errors import ModelError
from ajusta.blocks.experts import experts
from ajusta.blocks.grouped import Routing, grouped_product
from ajusta.blocks.rebuild import rebuilding
from ajusta.memory.ledger import Category, Event, Ledger

T, H, F, E = 13, 24, 40, 5
_LOCAL = {"num_local_experts": E, "hidden_size": H, "intermediate_size": F}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: Qwen3MoeExperts(Qwen3MoeConfig(num_experts=E, hidden_size=H, moe_intermediate_size=F)),
    "transposed": lambda: AriaExperts(
        AriaTextConfig(moe_num_experts=E, hidden_size=H, intermediate_size=F, num_attention_heads=4)
    ),
    "with biases, a gate of its own": lambda: GptOssExperts(GptOssConfig(**_LOCAL)),
    "a gate of its own": lambda: DeepseekV4Experts(DeepseekV4Config(**_LOCAL, moe_intermediate_size=F)),
    "not gated": lambda: NemotronHExperts(
        NemotronHConfig(n_routed_experts=E, hidden_size=H, moe_intermediate_size=F, mlp_hidden_act="relu2")
    ),
}
# Of the largest number: fp64 as the design asks; fp32 sums some 40 products; bf16 has 8 bits, and rounds at each step.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def layer(family: str, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    made = FAMILIES[family]()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made.to(dtype).requires_grad_(False)


def inputs(dtype: torch.dtype, choices: int, tokens: int = T) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, experts, weights, and the gradient of the result; expert 3 is never chosen."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.rand(tokens, E, generator=generator, dtype=torch.float64)
    scores[:, 3] = -1.0
    weights, index = scores.topk(choices, dim=-1)
    x, grad = (torch.randn(tokens, H, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return x, index, weights.to(dtype), grad


def plain(module: Any, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Do the same token by token, expert by expert, in plain torch."""

    def through(x_H: Tensor, name: str, expert: int) -> Tensor:
        weight = getattr(module, name)[expert]
        y = x_H @ weight if module.is_transposed else x_H @ weight.T
        return y + getattr(module, f"{name}_bias")[expert] if module.has_bias else y

    rows = []
    for x_H, index_K, weights_K in zip(x_TH, index_TK, weights_TK, strict=True):
        total = torch.zeros_like(x_H)
        for expert, weight in zip(index_K.tolist(), weights_K, strict=True):
            up = through(x_H, "gate_up_proj" if module.has_gate else "up_proj", expert)
            active = module._apply_gate(up) if module.has_gate else module.act_fn(up)
            total = total + weight * through(active, "down_proj", expert)
        rows.append(total)
    return torch.stack(rows)


def eager(module: Any, *args: Tensor) -> Tensor:
    """Do the same by transformers' own loop."""
    stock = copy.deepcopy(module)
    stock.config._experts_implementation = "eager"
    out: Tensor = stock(*args)
    return out


def gradients(run: Callable[..., Tensor], module: nn.Module, dtype: torch.dtype, choices: int) -> list[Tensor]:
    """Return the result and the gradients of hidden states and router weights."""
    x, index, weights, grad = inputs(dtype, choices)
    x.requires_grad_(True)
    weights.requires_grad_(True)
    with rebuilding():
        y = run(module, x, index, weights)
    torch.autograd.backward(y, grad.to(y.dtype))
    assert x.grad is not None and weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


@pytest.mark.parametrize("twin", [plain, eager])
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_the_twins(
    family: str, dtype: torch.dtype, choices: int, twin: Callable[..., Tensor]
) -> None:
    module = layer(family, dtype)
    # In bf16 the yardstick is computed in fp32 from the same rounded numbers; transformers' own rounds as ours does.
    exact = module if dtype != torch.bfloat16 else layer(family, dtype).float()
    ours = gradients(experts, module, dtype, choices)
    theirs = gradients(twin, exact, next(exact.parameters()).dtype, choices)
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == dtype
        difference = (found.to(expected.dtype) - expected).abs().max() / expected.abs().max()
        assert float(difference) < TOLERANCE[dtype]


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_trained_get_the_twins_gradients(family: str, choices: int) -> None:
    found = []
    for run in (experts, plain):
        module = layer(family, torch.float64).requires_grad_(True)
        answers = gradients(run, module, torch.float64, choices)
        found.append([*answers, *(parameter.grad for parameter in module.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and theirs is not None and theirs.abs().max() > 0
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE[torch.float64]


def test_router_weights_of_another_dtype_get_a_gradient_of_their_own() -> None:
    module = layer("gated", torch.bfloat16)
    x, index, weights, grad = inputs(torch.bfloat16, 2)
    weights = weights.float().requires_grad_(True)
    y = experts(module, x.requires_grad_(True), index, weights)
    torch.autograd.backward(y, grad)
    assert y.dtype == torch.bfloat16 and weights.grad is not None and weights.grad.dtype == torch.float32


@pytest.mark.parametrize("expert", [0, E - 1])
def test_one_expert_may_get_all_and_the_others_nothing(expert: int) -> None:
    module = layer("gated", torch.float64)
    x, index, weights, _ = inputs(torch.float64, 1)
    index = torch.full_like(index, expert)
    assert torch.allclose(experts(module, x, index, weights), plain(module, x, index, weights), rtol=0, atol=1e-12)


def events(device: str, dtype: torch.dtype, family: str) -> list[tuple[int, str]]:
    """Return what comes and goes while a layer runs forward and backward."""
    module = layer(family, dtype).to(device)
    x, index, weights, grad = (each.to(device) for each in inputs(dtype, 3, tokens=40))
    x.requires_grad_(True)
    weights.requires_grad_(True)
    with Ledger(record=True) as ledger:
        with rebuilding():
            y = experts(module, x, index, weights)
        torch.autograd.backward(y, grad)
        del y
        found: list[Event] = [event for section in ledger.cut() for event in section.events]
    return [(event.bytes, event.operation) for event in found]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_meta_allocates_what_a_processor_does_byte_for_byte(family: str, dtype: torch.dtype) -> None:
    real = events("cpu", dtype, family)
    assert len(real) > 40
    assert events("meta", dtype, family) == real


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_gate_and_up_and_what_sorts_them(family: str) -> None:
    module = layer(family, torch.float32)
    x, index, weights, _ = inputs(torch.float32, 3)
    rows, wide = T * 3, F if family == "not gated" else 2 * F
    with Ledger() as ledger, rebuilding():
        ledger.adopt((*module.parameters(), x, index, weights), Category.BASE)
        before = ledger.now
        y = experts(module, x.requires_grad_(True), index, weights.requires_grad_(True))
        kept = ledger.now - before - y.nbytes
    sorting = 8 * rows + 4 * E  # the order of the rows, and where experts end
    assert kept == 4 * rows * wide + sorting


def test_nothing_is_kept_without_a_gradient() -> None:
    module = layer("gated", torch.float32)
    x, index, weights, _ = inputs(torch.float32, 3)
    with Ledger() as ledger, torch.no_grad(), rebuilding():
        ledger.adopt((*module.parameters(), x, index, weights), Category.BASE)
        before = ledger.now
        y = experts(module, x, index, weights)
        assert ledger.now - before == y.nbytes


def test_the_same_bits_every_time() -> None:
    module = layer("gated", torch.bfloat16)
    first, second = (gradients(experts, module, torch.bfloat16, 3) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_what_a_family_does_between_experts_and_weights_is_refused() -> None:
    module = layer("gated", torch.float32)
    vars(module)["has_post_expert_norm"] = True
    x, index, weights, _ = inputs(torch.float32, 2)
    with pytest.raises(ModelError, match="Qwen3MoeExperts does more"):
        experts(module, x, index, weights)


def test_rows_lie_expert_by_expert_and_in_the_order_of_their_tokens() -> None:
    index = torch.tensor([[2, 0], [0, 1], [2, 1]])
    routing = Routing.of(index, 4)
    assert routing.order_S.tolist() == [1, 2, 3, 5, 0, 4]
    assert routing.ends_E.tolist() == [2, 4, 6, 6]
    values = torch.arange(6.0).view(3, 2)
    assert torch.equal(routing.unsort(routing.sort(values)), values)
    x = torch.tensor([[1.0], [10.0], [100.0]])
    rows = routing.spread(x)
    assert rows[:, 0].tolist() == [1.0, 10.0, 10.0, 100.0, 1.0, 100.0]
    assert torch.equal(routing.gather(rows), 2 * x)
    assert torch.equal(routing.gather(rows, values), values.sum(1, keepdim=True) * x)


def test_the_kernel_for_cards_means_by_its_arguments_what_the_loop_does() -> None:
    """Its form for a processor is here: the arguments' meaning can be held, its speed and bits on a card cannot."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(*s, generator=generator).bfloat16() for s in ((32, 16), (4, 24, 16)))
    ends = torch.tensor([5, 5, 20, 32], dtype=torch.int32)
    for matrices in (weight.transpose(1, 2), weight.transpose(1, 2).contiguous()):
        theirs = torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
        assert torch.allclose(grouped_product(rows, matrices, ends), theirs, rtol=2e-2, atol=2e-2)
