"""LoRA layers: gradients against plain autograd, saved bytes, precision, dropout, merging."""

from __future__ import annotations

import math

import pytest
import torch
from layers import frozen_of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ajusta.blocks.dropout import DropoutContext, LoraDropout, TokenIds, keep_mask
from ajusta.blocks.lora import LoraLinear, lora_scale
from ajusta.memory.ledger import Category, Ledger

KINDS = ["none", "int8", "nf4"]
INPUTS, OUTPUTS, RANK = 66, 10, 4


def layer(kind="none", dtype=torch.float32, base_dtype=torch.float32, outputs=OUTPUTS, dropout=None):
    torch.manual_seed(0)
    base = frozen_of(nn.Linear(INPUTS, outputs).to(base_dtype), kind)
    generator = torch.Generator().manual_seed(1)
    made = LoraLinear.from_base(base, rank=RANK, alpha=8, generator=generator, dtype=dtype, dropout=dropout)
    nn.init.normal_(made.lora_B, std=0.3)
    return made


def twin(made, x, mask=1.0):
    """The same layer as three lines of plain autograd."""
    dense, bias = made.base.storage.dense(x.dtype), made.base.bias.to(x.dtype)
    low = (x * mask) @ made.lora_A.to(x.dtype).t()
    return x @ dense.t() + bias + made.scale * low @ made.lora_B.to(x.dtype).t()


def gradients(forward, made, x, weights):
    y = forward(x)
    return (y.detach(), *torch.autograd.grad((y * weights).sum(), (x, made.lora_A, made.lora_B)))


