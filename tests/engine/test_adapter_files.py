"""PEFT's adapter format both ways, against stock PEFT; damage and foreign kinds are refused by name."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from architectures import stock_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig
from tuned import ModelSource

from ajusta.base.errors import ModelError
from ajusta.engine.adapter_files import CONFIG_NAME, TENSORS_NAME, load_into, read_adapter, save_adapter, target_names
from ajusta.engine.assemble import AdapterSpec, assemble
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.place import RealPlace

# PEFT 0.21 reads a property that transformers 5.24 has renamed: theirs to settle, not ours.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
peft = pytest.importorskip("peft")

COMMON = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = COMMON | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "qwen3": LLAMA | {"head_dim": 8},
    "gpt2": COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "bloom": COMMON | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}
CPU = RealPlace("cpu")
IDS = torch.arange(1, 13)[None]


def tiny(kind, **changed):
    return stock_model(AutoConfig.for_model(kind, **(MODELS[kind] | changed)))


def ours(kind, *, trained=True, rank=4, alpha=8.0, stabilized=True, targets=None, **changed):
    """Return the tiny model as ajusta assembles it, and its adapters."""
    stock = tiny(kind, **changed)
    assembled = assemble(
        build_skeleton(stock.config, torch.float32), ModelSource(stock), CPU, dtype=torch.float32, bits="none",
        adapter=AdapterSpec(rank=rank, alpha=alpha, rank_stabilized=stabilized, targets=targets, seed=7),
    )  # fmt: skip
    if trained:
        for layer in assembled.adapters.values():
            nn.init.normal_(layer.lora_B, std=0.2)
    return assembled, assembled.adapters


def save(folder, model, layers, stabilized=True, **extra):
    paths = model.module_paths
    save_adapter(
        folder, layers, rank_stabilized=stabilized, module_paths=paths, base_reference="somebody/tiny", **extra
    )


def logits(model):
    """Of a stock model."""
    with torch.no_grad():
        return model(input_ids=IDS).logits


def our_logits(model):
    return logits(model.chain.model)


@pytest.mark.parametrize("stabilized", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_stock_peft_opens_ours(kind, stabilized, tmp_path, caplog, recwarn):
    model, layers = ours(kind, stabilized=stabilized)
    save(tmp_path / "adapter", model, layers, stabilized, base_fingerprint="abc")
    with caplog.at_level(logging.WARNING):
        theirs = peft.PeftModel.from_pretrained(tiny(kind), str(tmp_path / "adapter")).eval()
    ours_to_answer = [w for w in recwarn.list if "is_gradient_checkpointing" not in str(w.message)]
    assert not ours_to_answer and not caplog.records
    difference = (logits(theirs) - our_logits(model)).abs().max()
    assert float(difference) <= 1e-5, float(difference)
    assert (logits(theirs) - logits(tiny(kind))).abs().max() > 1e-3  # the adapter does something


@pytest.mark.parametrize("stabilized", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_we_open_stock_peft(kind, stabilized, tmp_path):
    base = tiny(kind)
    targets = sorted({path.rpartition(".")[2] for path in ours(kind)[1]})
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, use_rslora=stabilized, fan_in_fan_out=kind == "gpt2",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(base, config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path)
    model, layers = ours(kind, trained=False, rank=2, alpha=1)  # another rank and scale: the file's own count
    file = read_adapter(tmp_path)
    assert load_into(layers, file) == len(layers)
    assert file.scales == (6 / math.sqrt(4) if stabilized else 6 / 4,)
    assert float((logits(theirs) - our_logits(model)).abs().max()) <= 1e-5


@pytest.mark.parametrize("stabilized", [True, False])
def test_per_layer_ranks_and_alphas_both_ways(stabilized, tmp_path):
    base = tiny("llama")
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "up_proj"], use_rslora=stabilized,
        rank_pattern={"q_proj": 8, "layers.1.self_attn.v_proj": 2}, alpha_pattern={r".*\.0\.mlp\.up_proj": 24},
    )  # fmt: skip
    theirs = peft.get_peft_model(base, config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    model, layers = ours("llama", trained=False, targets=("q_proj", "v_proj", "up_proj"))
    load_into(layers, read_adapter(tmp_path / "theirs"))
    assert {layer.rank for layer in layers.values()} == {2, 4, 8}
    assert float((logits(theirs) - our_logits(model)).abs().max()) <= 1e-5
    save(tmp_path / "ours", model, layers, stabilized)
    again = peft.PeftModel.from_pretrained(tiny("llama"), str(tmp_path / "ours")).eval()
    assert float((logits(again) - our_logits(model)).abs().max()) <= 1e-5


@pytest.mark.parametrize("rank", [3, 4, 7, 16])
def test_our_own_round_trip_is_bit_equal(rank, tmp_path):
    model, layers = ours("llama", rank=rank, alpha=32)
    save(tmp_path / "adapter", model, layers, base_fingerprint="abc")
    again, filled = ours("llama", trained=False, rank=rank, alpha=1)
    file = read_adapter(tmp_path / "adapter")
    load_into(filled, file)
    assert torch.equal(our_logits(model), our_logits(again))
    assert [layer.scale for layer in layers.values()] == [layer.scale for layer in filled.values()]
    assert (file.base_reference, file.base_fingerprint, file.rank_stabilized) == ("somebody/tiny", "abc", True)


def test_saving_again_replaces_and_leaves_nothing_aside(tmp_path):
    model, layers = ours("llama")
    save(tmp_path / "adapter", model, layers)
    (tmp_path / "adapter" / "notes.txt").write_text("mine")
    for layer in layers.values():
        layer.lora_B.data.mul_(2)
    save(tmp_path / "adapter", model, layers)
    assert [entry.name for entry in tmp_path.iterdir()] == ["adapter"]
    assert (tmp_path / "adapter" / "notes.txt").exists()
    pair = read_adapter(tmp_path / "adapter").layers
    assert all(torch.equal(pair[path].lora_B, layer.lora_B) for path, layer in layers.items())


def test_a_save_that_was_cut_off_leaves_the_old_one(tmp_path, monkeypatch):
    model, layers = ours("llama")
    save(tmp_path / "adapter", model, layers)
    before = (tmp_path / "adapter" / TENSORS_NAME).read_bytes()
    for layer in layers.values():
        layer.lora_B.data.mul_(2)

    def cut(*_, **__):
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr("ajusta.engine.adapter_files.save_file", cut)
        save(tmp_path / "adapter", model, layers)
    assert (tmp_path / "adapter" / TENSORS_NAME).read_bytes() == before
    save(tmp_path / "adapter", model, layers)
    assert [entry.name for entry in tmp_path.iterdir()] == ["adapter"]


def damaged(tmp_path, change=None, **config):
    model, layers = ours("llama")
    folder = tmp_path / "adapter"
    save(folder, model, layers)
    if config:
        written = json.loads((folder / CONFIG_NAME).read_text())
        (folder / CONFIG_NAME).write_text(json.dumps(written | config))
    if change:
        tensors = load_file(folder / TENSORS_NAME)
        change(tensors)
        save_file(tensors, folder / TENSORS_NAME)
    return folder


def test_missing_and_unexpected_layers_are_counted(tmp_path):
    model, layers = ours("llama", targets=("q_proj", "up_proj"))
    save(tmp_path / "adapter", model, layers)
    file = read_adapter(tmp_path / "adapter")
    others = ours("llama", targets=("q_proj", "v_proj"))[1]
    with pytest.raises(ModelError) as error:
        load_into(others, file)
    said = str(error.value)
    assert "2 of 4 adapted layers" in said and "2 are missing and 2 are unexpected" in said
    assert "missing: model.layers.0.self_attn.v_proj" in said and "unexpected: model.layers.0.mlp.up_proj" in said


def test_another_models_shapes_are_refused(tmp_path):
    model, layers = ours("llama", targets=("q_proj",))
    save(tmp_path / "adapter", model, layers)
    file = read_adapter(tmp_path / "adapter")
    wide = ours("llama", targets=("q_proj",), hidden_size=64)[1]
    with pytest.raises(ModelError, match=r"q_proj is made for 32 inputs and 32 outputs.*has 64 and 64"):
        load_into(wide, file)


def test_half_a_layer_is_refused(tmp_path):
    folder = damaged(tmp_path, lambda t: t.pop("base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"))
    with pytest.raises(ModelError, match=r"1 of 14 layers have only one.*layers\.1\.mlp\.up_proj"):
        read_adapter(folder)


def test_a_foreign_tensor_is_refused(tmp_path):
    folder = damaged(tmp_path, lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"lm_head\.weight' is no LoRA matrix"):
        read_adapter(folder)


def test_a_rank_that_is_not_the_tensors_is_refused(tmp_path):
    with pytest.raises(ModelError, match="says rank 8"):
        read_adapter(damaged(tmp_path, r=8))


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"lora_bias": True},
        {"init_lora_weights": "pissa"}, {"peft_type": "IA3"}, {"layer_replication": [[0, 1]]},
    ],
)  # fmt: skip
def test_what_is_more_than_plain_lora_is_refused_by_name(config, tmp_path):
    key, value = next(iter(config.items()))
    with pytest.raises(ModelError, match="IA3" if value == "IA3" else key):
        read_adapter(damaged(tmp_path, **config))


def test_a_pickle_is_never_opened(tmp_path):
    folder = damaged(tmp_path)
    (folder / TENSORS_NAME).rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickle"):
        read_adapter(folder)


def test_a_cut_file_is_refused(tmp_path):
    folder = damaged(tmp_path)
    content = (folder / TENSORS_NAME).read_bytes()
    (folder / TENSORS_NAME).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="cut off or damaged"):
        read_adapter(folder)


def test_no_adapter_here(tmp_path):
    (tmp_path / "readme.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"no adapter_config\.json \(readme\.txt\)"):
        read_adapter(tmp_path)
    (tmp_path / CONFIG_NAME).write_text("{")
    with pytest.raises(ModelError, match="no JSON"):
        read_adapter(tmp_path)


def test_target_names_are_short_where_that_is_exact():
    paths = ["layers.0.q", "layers.1.q", "layers.0.k", "layers.1.k", "head"]
    assert target_names(paths, ["layers.0.q", "layers.1.q"]) == ["q"]
    assert target_names(paths, ["layers.0.q", "layers.1.k"]) == ["layers.0.q", "layers.1.k"]


def test_adapters_for_a_chosen_few_layers_open_in_peft(tmp_path):
    model, layers = ours("llama", targets=("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"))
    save(tmp_path / "adapter", model, layers)
    theirs = peft.PeftModel.from_pretrained(tiny("llama"), str(tmp_path / "adapter")).eval()
    assert float((logits(theirs) - our_logits(model)).abs().max()) <= 1e-5
