"""Attention inside segments: the flash way against the plain one, and every bias against a loop written by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ajusta.base.errors import ModelError
from ajusta.blocks.attention import (
    AttentionBias,
    Generation,
    SegmentAttention,
    Segments,
    attention,
    plain_attention,
    using,
)
from ajusta.memory.ledger import Category, Ledger

# fp32 and bf16: both ways round; 2^-24 and 2^-9 of the largest, times a few roundings in a row of up to 33 terms.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-6, torch.bfloat16: 3e-2}
LENGTHS = [(1,), (2,), (15,), (16,), (17,), (33,), (1, 1), (15, 1, 33), (16, 17, 2)]
HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 16, 0.3
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
BIASES = {
    "causal": AttentionBias(),
    "alibi": AttentionBias(slopes=SLOPES),
    "window": AttentionBias(window=5),
    "both": AttentionBias(slopes=SLOPES, window=3),
}
ALL_BIASES = {
    **BIASES,
    "softcap": AttentionBias(softcap=2.0),
    "sinks": AttentionBias(sinks=torch.tensor([0.3, -1.0, 2.0, 0.0])),
    # Not with ALiBi: a sink is no key, so it has no place on ALiBi's scale, and no family has both.
    "all but alibi": AttentionBias(window=4, softcap=1.5, sinks=torch.tensor([0.3, -1.0, 2.0, 0.0])),
}


def segments_of(lengths: tuple[int, ...]) -> Segments:
    return Segments(ends=tuple(torch.tensor(lengths).cumsum(0).tolist()))


def qkv(tokens: int, dtype: torch.dtype, *, strided: bool = True, device: str = "cpu") -> list[Tensor]:
    """Return q, k, v as models give them: transposed views of [1, T, heads, D], or contiguous."""
    generator = torch.Generator().manual_seed(tokens)
    made = []
    for heads in (HEADS, KV_HEADS, KV_HEADS):
        values = torch.randn(1, tokens, heads, WIDTH, generator=generator, dtype=torch.float64) * 1.5
        tensor = values.to(dtype).to(device).transpose(1, 2)
        made.append((tensor if strided else tensor.contiguous()).requires_grad_(True))
    return made


def gradient_of_out(query: Tensor) -> Tensor:
    """Return a fixed gradient of out, laid out as it comes back from the model."""
    batch, heads, tokens, width = query.shape
    values = torch.linspace(-1, 1, query.numel(), dtype=torch.float64).mul_(7).sin_()
    return values.view(batch, tokens, heads, width).to(query.device, query.dtype).transpose(1, 2)


def forward_and_backward(
    way: str, inputs: list[Tensor], segments: Segments, bias: AttentionBias, grad: Tensor | None = None
) -> list[Tensor]:
    """Return out and the gradients of q, k and v."""
    function = SegmentAttention.apply if way == "flash" else plain_attention
    out = function(*inputs, SCALE, segments, bias)
    grads = torch.autograd.grad(out, inputs, gradient_of_out(inputs[0]) if grad is None else grad)
    return [out.detach(), *grads]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest value of all."""
    largest = max(float(t.abs().max()) for t in expected)
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, expected, strict=True)) / largest


@pytest.mark.parametrize("strided", [True, False], ids=["strided", "contiguous"])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_flash_way_is_the_plain_way(dtype: torch.dtype, bias: AttentionBias, strided: bool) -> None:
    for lengths in LENGTHS:
        segments = segments_of(lengths)
        inputs = qkv(sum(lengths), dtype, strided=strided)
        exact = [t.detach().double().requires_grad_(True) for t in inputs]
        found = forward_and_backward("flash", inputs, segments, bias)
        expected = forward_and_backward("plain", exact, segments, bias)
        assert all(f.dtype == dtype for f in found)
        assert worst(found, expected) < TOLERANCE[dtype], lengths


def options_of(bias: AttentionBias) -> dict[str, Any]:
    """Return the bias as families hand it over."""
    return {
        "alibi_slopes": bias.slopes, "sliding_window": bias.window, "softcap": bias.softcap, "s_aux": bias.sinks,
    }  # fmt: skip