def assert_close(ours, wanted, tolerance):
    for one, other in zip(ours, wanted, strict=True):
        assert one.shape == other.shape
        error = (one.double() - other.double()).abs().max() / other.double().abs().max()
        assert float(error) <= tolerance, float(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_gradients_equal_plain_autograd(kind, dtype, tolerance):
    made = layer(kind, dtype)
    x, weights = torch.randn(2, 7, INPUTS, dtype=dtype, requires_grad=True), torch.randn(2, 7, OUTPUTS, dtype=dtype)
    assert_close(gradients(made, made, x, weights), gradients(lambda x: twin(made, x), made, x, weights), tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    made = layer(kind, torch.float64)
    x = torch.randn(2, 3, INPUTS, dtype=torch.float64, requires_grad=True)

    def product(x, lora_A, lora_B):
        made.lora_A, made.lora_B = lora_A, lora_B
        return made(x)

    del made._parameters["lora_A"], made._parameters["lora_B"]
    fresh = layer(kind, torch.float64)
    assert torch.autograd.gradcheck(product, (x, fresh.lora_A, fresh.lora_B))


@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_compute_keeps_the_adapters_gradient_in_fp32(kind):
    """The only roundings beyond bf16's own are those of A, B, x A^T and s dy B: 2^-9 each. Summing over 4,096 tokens
    adds none: the gradient equals the fp64 sum over the same rounded factors to fp32's precision."""
    made = layer(kind, base_dtype=torch.bfloat16)
    x = torch.randn(4096, INPUTS).bfloat16().requires_grad_()
    weights = torch.randn(4096, OUTPUTS).bfloat16()
    y, dx, dA, dB = gradients(made, made, x, weights)
    assert (y.dtype, dx.dtype, dA.dtype, dB.dtype) == (torch.bfloat16,) * 2 + (torch.float32,) * 2
    exact = layer(kind, torch.float64, base_dtype=torch.bfloat16)
    exact.lora_B.data.copy_(made.lora_B)
    x64 = x.detach().double().requires_grad_()
    assert_close((y, dx, dA, dB), gradients(lambda x: twin(exact, x), exact, x64, weights.double()), 2e-2)
    low = (x.detach() @ made.lora_A.detach().bfloat16().t()).double()
    assert_close((dB,), (made.scale * weights.double().t() @ low,), 1e-5)
    dlow = (weights @ made.lora_B.detach().bfloat16()).mul_(made.scale).double()
    assert_close((dA,), (dlow.t() @ x.detach().double(),), 1e-5)


def test_fp32_adapter_on_every_base_dtype():
    for base_dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            made = layer(base_dtype=base_dtype)
            y = made(torch.randn(3, INPUTS, dtype=dtype, requires_grad=True))
            y.float().sum().backward()
            assert y.dtype == dtype and made.lora_A.grad.dtype == torch.float32


@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_called_twice_it_is_bit_equal(probability):
    made = layer(dropout=dropout_of(probability, 14))
    x, weights = torch.randn(2, 7, INPUTS, requires_grad=True), torch.randn(2, 7, OUTPUTS)
    first, second = (gradients(made, made, x, weights) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_starts_at_the_base_model():
    torch.manual_seed(0)
    linear = nn.Linear(INPUTS, OUTPUTS)
    x = torch.randn(5, INPUTS)
    wanted = linear(x)
    made = LoraLinear.from_base(frozen_of(linear), rank=RANK, alpha=8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(made(x), wanted) and not made.lora_B.any()
    assert made.lora_A.abs().max() <= 1 / math.sqrt(INPUTS) and made.lora_A.std() > 0.5 / math.sqrt(INPUTS)


def test_the_start_is_a_function_of_the_generator():
    draws = []
    for _ in range(2):
        base = frozen_of(nn.Linear(INPUTS, OUTPUTS))
        draws.append(LoraLinear.from_base(base, rank=2, alpha=4, generator=torch.Generator().manual_seed(5)).lora_A)
    assert torch.equal(*draws)


def test_scale():
    assert lora_scale(16, 32, True) == 8 and lora_scale(16, 32, False) == 2


def saved_storages(work):
    saved = {}
    with saved_tensors_hooks(lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t):
        result = work()
    return saved, result


@pytest.mark.parametrize("kind", KINDS)
def test_q_k_v_save_one_input(kind):
    layers = [layer(kind, outputs=outputs) for outputs in (66, 22, 22)]
    x = torch.randn(1, 50, INPUTS, requires_grad=True)
    saved, _ = saved_storages(lambda: [made(x) for made in layers])
    parameters = {p.untyped_storage().data_ptr() for made in layers for p in (made.lora_A, made.lora_B)}
    activations = {pointer: t for pointer, t in saved.items() if pointer not in parameters}
    assert x.untyped_storage().data_ptr() in activations
    assert sum(t.untyped_storage().nbytes() for t in activations.values()) == x.nbytes + 3 * 50 * RANK * 4


def test_no_input_gradient_means_no_product_with_w(monkeypatch):
    made = layer("nf4")
    monkeypatch.setattr(type(made.base.storage), "matmul_transposed", lambda *_: pytest.fail("not needed"))
    made(torch.randn(3, INPUTS)).sum().backward()
    assert made.lora_A.grad is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_meta_allocates_what_the_device_does(kind, dtype, probability):
    """One step of the ledger's own figures, forward and backward: real and planned agree to the byte."""
    peaks = []
    for device in ("cpu", "meta"):
        made = layer(kind, dropout=dropout_of(probability, 600, device)).to(device)
        x = torch.ones(600, INPUTS, dtype=dtype, device=device, requires_grad=True)
        with Ledger() as ledger:
            ledger.adopt([x, *made.parameters(), *made.buffers()], Category.BASE)
            made(x).sum().backward()
            peaks.append(ledger.peak.live_bytes)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("kind", ["none", "nf4"])
def test_the_temporaries_of_a_step_are_few(kind):
    """Forward: y, x A^T and the expanded weight. Nothing else of x's size is made (PEFT makes seven: MEMORY.md 1.4)."""
    made, x = layer(kind, outputs=INPUTS), torch.ones(600, INPUTS, requires_grad=True)
    storage = made.base.storage
    with Ledger() as ledger:
        ledger.adopt([x, *made.parameters(), *made.buffers()], Category.BASE)
        before = ledger.now
        y = made(x)
    weight = storage.workspace_bytes(torch.float32)
    assert ledger.peak.live_bytes - before <= y.nbytes + max(weight, 600 * RANK * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_is_the_same_layer(kind):
    made = layer(kind)
    x = torch.randn(5, INPUTS)
    merged = made.merged(torch.float32)
    assert torch.allclose(nn.functional.linear(x, merged, made.base.bias), made(x), rtol=1e-5, atol=1e-5)
    assert torch.allclose(merged - made.base.storage.dense(torch.float32), made.delta(), atol=1e-6)
    assert torch.equal(made.merged(torch.bfloat16), merged.bfloat16())
    assert made.lora_A.requires_grad and not merged.requires_grad


def test_merging_does_not_touch_the_base():
    made = layer()
    before = made.base.storage.dense(torch.float32).clone()
    made.merged(torch.float32).zero_()
    assert torch.equal(made.base.storage.dense(torch.float32), before)


def dropout_of(probability, tokens, device="cpu"):
    if not probability:
        return None
    ids = TokenIds(
        step=2,
        example_ids_T=torch.arange(tokens, device=device) // 5,
        position_ids_T=torch.arange(tokens, device=device) % 5,
    )
    return LoraDropout(probability=probability, layer=3, context=DropoutContext(seed=9, tokens=ids))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_dropout_gradients_equal_plain_autograd(dtype, tolerance, monkeypatch):
    monkeypatch.setattr("ajusta.blocks.storage.TILE_BYTES", 3 * INPUTS * 32)  # tiles of three tokens
    dropout = dropout_of(0.3, 14)
    made = layer("nf4", dtype, dropout=dropout)
    x, weights = torch.randn(2, 7, INPUTS, dtype=dtype, requires_grad=True), torch.randn(2, 7, OUTPUTS, dtype=dtype)
    mask = keep_mask(dropout.row_keys(), INPUTS, 0.3, dtype).view(2, 7, INPUTS) / 0.7
    wanted = gradients(lambda x: twin(made, x, mask), made, x, weights)
    assert_close(gradients(made, made, x, weights), wanted, tolerance)


def test_dropout_is_off_in_evaluation():
    made = layer(dropout=dropout_of(0.5, 14))
    x = torch.randn(14, INPUTS)
    assert not torch.equal(made(x), made.eval()(x))
    made.dropout = None
    assert torch.equal(made(x), made.eval()(x))


def test_the_backward_pass_keeps_the_mask_of_its_own_forward():
    """The engine may already have set the next micro-batch's tokens when a backward pass runs."""
    dropout = dropout_of(0.3, 14)
    made = layer(dropout=dropout)
    x, weights = torch.randn(14, INPUTS, requires_grad=True), torch.randn(14, OUTPUTS)
    wanted = gradients(made, made, x, weights)
    y = made(x)
    dropout.context.tokens = None
    came = torch.autograd.grad((y * weights).sum(), (x, made.lora_A, made.lora_B))
    assert all(torch.equal(one, other) for one, other in zip(came, wanted[1:], strict=True))


@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_any_split_of_the_batch_gives_one_gradient(probability):
    made = layer(dtype=torch.float64, dropout=dropout_of(probability, 40))
    x, weights = torch.randn(40, INPUTS, dtype=torch.float64), torch.randn(40, OUTPUTS, dtype=torch.float64)
    (made(x) * weights).sum().backward()
    whole = [made.lora_A.grad.clone(), made.lora_B.grad.clone()]
    made.zero_grad()
    for part in (slice(0, 7), slice(7, 31), slice(31, 40)):
        if made.dropout is not None:
            ids = torch.arange(40)[part]
            made.dropout.context.tokens = TokenIds(step=2, example_ids_T=ids // 5, position_ids_T=ids % 5)
        (made(x[part]) * weights[part]).sum().backward()
    assert_close((made.lora_A.grad, made.lora_B.grad), whole, 1e-10)


def test_made_on_meta_then_started():
    real = layer()
    with torch.device("meta"):
        base = frozen_of(nn.Linear(INPUTS, OUTPUTS))
    made = LoraLinear.from_base(base, rank=RANK, alpha=8, generator=torch.Generator().manual_seed(1))
    assert made.lora_A.is_meta and made(torch.empty(3, INPUTS, device="meta")).is_meta
    made.restart(torch.Generator().manual_seed(1), torch.device("cpu"))
    assert torch.equal(made.lora_A, real.lora_A)
