"""Buffers that are saved with a model (DeepSeek's bias of the choice of experts) are loaded, weighed and told apart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from architectures import stock_model
from planned import Real, ShapedModel, subject
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from ajusta.base.errors import ModelError
from ajusta.engine.assemble import Assembled, assemble
from ajusta.engine.skeleton import build_skeleton
from ajusta.engine.weights import open_weights
from ajusta.memory.ledger import Ledger
from ajusta.memory.place import Category, CountingPlace, RealPlace
from ajusta.planning.trace import Traced

# A bias of the choice of experts, decays of linear attention, a scale of each layer, constants of an activation.
KINDS = {
    "deepseek_v3": "model.layers.3.mlp.gate.e_score_correction_bias",
    "minimax": "model.layers.1.self_attn.diagonal_decay",
    "gemma4_text": "model.layers.2.layer_scalar",
    "apertus": "model.layers.0.mlp.act_fn.beta",
    "lfm2_moe": "model.layers.3.feed_forward.expert_bias",
}
FLOATS = [torch.float32, torch.bfloat16]


def write(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **over: object) -> Path:
    """Save a tiny model whose buffers are none that its class would compute."""
    stock = stock_model(tiny_config(kind, **over), dtype)
    generator = torch.Generator().manual_seed(3)
    saved = stock.state_dict()
    for name, buffer in stock.named_buffers():
        if name in saved:
            buffer.add_(0.1 * torch.rand(buffer.shape, generator=generator).to(buffer.dtype))
    stock.save_pretrained(folder)
    return folder


def stock_of(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    vars(model.config)["pad_token_id"] = None
    return model


def loaded(folder: Path, dtype: torch.dtype, bits: str = "none") -> Assembled:
    source = open_weights(folder)
    skeleton = build_skeleton(source.config, dtype)
    return assemble(skeleton, source, RealPlace("cpu"), dtype=dtype, bits=bits, adapter=None)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_the_file_in_the_dtype_that_transformers_gives_them(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    stock = stock_of(write(tmp_path, kind), dtype)
    stored = load_file(tmp_path / "model.safetensors")
    skeleton = build_skeleton(stock.config, dtype)
    assert KINDS[kind] in skeleton.buffers and skeleton.buffers.keys() <= stored.keys()
    assemble(skeleton, open_weights(tmp_path), RealPlace("cpu"), dtype=dtype, bits="nf4", adapter=None)
    for name, slot in skeleton.buffers.items():
        own = stock.get_buffer(name)
        assert slot.tensor.dtype == own.dtype and torch.equal(slot.tensor, own), name
        assert torch.equal(slot.tensor, stored[name].to(own.dtype)), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_loaded_model_has_the_logits_of_transformers_own(kind: str, tmp_path: Path) -> None:
    stock, ours = stock_of(write(tmp_path, kind), torch.float32), loaded(tmp_path, torch.float32)
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        expected = stock(input_ids=ids, use_cache=False).logits
        found = ours.chain.model(input_ids=ids, use_cache=False).logits
        for name in KINDS.values():
            if name in dict(stock.named_buffers()):
                stock.get_buffer(name).mul_(3)
        other = stock(input_ids=ids, use_cache=False).logits
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5  # fp32, other kernels
    assert float((other - expected).abs().max() / expected.abs().max()) > 1e-4, "the buffer must count"


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_weighs_them_as_they_are(kind: str, tmp_path: Path) -> None:
    what = subject(open_weights(write(tmp_path, kind)), dtype=torch.bfloat16)
    traced, real = Traced(what), Real(what)
    assert traced.load.peak_bytes == real.load.live_bytes
    place = CountingPlace()
    with place.counting() as counted:
        skeleton = build_skeleton(what.config, what.dtype)
        kept = sum(slot.dtype.itemsize * slot.tensor.numel() for slot in skeleton.buffers.values())
        loose = sum(b.nbytes for module, name in skeleton.loose_buffers if (b := module._buffers[name]) is not None)
        tied = {name for name, _ in skeleton.tied}
        weights = sum(2 * slot.tensor.numel() for name, slot in skeleton.slots.items() if name not in tied)
        counted.start_over()
        assemble(skeleton, None, place, dtype=what.dtype, bits="none", adapter=None)
        assert kept > 0 and counted.cut()[-1].end[Category.BASE] == weights + kept + loose


def test_a_few_blocks_stand_for_a_deep_model_with_them() -> None:
    config = tiny_config("deepseek_v3", num_hidden_layers=24)
    what = dataclasses.replace(subject(ShapedModel(config, torch.bfloat16)), dtype=torch.bfloat16)
    short, whole = Traced(what), Traced(what, shortened=False)
    assert short.shortened and len(short.model.chain.blocks) < 24
    assert short.load == whole.load


def test_reading_one_holds_nothing_beside_it(tmp_path: Path) -> None:
    source = open_weights(write(tmp_path, "deepseek_v3"))
    with Ledger() as ledger:
        bias = source.read(KINDS["deepseek_v3"])
    assert ledger.peak.live_bytes == bias.nbytes


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["deepseek_v3", "minimax"])
def test_a_missing_one_is_named(kind: str, tmp_path: Path) -> None:
    rewrite(write(tmp_path, kind), {KINDS[kind]: None})
    with pytest.raises(ModelError, match=rf"lacks {KINDS[kind]}; expected".replace(".", r"\.")):
        loaded(tmp_path, torch.float32)


def test_one_that_its_class_lets_be_missing_is_computed_by_the_class(tmp_path: Path) -> None:
    names = [name for name in build_skeleton(tiny_config("axk1"), torch.float32).buffers if name.endswith("_bias")]
    assert names
    rewrite(write(tmp_path, "axk1"), dict.fromkeys(names))
    ours, stock = loaded(tmp_path, torch.float32), stock_of(tmp_path, torch.float32)
    for name in names:
        path, _, leaf = name.rpartition(".")
        assert torch.equal(ours.chain.submodule(path).get_buffer(leaf), stock.get_buffer(name))
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        expected = stock(input_ids=ids, use_cache=False).logits
        found = ours.chain.model(input_ids=ids, use_cache=False).logits
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def test_the_fingerprint_covers_them(tmp_path: Path) -> None:
    name = KINDS["deepseek_v3"]
    before = open_weights(write(tmp_path, "deepseek_v3")).fingerprint
    bias = load_file(tmp_path / "model.safetensors")[name]
    rewrite(tmp_path, {name: bias.double()})
    assert open_weights(tmp_path).fingerprint != before
    rewrite(tmp_path, {name: bias})
    assert open_weights(tmp_path).fingerprint == before


def test_code_that_reads_the_weight_of_a_linear_by_itself_is_refused_in_one_line(tmp_path: Path) -> None:
    ours = loaded(write(tmp_path, "deepseek_v32"), torch.float32)
    with pytest.raises(ModelError, match="reads the weight of a linear layer by itself"):
        ours.chain.model(input_ids=torch.arange(5, 12)[None], use_cache=False)