def by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float, segments: Segments, bias: AttentionBias) -> Tensor:
    """Do it number by number, from the formulas of the papers."""
    out = torch.zeros_like(query)
    for head in range(query.shape[1]):
        shared = head * key.shape[1] // query.shape[1]
        for start, end in segments.bounds():
            for i in range(start, end):
                seen = [j for j in range(start, i + 1) if bias.window is None or i - j < bias.window]
                weights = []
                for j in seen:
                    logit = scale * float(query[0, head, i] @ key[0, shared, j])
                    if bias.softcap is not None:
                        logit = bias.softcap * math.tanh(logit / bias.softcap)
                    if bias.slopes is not None:
                        logit -= float(bias.slopes[head]) * (i - j)  # Press 2021: a penalty for each token of distance
                    weights.append(math.exp(logit))
                total = sum(weights)
                if bias.sinks is not None:
                    total += math.exp(float(bias.sinks[head]))
                out[0, head, i] = sum(w / total * value[0, shared, j] for w, j in zip(weights, seen, strict=True))
    return out


@pytest.mark.parametrize("name", ALL_BIASES)
def test_the_plain_way_is_the_formula(name: str) -> None:
    bias = ALL_BIASES[name]
    segments = segments_of((1, 9, 6))
    inputs = [t.detach() for t in qkv(16, torch.float64)]
    found = plain_attention(*inputs, 0.25, segments, bias)
    assert worst([found], [by_hand(*inputs, 0.25, segments, bias)]) < 1e-10


