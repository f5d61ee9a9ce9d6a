"""A folder that transformers and bitsandbytes saved quantized is taken as it is: the same codes, the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import stock_model
from planned import Real, adapter, subject
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from ajusta.base.errors import ModelError, UserError
from ajusta.engine.assemble import Assembled, assemble
from ajusta.engine.skeleton import build_skeleton
from ajusta.engine.weights import QuantizedSource, open_weights
from ajusta.memory.place import RealPlace
from ajusta.planning.trace import Traced
from ajusta.spec.config import load_config
from ajusta.stages.base import as_stored

pytest.importorskip("bitsandbytes")

FORMS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
Q_PROJ = "model.layers.2.self_attn.q_proj"


def quantized(folder: Path, form: str, kind: str = "llama", **over: Any) -> PreTrainedModel:
    """Save a tiny model as transformers does after bitsandbytes quantized it; return that very model."""
    stock_model(tiny_config(kind)).save_pretrained(folder / "plain")
    settings = FORMS.get(form, {}) | over
    how = BitsAndBytesConfig(**settings, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=how, dtype=torch.float32)
    model.save_pretrained(folder / form)
    return model.eval()


def opened(folder: Path) -> QuantizedSource:
    source = open_weights(folder)
    assert isinstance(source, QuantizedSource)
    return source


def loaded(source: QuantizedSource, bits: str) -> Assembled:
    skeleton = build_skeleton(source.config, torch.float32)
    return assemble(skeleton, source, RealPlace("cpu"), dtype=torch.float32, bits=bits, adapter=None)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(5, 16)[None], use_cache=False).logits
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_codes_are_those_of_the_file(form: str, tmp_path: Path) -> None:
    quantized(tmp_path, form)
    stored = load_file(tmp_path / form / "model.safetensors")
    kind = form.partition(" ")[0]
    ours = loaded(opened(tmp_path / form), kind)
    assert {layer.storage.kind for layer in ours.linears.values()} == {kind} and len(ours.linears) == 28
    for path, layer in ours.linears.items():
        state = layer.storage.state()
        assert torch.equal(state["weight"], stored[f"{path}.weight"]), path
        for key in ("weight.absmax", "weight.nested_absmax", "SCB"):
            assert (key in state) == (f"{path}.{key}" in stored)
            assert key not in state or torch.equal(state[key], stored[f"{path}.{key}"]), key


@pytest.mark.parametrize("form", FORMS)
def test_the_logits_are_those_of_transformers(form: str, tmp_path: Path) -> None:
    expected = logits(quantized(tmp_path, form))
    found = logits(loaded(opened(tmp_path / form), form.partition(" ")[0]).chain.model)
    # bitsandbytes' own 8-bit product rounds its input as well, to 1/127 of each row's largest.
    tolerance = 0.03 if form == "int8" else 1e-5
    assert float((found - expected).abs().max() / expected.abs().max()) < tolerance
    plain = logits(loaded(opened(tmp_path / form), "none").chain.model)
    assert float((plain - found).abs().max() / found.abs().max()) < 1e-5, "read as floats it is the same model"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plan_weighs_it_as_it_is(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    quantized(tmp_path, form)
    what = subject(opened(tmp_path / form), bits=form.partition(" ")[0], dtype=dtype)
    traced, real = Traced(what), Real(what)
    assert 0 <= real.load.live_bytes - traced.load.peak_bytes <= 4096  # tables as they were read, looked at, dropped
    held = sum(layer.storage.nbytes for layer in real.model.linears.values())
    assert held == sum(layer.storage.nbytes for layer in traced.model.linears.values()) > 0
    whole = Traced(what, shortened=False)
    assert whole.load == traced.load


def test_what_was_left_in_float_stays_so(tmp_path: Path) -> None:
    quantized(tmp_path, "nf4", llm_int8_skip_modules=["lm_head", Q_PROJ])
    source = opened(tmp_path / "nf4")
    ours = loaded(source, "nf4")
    kinds = {path: layer.storage.kind for path, layer in ours.linears.items()}
    assert kinds.pop(Q_PROJ) == "none" and set(kinds.values()) == {"nf4"}
    traced = Traced(subject(source, bits="nf4"))
    assert len(set(traced._kinds)) == 2, "a block that is stored in another way is of another kind"


def test_a_quantized_head_becomes_float(tmp_path: Path) -> None:
    model = quantized(tmp_path, "nf4", llm_int8_skip_modules=[])
    source = opened(tmp_path / "nf4")
    assert source.kinds["lm_head.weight"] == "nf4"
    found = logits(loaded(source, "nf4").chain.model)
    expected = logits(model)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def test_a_stored_weight_has_its_own_shape_and_the_float_that_it_was(tmp_path: Path) -> None:
    quantized(tmp_path, "nf4 nested")
    source = opened(tmp_path / "nf4 nested")
    info = source.infos[f"{Q_PROJ}.weight"]
    assert (info.shape, info.dtype) == ((64, 64), torch.float32)
    assert info.stored_bytes > 64 * 64 // 2 and not any("absmax" in name for name in source.infos)
    whole = source.read(f"{Q_PROJ}.weight")
    assert whole.shape == (64, 64) and torch.equal(source.read_rows(f"{Q_PROJ}.weight", 3, 9), whole[3:9])


def test_bits_are_those_of_the_checkpoint_and_others_are_refused(tmp_path: Path) -> None:
    quantized(tmp_path, "nf4")
    source = opened(tmp_path / "nf4")
    for bits in ("none", "nf4"):
        assert as_stored(load_config(overrides={"bits": bits}, required=()), "m", source).bits == "nf4"
    with pytest.raises(UserError, match="is already quantized to nf4, and bits is int8; expected its own bits"):
        as_stored(load_config(overrides={"bits": "int8"}, required=()), "m", source)
    plain = load_config(overrides={"bits": "int8"}, required=())
    assert as_stored(plain, "m", open_weights(tmp_path / "plain")) is plain


def test_what_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    quantized(tmp_path, "fp4", **{"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"})
    with pytest.raises(ModelError, match=r"weights in fp4 \(model\.layers.*plain version"):
        open_weights(tmp_path / "fp4")
    quantized(tmp_path / "gpt2", "nf4", "gpt2")
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel holds its weights as \[in, out\]"):
        loaded(opened(tmp_path / "gpt2" / "nf4"), "nf4")
    quantized(tmp_path, "nf4")
    file = tmp_path / "nf4" / "model.safetensors"
    stored = load_file(file)
    broken = {name: tensor for name, tensor in stored.items() if name != f"{Q_PROJ}.weight.absmax"}
    save_file(broken, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\.q_proj"):
        loaded(opened(tmp_path / "nf4"), "nf4")
    broken = stored | {f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}
    save_file(broken, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"is no JSON"):
        opened(tmp_path / "nf4")


def test_its_own_name_for_the_form_is_not_carried_on(tmp_path: Path) -> None:
    quantized(tmp_path, "nf4")
    assert "quantization_config" in json.loads((tmp_path / "nf4" / "config.json").read_text(encoding="utf-8"))
    assert not hasattr(opened(tmp_path / "nf4").config, "quantization_config")


def test_adapters_are_put_beside_it(tmp_path: Path) -> None:
    quantized(tmp_path, "nf4")
    source = opened(tmp_path / "nf4")
    skeleton = build_skeleton(source.config, torch.float32)
    ours = assemble(skeleton, source, RealPlace("cpu"), dtype=torch.float32, bits="nf4", adapter=adapter())
    assert len(ours.adapters) == 28 and torch.equal(logits(ours.chain.model), logits(loaded(source, "nf4").chain.model))
