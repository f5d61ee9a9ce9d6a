"""NF4 storage: codes, scales and numbers against bitsandbytes, both ways; odd sizes; memory."""

from __future__ import annotations

import pytest
import torch

from ajusta.base.errors import ModelError
from ajusta.blocks import bitsandbytes_kernels, nf4_codes
from ajusta.blocks.nf4 import STATE_KEY, Nf4, dequantize_workspace_bytes
from ajusta.blocks.quantize import quantize, storage_from_state
from ajusta.blocks.storage import Dense
from ajusta.memory.ledger import Category, Ledger

bnb = pytest.importorskip("bitsandbytes.functional") if bitsandbytes_kernels.AVAILABLE else None
needs_bnb = pytest.mark.skipif(bnb is None, reason="bitsandbytes is not installed")

SHAPES = [(8, 64), (1, 1), (5, 30), (7, 66), (3, 33), (300, 577), (64, 576), (1030, 520)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(shape, kind="normal"):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    if kind == "zeros":
        numbers[: shape[0] // 2] = 0
    if kind == "denormal":
        numbers *= 1e-38
    if kind == "outliers":
        numbers[0, 0] = 1e4
    return numbers


def bnb_state(numbers, nested=True):
    packed, state = bnb.quantize_4bit(numbers, compress_statistics=nested, quant_type="nf4")
    return {"weight": packed} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}, state


@needs_bnb
@pytest.mark.parametrize("kind", ["normal", "zeros", "denormal", "outliers"])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_equal_bitsandbytes_bit_for_bit(shape, kind):
    numbers = weight(shape, kind)
    packed, state = bnb.quantize_4bit(numbers, quant_type="nf4")
    scales = torch.empty(-(-numbers.numel() // 64))
    codes = nf4_codes.encode_tile(numbers.clone().view(-1), scales)
    assert torch.equal(scales, state.absmax)
    assert torch.equal(codes, packed.view(-1))
    assert torch.equal(quantize(numbers, "nf4").packed, packed)  # across tiles as well


@needs_bnb
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_16_bit_weights_equal_bitsandbytes(dtype):
    numbers = weight((40, 96)).to(dtype)
    assert torch.equal(quantize(numbers, "nf4").packed, bnb_state(numbers)[0]["weight"])


@needs_bnb
@pytest.mark.parametrize("shape", SHAPES)
def test_nested_scales_equal_bitsandbytes_but_for_its_lookup_bins(shape):
    """The CPU kernel of bitsandbytes finds absmax codes by 2^16 bins: a scale that lies within a bin of a border
    between two codes may get the other neighbour. Everything else is equal bit for bit."""
    ours = quantize(weight(shape), "nf4")
    theirs, state = bnb_state(weight(shape))
    assert torch.equal(ours.offset, state.offset)
    assert torch.equal(ours.nested_absmax, theirs["weight.nested_absmax"])
    differ = (ours.absmax != theirs["weight.absmax"]).nonzero().view(-1)
    scales = bnb.quantize_4bit(weight(shape), quant_type="nf4")[1].absmax - state.offset
    normal = scales / ours.nested_absmax.repeat_interleave(256)[: len(scales)]
    values = nf4_codes.dynamic_map(torch.device("cpu"))
    borders = (values[:-1] + values[1:]) / 2
    near = (normal[differ].nan_to_num()[:, None] - borders).abs().amin(1)
    assert bool((near <= 1 / 65535).all()), near.max()
    assert len(differ) <= max(1, 0.005 * len(scales))


@needs_bnb
def test_the_dynamic_map_equals_bitsandbytes():
    assert torch.equal(nf4_codes.dynamic_map(torch.device("cpu")), bnb.create_dynamic_map())
    assert torch.equal(nf4_codes.pair_table(torch.device("cpu"))[:16, 1], bnb.get_4bit_type("nf4", "cpu"))


@needs_bnb
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_equal_bitsandbytes_on_both_roads(shape, dtype, nested):
    tensors, state = bnb_state(weight(shape), nested)
    ours = storage_from_state(tensors, "layer")
    plain = nf4_codes.expand_plain(ours.packed.view(-1), ours._scales(0, shape[0] * shape[1]), ours.pairs, dtype, "cpu")
    assert torch.equal(plain[: shape[0] * shape[1]].view(shape), ours.dense(dtype))
    if shape[1] % 2 == 0:  # for odd rows bitsandbytes compiles code at run time
        assert torch.equal(bnb.dequantize_4bit(tensors["weight"], state).to(dtype), ours.dense(dtype))
        scales = ours._scales(0, shape[0] * shape[1])
        assert torch.equal(bitsandbytes_kernels.expand_nf4(ours.packed, scales, *shape, dtype), ours.dense(dtype))


@needs_bnb
def test_bitsandbytes_opens_ours():
    ours = quantize(weight((96, 128)), "nf4")
    state = ours.state()
    facts = {key.removeprefix("weight."): value for key, value in state.items() if key != "weight"}
    opened = bnb.QuantState.from_dict(facts, torch.device("cpu"))
    assert torch.equal(bnb.dequantize_4bit(state["weight"], opened), ours.dense(torch.float32))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_state_goes_round_bit_for_bit(shape, kind):
    before = quantize(weight(shape), kind)
    after = storage_from_state(before.state(), "layer")
    assert type(after) is type(before)
    assert all(torch.equal(a, b) for a, b in zip(before.state().values(), after.state().values(), strict=True))
    assert torch.equal(before.dense(torch.float32), after.dense(torch.float32))


@pytest.mark.parametrize("key", ["weight.absmax", "weight.nested_absmax", "weight.nested_quant_map", STATE_KEY])
def test_a_missing_scale_names_the_layer(key):
    tensors = quantize(weight((8, 64)), "nf4").state()
    del tensors[key]
    with pytest.raises(ModelError, match=r"layers\.3\.up_proj.*" + key.replace(".", r"\.")):
        storage_from_state(tensors, "layers.3.up_proj")


def test_a_lonely_packed_weight_names_the_layer():
    with pytest.raises(ModelError, match=r"up_proj: the nf4 weight has no 'weight\.absmax'"):
        storage_from_state({"weight": quantize(weight((8, 64)), "nf4").packed}, "up_proj")


def test_scales_of_another_size_are_refused():
    tensors = quantize(weight((8, 64)), "nf4").state()
    tensors["weight.absmax"] = tensors["weight.absmax"][:-1]
    with pytest.raises(ModelError, match=r"up_proj.*\(256, 7, 1\).*needs \(256, 8, 1\)"):
        storage_from_state(tensors, "up_proj")


def test_another_table_is_refused():
    tensors = quantize(weight((8, 64)), "nf4").state()
    tensors["weight.quant_map"] = tensors["weight.quant_map"].flip(0)
    with pytest.raises(ModelError, match=r"up_proj: weight\.quant_map"):
        storage_from_state(tensors, "up_proj")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
def test_infinities_are_refused(bad, kind):
    numbers = weight((8, 64))
    numbers[3, 5] = bad
    with pytest.raises(ModelError, match="infinity or NaN"):
        quantize(numbers, kind)


def test_a_transposed_view_is_quantized_as_its_copy():
    numbers = weight((96, 70)).t()
    assert torch.equal(quantize(numbers, "nf4").packed, quantize(numbers.contiguous(), "nf4").packed)


@pytest.mark.parametrize("kind", ["none", "int8", "nf4"])
@pytest.mark.parametrize("shape", [(8, 64), (5, 30), (300, 577), (40, 1030)])
def test_rows_are_slices_of_the_dense_weight(shape, kind):
    storage = quantize(weight(shape), kind)
    for dtype in (*DTYPES, torch.float64):
        dense = storage.dense(dtype)
        assert dense.shape == shape and dense.dtype == dtype
        for start, stop in ((0, 1), (shape[0] // 2, shape[0]), (shape[0] - 1, shape[0]), (1, 3)):
            assert torch.equal(storage.rows(start, stop, dtype), dense[start:stop])


@pytest.mark.parametrize("kind", ["none", "int8", "nf4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_meta_has_the_same_sizes(shape, kind):
    real, planned = quantize(weight(shape), kind), quantize(weight(shape).to("meta"), kind)
    assert planned.nbytes == real.nbytes and planned.device.type == "meta"
    for dtype in DTYPES:
        assert planned.dense(dtype).shape == shape and planned.dense(dtype).is_meta


def test_bits_per_weight():
    """4 + 8/64 + 32/16384 = 4.127 bits (QLoRA, section 3), and 3 KiB of tables."""
    storage = quantize(torch.empty(1024, 1024, device="meta"), "nf4")
    assert (storage.nbytes - 3 * 1024 - 4) * 8 / 2**20 == 4 + 8 / 64 + 32 / 16384


def peak(work, *kept):
    """Return the most bytes of storages live at once while `work` runs, its result included."""
    with Ledger() as ledger:
        ledger.adopt(kept, Category.BASE)
        before = ledger.now
        result = work()
    del result
    return ledger.peak.live_bytes - before


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 576), (1030, 520)])
def test_the_workspace_is_what_is_said(shape, dtype, device, monkeypatch):
    monkeypatch.setattr(bitsandbytes_kernels, "serves", lambda *_: False)
    storage = quantize(weight(shape).to(device), "nf4")
    said = storage.workspace_bytes(dtype)
    assert said == dequantize_workspace_bytes(shape[0] * shape[1], dtype, "cpu")
    assert peak(lambda: storage.dense(dtype), *storage.buffers()) == said


@needs_bnb
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitsandbytes_holds_no_more_than_the_plain_road(dtype, monkeypatch):
    monkeypatch.setattr(bitsandbytes_kernels, "serves", lambda *_: True)
    for device in ("cpu", "meta"):
        storage = quantize(weight((1030, 520)).to(device), "nf4")
        assert peak(lambda: storage.dense(dtype), *storage.buffers()) == storage.workspace_bytes(dtype)  # noqa: B023
        plain = dequantize_workspace_bytes(1030 * 520, dtype, "cpu")
        assert plain - storage.workspace_bytes(dtype) == nf4_codes.scratch_bytes(1030 * 520, dtype, "cpu")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_quantizing_holds_little_beside_the_result(kind, device):
    numbers = torch.zeros(2048, 4096, device=device)  # 32 MiB
    storage = quantize(numbers, kind)
    scales = numbers.numel() // 64 * 4 * 4  # fp32, while they are quantized themselves
    assert peak(lambda: quantize(numbers, kind), numbers) <= storage.nbytes + (16 << 20) + scales


def test_the_choice_is_told():
    assert bitsandbytes_kernels.kernel_choice().startswith("NF4 by ")
    assert ("ms against" in bitsandbytes_kernels.kernel_choice()) == bitsandbytes_kernels.AVAILABLE


def test_the_choice_without_bitsandbytes(monkeypatch):
    monkeypatch.setattr(bitsandbytes_kernels, "AVAILABLE", False)
    choice, reason = bitsandbytes_kernels._measured.__wrapped__("cpu")
    assert not choice and "not installed" in reason


def test_none_keeps_the_very_tensor():
    numbers = torch.nn.Parameter(weight((8, 64)))
    storage = quantize(numbers, "none")
    assert isinstance(storage, Dense) and storage.weight is numbers and not numbers.requires_grad
    assert storage.dense(torch.float32).data_ptr() == numbers.data_ptr()
    assert storage.workspace_bytes(torch.float32) == 0 and storage.workspace_bytes(torch.float16) == 1024


def test_a_plain_state_is_dense():
    assert isinstance(storage_from_state({"weight": weight((8, 64))}, "layer"), Dense)


def test_nf4_survives_module_to_and_state_dict():
    storage = quantize(weight((8, 64)), "nf4")
    moved = Nf4.quantize(torch.zeros(8, 64))
    moved.load_state_dict(storage.state_dict())
    assert torch.equal(moved.dense(torch.float32), storage.dense(torch.float32))


def test_measuring_the_choice_is_not_counted():
    assert peak(lambda: bitsandbytes_kernels._measured.__wrapped__("cpu")) == 0


def test_the_nearest_code_at_every_border_and_cell_edge():
    values = torch.tensor(nf4_codes.NF4_VALUES)
    special = torch.cat([(values[:-1] + values[1:]) / 2, values, torch.arange(-32, 33) / 32])
    up, down = (torch.nextafter(special, torch.tensor(end)) for end in (2.0, -2.0))
    numbers = torch.cat([special, up, down, torch.rand(10_000) * 2 - 1]).clamp_(-1, 1)
    wanted = torch.bucketize(numbers, (values[:-1] + values[1:]) / 2).to(torch.uint8)
    assert torch.equal(nf4_codes._nearest_code(numbers), wanted)
