"""Finding the linears of any decoder and exchanging them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ajusta.base.errors import UserError
from ajusta.blocks.dropout import DropoutContext, TokenIds
from ajusta.blocks.linear import FrozenLinear
from ajusta.blocks.lora import LoraLinear
from ajusta.blocks.targets import LoraSettings, adapt, find_linears

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 32}
HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
LINES = {"word_embed_proj_dim": 32, "ffn_dim": 48}
MODELS = {
    "llama": (LLAMA | {"num_key_value_heads": 2}, "model.layers", 14),
    "qwen2": (LLAMA | {"num_key_value_heads": 2}, "model.layers", 14),
    "qwen3": (LLAMA | {"num_key_value_heads": 2, "head_dim": 8}, "model.layers", 14),
    "gemma": (LLAMA | {"num_key_value_heads": 2, "head_dim": 8}, "model.layers", 14),
    "phi3": (LLAMA | {"pad_token_id": 0}, "model.layers", 8),
    "phi": (LLAMA, "model.layers", 12),
    "gpt2": (GPT, "transformer.h", 8),
    "gpt_neo": (
        HIDDEN | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "transformer.h",
        12,
    ),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40}, "transformer.h", 8),
    "falcon": (HIDDEN, "transformer.h", 8),
    "opt": (HIDDEN | LINES, "model.decoder.layers", 12),
    "mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 40}, "transformer.blocks", 8),
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}


def tiny(kind):
    torch.manual_seed(0)
    settings, prefix, count = MODELS[kind]
    config = AutoConfig.for_model(kind, **(settings | SPECIAL))
    return AutoModelForCausalLM.from_config(config).eval(), prefix, count


def put_on(model, prefix, bits="none", **settings):
    return adapt(
        model,
        prefix,
        LoraSettings(rank=2, alpha=4, **{key: value for key, value in settings.items() if key != "keep_full"}),
        bits=bits,
        generator=torch.Generator().manual_seed(0),
        keep_full=settings.get("keep_full", ()),
    )


@pytest.mark.parametrize("kind", MODELS)
def test_every_linear_of_every_block_and_the_logits_do_not_change(kind):
    model, prefix, count = tiny(kind)
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        adapted = put_on(model, prefix)
        came = model(input_ids=ids).logits
    assert len(adapted.lora) == count and not adapted.frozen and not adapted.targets.routers
    assert torch.allclose(came, wanted, atol=1e-5)
    assert all(isinstance(model.get_submodule(path), LoraLinear) for path in adapted.lora)
    assert not any("lm_head" in path or "embed" in path for path in adapted.lora)


@pytest.mark.parametrize("kind", MODELS)
def test_training_moves_every_adapter(kind):
    model, prefix, _ = tiny(kind)
    adapted = put_on(model, prefix)
    model(input_ids=torch.arange(1, 13)[None]).logits.square().mean().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{path}.lora_{side}" for path in adapted.lora for side in "AB"}
    assert all(layer.lora_B.grad.abs().max() > 0 for layer in adapted.lora.values())


def test_the_others_are_frozen_and_quantized_too():
    model, prefix, _ = tiny("llama")
    adapted = put_on(model, prefix, "nf4", targets=("q_proj", "mlp.down_proj"))
    assert [path.rpartition(".")[2] for path in adapted.lora] == ["q_proj", "down_proj"] * 2
    assert len(adapted.frozen) == 10 and all(layer.storage.kind == "nf4" for layer in adapted.frozen.values())
    assert all(layer.base.storage.kind == "nf4" for layer in adapted.lora.values())
    assert type(model.lm_head) is nn.Linear and not model.lm_head.weight.requires_grad


def test_a_wrong_name_lists_those_that_exist():
    model, prefix, _ = tiny("llama")
    with pytest.raises(UserError) as error:
        find_linears(model, prefix, ["q_prj", "up_proj", "wat"])
    said = str(error.value)
    assert "'q_prj'" in said and "did you mean 'q_proj'?" in said and "'wat'" in said and "'up_proj' is" not in said
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in said


@pytest.mark.parametrize("name", ["lm_head", "norm", "proj", "embed_tokens"])
def test_what_is_no_linear_of_a_block_is_no_target(name):
    model, prefix, _ = tiny("llama")
    with pytest.raises(UserError, match=name):
        find_linears(model, prefix, [name])


def test_partial_matches_are_told():
    model, prefix, _ = tiny("llama")
    targets = find_linears(model, prefix, ["layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj", "k_proj"])
    assert list(targets.adapted) == [
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
    ]
    assert targets.notes == (
        "target 'layers.0.mlp.up_proj' is in 1 of 2 blocks",
        "target 'model.layers.1.self_attn.q_proj' is in 1 of 2 blocks",
    )


def test_routers_stay_and_stacked_experts_are_told():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2_moe", **LLAMA, **SPECIAL, num_key_value_heads=2, num_experts=4, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    adapted = put_on(model, "model.layers", "nf4")
    assert adapted.targets.routers == tuple(f"model.layers.{i}.mlp.shared_expert_gate" for i in range(2))
    assert adapted.targets.not_adapted == tuple(f"model.layers.{i}.mlp.experts" for i in range(2))
    assert type(model.get_submodule(adapted.targets.routers[0])) is nn.Linear


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])


def test_a_linear_gate_beside_experts_is_a_router_unless_named():
    targets = find_linears(Mixture(), "layers")
    assert targets.routers == ("layers.0.gate", "layers.1.gate") and len(targets.adapted) == 8
    named = find_linears(Mixture(), "layers", ["gate"])
    assert list(named.adapted) == ["layers.0.gate", "layers.1.gate"] and not named.routers


def test_the_skip_list_takes_any_module_and_refuses_unknown_ones():
    model, prefix, _ = tiny("llama")
    adapted = put_on(model, prefix, "int8", keep_full=("layers.0", "layers.1.mlp.up_proj"))
    full = {path for path, layer in adapted.lora.items() if layer.base.storage.kind == "none"}
    assert full == set(adapted.kept_full) and len(full) == 8 and "model.layers.1.mlp.up_proj" in full
    model, prefix, _ = tiny("llama")
    with pytest.raises(UserError, match=r"'layrs\.0' is no module.*did you mean"):
        put_on(model, prefix, "int8", keep_full=("layrs.0",))


def test_a_wrong_prefix_is_told():
    model, _, _ = tiny("llama")
    with pytest.raises(UserError, match=r"no linear layer under 'transformer\.h'"):
        find_linears(model, "transformer.h")


@pytest.mark.parametrize("bits", ["none", "int8", "nf4"])
def test_works_on_meta(bits):
    settings, prefix, count = MODELS["gpt2"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **(settings | SPECIAL)))
    adapted = put_on(model, prefix, bits)
    assert len(adapted.lora) == count and all(parameter.is_meta for parameter in model.parameters())
    layer = next(iter(adapted.lora.values()))
    assert layer(torch.empty(3, layer.in_features, device="meta")).shape == (3, layer.out_features)


def test_layers_have_their_own_dropout():
    model, prefix, _ = tiny("llama")
    context = DropoutContext(seed=1, tokens=TokenIds(
        step=0, example_ids_T=torch.zeros(5, dtype=torch.int64), position_ids_T=torch.arange(5)
    ))  # fmt: skip
    adapted = adapt(
        model, prefix, LoraSettings(rank=2, alpha=4, dropout=0.1), bits="none",
        generator=torch.Generator().manual_seed(0), dropout_context=context,
    )  # fmt: skip
    keys = {tuple(layer.dropout.row_keys().tolist()) for layer in adapted.lora.values()}
    assert len(keys) == 14
    assert isinstance(next(iter(adapted.lora.values())).base, FrozenLinear)
    assert not next(iter(adapted.lora.values())).training  # the mode of the module that was replaced
