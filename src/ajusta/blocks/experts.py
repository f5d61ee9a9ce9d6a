"""Mixture-of-experts layers (Shazeer 2017, arXiv 1701.06538) for transformers' `ExpertsInterface`.

    y_t = sum_k w_tk down_e(act(up_e(x_t)))        e = index_tk

The rows, one for each choice, are sorted by expert, and each expert's product is taken over its own rows
(blocks/grouped.py). Frozen weights have no gradient, so no product keeps its input for one. The router's weights w do
have a gradient, which would ask for the rows of the last product, S x H values. It is taken from what the backward pass
makes anyway (Guo 2025, arXiv 2512.14080, section 3.2):

    u_s = W_e^T dy_t        dact_s = w_s u_s        dw_s = <dy_t, W_e act_s> = <u_s, act_s>

So a layer keeps gate and up [S, 2 F], w, and the order of the rows; `act` is made again (blocks/rebuild.py). Experts
that are trained (engine/full.py) keep the rows of the first product as well.

Shape letters: T tokens, K choices a token, S = T K rows, E experts, H hidden, F features inside an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ajusta.base.errors import ModelError
from ajusta.blocks.gated import gated_product
from ajusta.blocks.grouped import Routing, Stack
from ajusta.blocks.rebuild import RecomputedActivation, recomputed

EXPERTS_NAME = "ajusta"
_PLAIN_GATE = "transformers.integrations.moe"  # whose gate is act(gate) * up; told by name: blocks import torch only


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run a layer of experts as transformers' `ExpertsInterface` asks.

    Args:
        module: the layer with its stacked weights [E, out, in] (or transposed), biases, activation and gate.
        hidden_states: [T, H].
        top_k_index: [T, K], the experts that each token goes to.
        top_k_weights: [T, K], what their answers are multiplied with.

    Returns:
        [T, H].

    Raises:
        ModelError: the family takes a norm between experts and weights, or spreads its experts over devices.
    """
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        raise ModelError(f"{type(module).__name__} does more with its experts than multiply and add, which ours do not")
    routing = Routing.of(top_k_index, module.num_experts)
    enter = Stack(
        module=module, name="gate_up_proj" if _is_gated(module) else "up_proj", transposed=module.is_transposed
    )
    leave = Stack(module=module, name="down_proj", transposed=module.is_transposed)
    rows_SH = _Spread.apply(hidden_states, routing).to(enter.dtype)
    up_SF = _Product.apply(rows_SH, enter.parameter, enter, routing)
    del rows_SH
    if module.has_bias:
        bias_EF = module.get_parameter(f"{enter.name}_bias")
        up_SF.add_(bias_EF.index_select(0, routing.sort(top_k_index)))
    active_SF = _activate(module, up_SF)
    del up_SF
    y_TH: Tensor = _WeightedProduct.apply(active_SF, top_k_weights, leave.parameter, leave, routing)
    if module.has_bias:
        y_TH = y_TH + _weighted_bias(module.get_parameter(f"{leave.name}_bias"), top_k_index, top_k_weights)
    return y_TH.to(hidden_states.dtype)


class _Spread(torch.autograd.Function):
    """Each row's token; the gradient is the sum over a token's rows."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return routing.spread(x_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SH: Tensor) -> tuple[Tensor, None]:
        return ctx.routing.gather(grad_SH), None


class _Product(torch.autograd.Function):
    """Each row times its expert's weight; nothing is kept of the rows where that is frozen."""

    @staticmethod
    def forward(ctx: Any, rows_SI: Tensor, weight: Tensor, stack: Stack, routing: Routing) -> Tensor:
        ctx.stack, ctx.routing = stack, routing
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(rows_SI)
        return stack.product(rows_SI, routing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SO: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.stack.gradient(*ctx.saved_tensors, grad_SO, ctx.routing)
        return ctx.stack.product_transposed(grad_SO, ctx.routing), grad_weight, None, None


class _WeightedProduct(torch.autograd.Function):
    """The same, each row weighted and a token's rows added up; the product itself is not kept (see above)."""

    @staticmethod
    def forward(
        ctx: Any, active_SF: Tensor, weights_TK: Tensor, weight: Tensor, stack: Stack, routing: Routing
    ) -> Tensor:
        ctx.save_for_backward(active_SF, weights_TK)
        ctx.stack, ctx.routing = stack, routing
        return routing.gather(stack.product(active_SF, routing), weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        routing: Routing = ctx.routing
        u_SF = ctx.stack.product_transposed(routing.spread(grad_TH), routing)
        active_SF, weights_TK = ctx.saved_tensors  # only now: it may be made again here
        grad_S = (active_SF * u_SF).sum(-1)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            scaled_SH = routing.spread(grad_TH).mul_(routing.sort(weights_TK).to(grad_TH.dtype)[:, None])
            grad_weight = ctx.stack.gradient(active_SF, scaled_SH, routing)
            del scaled_SH
        u_SF.mul_(routing.sort(weights_TK).to(u_SF.dtype)[:, None])
        return u_SF, routing.unsort(grad_S).to(weights_TK.dtype), grad_weight, None, None


def _is_gated(module: Any) -> bool:
    return bool(getattr(module, "has_gate", True))


def _activate(module: Any, up_SF: Tensor) -> Tensor:
    """Return what the experts' last weight receives; only gate and up are kept for it."""
    act: Any = getattr(module, "act_fn", None)
    act = act.act if isinstance(act, RecomputedActivation) else act  # here it is made again anyway
    if not _is_gated(module):
        return recomputed(up_SF, act)
    if act is None or type(module)._apply_gate.__module__ != _PLAIN_GATE:
        return recomputed(up_SF, module._apply_gate)
    gate, up = up_SF.chunk(2, dim=-1)
    return gated_product(gate, up, act)


def _weighted_bias(bias_EH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the weighted sum of the biases of each token's experts [T, H]."""
    none_TE = weights_TK.new_zeros(index_TK.shape[0], bias_EH.shape[0])
    return none_TE.scatter_add(1, index_TK, weights_TK).to(bias_EH.dtype) @ bias_EH
