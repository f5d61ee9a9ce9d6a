"""Row-wise int8 storage against bitsandbytes."""

from __future__ import annotations

import pytest
import torch

from ajusta.base.errors import ModelError
from ajusta.blocks import bitsandbytes_kernels
from ajusta.blocks.int8 import Int8
from ajusta.blocks.quantize import quantize, storage_from_state

bnb = pytest.importorskip("bitsandbytes") if bitsandbytes_kernels.AVAILABLE else None
needs_bnb = pytest.mark.skipif(not bitsandbytes_kernels.AVAILABLE, reason="bitsandbytes is not installed")
SHAPES = [(8, 64), (1, 1), (5, 30), (3, 33), (300, 577), (2000, 700)]


def weight(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


@needs_bnb
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_scales_and_numbers_equal_bitsandbytes(shape):
    ours = quantize(weight(shape), "int8")
    codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(weight(shape))
    assert torch.equal(ours.CB, codes) and torch.equal(ours.SCB, scales)
    assert torch.equal(ours.dense(torch.float32), torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales))


@needs_bnb
def test_bitsandbytes_opens_ours():
    ours = quantize(weight((40, 64)), "int8")
    theirs = bnb.nn.Linear8bitLt(64, 40, bias=False, has_fp16_weights=False)
    zeros = torch.zeros(40, 64, dtype=torch.int8)
    theirs.weight = bnb.nn.Int8Params(zeros, requires_grad=False, has_fp16_weights=False, CB=zeros, SCB=torch.zeros(40))
    theirs.load_state_dict(ours.state())
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    wanted = x @ ours.dense(torch.float32).t()
    came = theirs(x.half()).float()  # it rounds the activations to 8 bits as well
    assert (came - wanted).abs().max() <= 0.03 * wanted.abs().max()


@needs_bnb
def test_we_open_bitsandbytes():
    theirs = bnb.nn.Linear8bitLt(64, 40, bias=False, has_fp16_weights=False)
    codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(weight((40, 64)))
    theirs.weight = bnb.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
    state = {}
    theirs._save_to_state_dict(state, "", False)
    ours = storage_from_state(state, "layer")
    assert torch.equal(ours.CB, codes) and torch.equal(ours.SCB, scales)


def test_every_dtype_is_the_fp32_product_rounded_once():
    storage = quantize(weight((300, 577)), "int8")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(storage.dense(dtype), storage.dense(torch.float32).to(dtype))


def test_rows_of_zeros_and_denormals_stay_finite():
    numbers = weight((4, 64))
    numbers[1] = 0
    numbers[2] *= 1e-40
    dense = quantize(numbers, "int8").dense(torch.float32)
    assert bool(dense.isfinite().all()) and not dense[1].any() and dense[2].abs().max() < 1e-38


def test_a_missing_scale_names_the_layer():
    tensors = quantize(weight((8, 64)), "int8").state()
    del tensors["SCB"]
    with pytest.raises(ModelError, match=r"layers\.2\.q_proj: the int8 weight has no 'SCB'"):
        storage_from_state(tensors, "layers.2.q_proj")


def test_scales_of_another_length_are_refused():
    tensors = quantize(weight((8, 64)), "int8").state()
    tensors["SCB"] = tensors["SCB"][:-1]
    with pytest.raises(ModelError, match=r"q_proj.*SCB \[7\]"):
        Int8.from_state(tensors, "q_proj")


def test_the_error_is_half_a_step():
    numbers = weight((40, 64))
    step = numbers.abs().amax(1, keepdim=True) / 127
    assert bool(((quantize(numbers, "int8").dense(torch.float32) - numbers).abs() <= step * 0.5001).all())