@pytest.mark.parametrize("way", ["flash", "plain"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_a_segment_in_a_row_is_the_segment_alone_bit_for_bit(bias: AttentionBias, dtype: torch.dtype, way: str) -> None:
    lengths = (15, 1, 33, 16, 2)
    segments = segments_of(lengths)
    inputs = qkv(sum(lengths), dtype)
    together = forward_and_backward(way, inputs, segments, bias)
    grad = gradient_of_out(inputs[0])
    for start, end in segments.bounds():
        alone = [t.detach()[:, :, start:end].contiguous().requires_grad_(True) for t in inputs]
        parts = forward_and_backward(way, alone, Segments(ends=(end - start,)), bias, grad[:, :, start:end])
        for whole, part in zip(together, parts, strict=True):
            assert torch.equal(whole[:, :, start:end], part), (start, end)


@pytest.mark.parametrize("bias", ALL_BIASES.values(), ids=ALL_BIASES)
def test_nothing_crosses_a_border(bias: AttentionBias) -> None:
    module = nn.Module()
    segments = segments_of((5, 7))
    first, second = (qkv(12, torch.float64) for _ in range(2))
    with torch.no_grad():
        for tensor in second:
            tensor[:, :, :5] = torch.randn_like(tensor[:, :, :5]) * 100
        options = options_of(bias)
        with using(segments):
            outs = [attention(module, *inputs, **options)[0] for inputs in (first, second)]
    assert torch.equal(outs[0][:, 5:], outs[1][:, 5:])
    assert not torch.equal(outs[0][:, :5], outs[1][:, :5])


@pytest.mark.parametrize("strided", [True, False], ids=["strided", "contiguous"])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_meta_gives_the_same_sizes_strides_and_peak(dtype: torch.dtype, bias: AttentionBias, strided: bool) -> None:
    for lengths in [(33,), (15, 1, 33)]:
        found = []
        for device in ("cpu", "meta"):
            inputs = qkv(sum(lengths), dtype, device=device, strided=strided)
            grad, slopes = gradient_of_out(inputs[0]), None if bias.slopes is None else bias.slopes.to(device)
            with Ledger() as ledger:
                ledger.adopt([*inputs, grad, *([] if slopes is None else [slopes])], Category.SAVED)
                moved = AttentionBias(slopes=slopes, window=bias.window)
                results = forward_and_backward("flash", inputs, segments_of(lengths), moved, grad)
            layouts = [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in results]
            found.append((layouts, ledger.peak.live_bytes))
        assert found[0] == found[1], lengths


def test_the_flash_way_holds_no_matrix() -> None:
    tokens = 2048
    shape = (1, 1, tokens, 16)
    peaks = []
    for way in ("flash", "plain"):
        inputs = [torch.empty(shape, device="meta").requires_grad_(True) for _ in range(3)]
        with Ledger() as ledger:
            forward_and_backward(way, inputs, Segments(ends=(tokens,)), AttentionBias())
        peak = ledger.peak
        peaks.append(peak.live_bytes - peak.by_category.get(Category.ATTENTION, 0))  # without the kernel's own tiles
    assert peaks[0] == (8 * 16 + 1) * 4 * tokens  # q, k, v, out, their gradients, one number a row
    assert peaks[1] > 2 * 4 * tokens * tokens


@pytest.mark.parametrize("bias", ALL_BIASES.values(), ids=ALL_BIASES)
def test_rows_with_a_cache_are_each_row_alone(bias: AttentionBias) -> None:
    lengths, new = (9, 4, 1), 3
    keys = max(lengths) + new
    torch.manual_seed(0)
    query = torch.randn(3, HEADS, keys, WIDTH, dtype=torch.float64)
    key, value = (torch.randn(3, KV_HEADS, keys, WIDTH, dtype=torch.float64) for _ in range(2))
    valid = torch.zeros(3, keys, dtype=torch.bool)
    for row, length in enumerate(lengths):
        valid[row, max(lengths) - length :] = True  # padding on the left
    module, options = nn.Module(), options_of(bias)
    cut = max(lengths)
    outs = []
    for start, end in [(0, cut), *((cut + i, cut + i + 1) for i in range(new))]:  # the prompts, then token by token
        with using(Generation(valid_BK=valid[:, :end])):
            outs.append(attention(module, query[:, :, start:end], key[:, :, :end], value[:, :, :end], **options)[0])
    together = torch.cat(outs, dim=1)
    for row, length in enumerate(lengths):
        start = max(lengths) - length
        alone = [t[row : row + 1, :, start:] for t in (query, key, value)]
        expected = plain_attention(*alone, WIDTH**-0.5, Segments(ends=(keys - start,)), bias).transpose(1, 2)
        assert worst([together[row : row + 1, start:]], [expected]) < 1e-10
    assert bool(torch.isfinite(together).all())  # padding rows too, or they would spoil the next layer


def test_one_row_in_generation_with_a_shortened_cache() -> None:
    """A sliding-window cache hands over the last keys only; what is masked counts from the end."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 10, 8, dtype=torch.float64) for _ in range(3))
    with using(Generation(valid_BK=torch.ones(1, 10, dtype=torch.bool))):
        whole = attention(nn.Module(), query[:, :, -1:], key, value, sliding_window=4)[0]
        short = attention(nn.Module(), query[:, :, -1:], key[:, :, -4:], value[:, :, -4:], sliding_window=4)[0]
    assert worst([short], [whole]) < 1e-12


def test_the_layout_in_force_is_the_innermost_and_ends() -> None:
    inputs = [t.detach() for t in qkv(8, torch.float64)]
    with using(Segments(ends=(3, 8))):
        with using(Segments(ends=(8,))):
            inner = attention(nn.Module(), *inputs)[0]
        outer = attention(nn.Module(), *inputs)[0]
    assert not torch.equal(inner, outer)
    assert torch.equal(attention(nn.Module(), *inputs)[0], inner)  # nothing in force: one segment


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"attention_mask": torch.zeros(1, 1, 8, 8)}, "mask of its own"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "both directions"),
    ],
)
def test_what_ours_does_not_know_is_refused(options: dict[str, object], word: str) -> None:
    inputs = [t.detach() for t in qkv(8, torch.float64)]
    with pytest.raises(ModelError, match=word):
        attention(nn.Module(), *inputs, **options)  # type: ignore[arg-type]


def test_keys_of_another_row_are_refused() -> None:
    query, key, value = (t.detach() for t in qkv(8, torch.float64))
    with pytest.raises(ModelError, match="no tokens of the row"):
        attention(nn.Module(), query[:, :, -2:], key, value)
