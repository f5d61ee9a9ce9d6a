"""Frozen linears: the same numbers as the module they replace, nothing saved, ties kept."""

from __future__ import annotations

import pytest
import torch
from layers import frozen_of
from torch import nn
from transformers.pytorch_utils import Conv1D

from ajusta.blocks.linear import is_conv1d, is_linear

KINDS = ["none", "int8", "nf4"]


def module(kind=nn.Linear, bias=True):
    torch.manual_seed(0)
    if kind is Conv1D:
        layer = Conv1D(10, 66)
        nn.init.normal_(layer.bias)
        return layer
    return nn.Linear(66, 10, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_bit_equal(bias):
    layer = module(bias=bias)
    x = torch.randn(2, 3, 66)
    wanted, x_wanted = layer(x), x.clone().requires_grad_()
    frozen, x_ours = frozen_of(layer), x.clone().requires_grad_()
    assert torch.equal(frozen(x), wanted)
    layer(x_wanted).square().sum().backward()
    frozen(x_ours).square().sum().backward()
    assert torch.equal(x_ours.grad, x_wanted.grad)
    assert all(parameter.grad is None for parameter in frozen.parameters())


def test_conv1d_is_bit_equal_and_not_copied():
    layer = module(Conv1D)
    x = torch.randn(2, 3, 66)
    wanted = layer(x)
    frozen = frozen_of(layer)
    assert frozen.transposed and (frozen.out_features, frozen.in_features) == (10, 66)
    assert frozen.storage.weight is layer.weight and torch.equal(frozen(x), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", [nn.Linear, Conv1D])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_are_those_of_the_dense_weight(what, kind, dtype):
    frozen = frozen_of(module(what), kind)
    x = torch.randn(5, 66, dtype=dtype, requires_grad=True)
    dense = frozen.storage.dense(dtype)
    y = frozen(x)
    assert y.dtype == dtype and torch.equal(y, torch.addmm(frozen.bias.to(dtype), x, dense.t()))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, torch.ones_like(y) @ dense)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_saved(kind):
    frozen = frozen_of(module(), kind)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        frozen(torch.randn(4, 66, requires_grad=True))
    assert not saved


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    frozen = frozen_of(module(), kind)
    assert torch.autograd.gradcheck(frozen, torch.randn(2, 3, 66, dtype=torch.float64, requires_grad=True))


def test_a_tied_weight_stays_tied():
    embedding = nn.Embedding(10, 66)
    layer = nn.Linear(66, 10, bias=False)
    layer.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "layer": frozen_of(layer)})
    model.to(torch.float64)
    assert model["layer"].storage.weight is model["embedding"].weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", [nn.Linear, Conv1D])
def test_made_on_meta(what, kind):
    with torch.device("meta"):
        empty = Conv1D(10, 66) if what is Conv1D else nn.Linear(66, 10)
    frozen = frozen_of(empty, kind)
    assert frozen(torch.empty(3, 66, device="meta")).shape == (3, 10)
    assert frozen.storage.kind == kind


class Tuple(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


def test_what_is_linear():
    assert is_linear(nn.Linear(1, 1)) and is_linear(Conv1D(1, 1)) and is_conv1d(Conv1D(1, 1))
    assert not is_linear(nn.Conv1d(1, 1, 1)) and not is_linear(nn.Embedding(1, 1)) and not is_conv1d(nn.Linear(1, 1))
    assert not is_linear(Tuple(1, 1))  # what it does besides would be lost


@pytest.mark.parametrize("lead", [(5,), (2, 3), ()])
def test_the_output_may_be_written_into(lead):
    frozen = frozen_of(module())
    x = torch.randn(*lead, 66, requires_grad=True)
    y = frozen(x)
    y += 1
    y.mul_(2).sum().backward()
    assert y.shape == (*lead, 10)
    assert torch.allclose(x.grad, 2 * frozen.storage.dense(torch.float32).sum(0).expand_as(x), atol=1e-5)


def test_strided_and_expanded_inputs():
    frozen = frozen_of(module())
    x = torch.randn(66, 4, 3, requires_grad=True)
    frozen(x.permute(2, 1, 0)).sum().backward()
    frozen(torch.randn(66).expand(2, 66).requires_grad_()).sum().backward()
    assert x.grad.shape == x.shape
