"""Choosing linears by name, and what the models of many families become by it."""

from __future__ import annotations

import pytest
import torch
from architectures import inputs, stock_model
from layers import frozen_of
from torch import nn
from transformers import AutoConfig
from tuned import ModelSource

from ajusta.base.errors import UserError
from ajusta.blocks.dropout import TokenIds
from ajusta.blocks.lora import LoraLinear
from ajusta.blocks.targets import choose_targets, find_routers, has_stacked_weights
from ajusta.engine.assemble import AdapterSpec, assemble
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.place import CountingPlace, RealPlace

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 32}
HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
LINES = {"word_embed_proj_dim": 32, "ffn_dim": 48}
MODELS = {
    "llama": (LLAMA | {"num_key_value_heads": 2}, 14),
    "qwen2": (LLAMA | {"num_key_value_heads": 2}, 14),
    "qwen3": (LLAMA | {"num_key_value_heads": 2, "head_dim": 8}, 14),
    "gemma": (LLAMA | {"num_key_value_heads": 2, "head_dim": 8}, 14),
    "phi3": (LLAMA | {"pad_token_id": 0}, 8),
    "phi": (LLAMA, 12),
    "gpt2": (GPT, 8),
    "gpt_neo": (HIDDEN | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, 12),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40}, 8),
    "falcon": (HIDDEN, 8),
    "opt": (HIDDEN | LINES, 12),
    "mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 40}, 8),
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
MIXTURE = LLAMA | SPECIAL | {
    "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 2,
}  # fmt: skip
CPU = RealPlace("cpu")


def tiny(kind):
    return stock_model(AutoConfig.for_model(kind, **(MODELS[kind][0] | SPECIAL)))


def mixture():
    """A tiny mixture of experts; in bf16, the only dtype in which torch runs experts on `meta`."""
    return stock_model(AutoConfig.for_model("qwen2_moe", **MIXTURE), torch.bfloat16)


def put_on(stock, bits="none", **settings):
    return assembled_of(stock, bits, AdapterSpec(rank=2, alpha=4, **settings))


def assembled_of(stock, bits, adapter):
    skeleton = build_skeleton(stock.config, stock.dtype)
    return assemble(skeleton, ModelSource(stock), CPU, dtype=stock.dtype, bits=bits, adapter=adapter)


def logits(assembled):
    ids, positions, mask = inputs(assembled.chain, CPU)
    return assembled.chain.model(**assembled.chain.inputs(ids % 40, positions, mask)).logits


def stock_logits(stock, assembled):
    return stock(input_ids=inputs(assembled.chain, CPU)[0][None] % 40).logits


@pytest.mark.parametrize("kind", MODELS)
def test_every_linear_of_every_block_and_the_logits_do_not_change(kind):
    stock = tiny(kind)
    assembled = put_on(stock)
    assert len(assembled.adapters) == MODELS[kind][1]
    assert not assembled.targets.frozen and not assembled.targets.routers
    with torch.no_grad():
        assert torch.allclose(logits(assembled), stock_logits(stock, assembled), atol=1e-5)
    assert all(isinstance(assembled.chain.submodule(path), LoraLinear) for path in assembled.adapters)
    assert not any("lm_head" in path or "embed" in path for path in assembled.adapters)


@pytest.mark.parametrize("kind", MODELS)
def test_training_moves_every_adapter(kind):
    assembled = put_on(tiny(kind))
    logits(assembled).square().mean().backward()
    trained = {id(parameter) for parameter in assembled.chain.model.parameters() if parameter.requires_grad}
    assert trained == {id(parameter) for parameter in assembled.parameters()}
    assert all(layer.lora_B.grad.abs().max() > 0 for layer in assembled.adapters.values())


def test_the_others_are_frozen_and_quantized_too():
    assembled = put_on(tiny("llama"), "nf4", targets=("q_proj", "mlp.down_proj"))
    assert [path.rpartition(".")[2] for path in assembled.adapters] == ["q_proj", "down_proj"] * 2
    assert len(assembled.targets.frozen) == 10 and len(assembled.linears) == 14
    assert all(layer.storage.kind == "nf4" for layer in assembled.linears.values())
    assert all(layer.base is assembled.linears[path] for path, layer in assembled.adapters.items())
    assert all(assembled.chain.submodule(path) is assembled.linears[path] for path in assembled.targets.frozen)
    head = assembled.chain.head
    assert type(head) is nn.Linear and not head.weight.requires_grad and "lm_head.weight" in assembled.loose


def test_excluded_ones_are_frozen_and_quantized_too():
    assembled = put_on(tiny("llama"), "int8", exclude=("o_proj", "layers.1.mlp.up_proj"))
    excluded = ("model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.up_proj")
    assert assembled.targets.frozen == excluded and len(assembled.adapters) == 11
    assert all(assembled.linears[path].storage.kind == "int8" for path in excluded)
    assert assembled.targets.notes == ("excluded 'layers.1.mlp.up_proj' is in 1 of 2 blocks",)


def test_a_model_without_adapters_is_stored_in_bits_all_the_same():
    plain = assembled_of(mixture(), "nf4", None)
    assert not plain.adapters and not plain.targets.adapted and len(plain.targets.routers) == 2
    assert all(layer.storage.kind == "nf4" for layer in plain.linears.values())


def linears_of(kind):
    return build_skeleton(AutoConfig.for_model(kind, **(MODELS[kind][0] | SPECIAL)), torch.float32).linears


@pytest.mark.parametrize("role", ["names", "exclude"])
def test_a_wrong_name_lists_those_that_exist(role):
    with pytest.raises(UserError) as error:
        choose_targets(linears_of("llama"), **{role: ["q_prj", "up_proj", "wat"]})
    said = str(error.value)
    assert "'q_prj'" in said and "did you mean 'q_proj'?" in said and "'wat'" in said and "'up_proj' is" not in said
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in said


def test_wrong_names_of_both_lists_are_told_at_once():
    with pytest.raises(UserError, match=r"target 'wat' is no linear.*excluded 'layrs' is no linear"):
        choose_targets(linears_of("llama"), names=["wat"], exclude=["layrs"])


@pytest.mark.parametrize("name", ["lm_head", "norm", "proj", "embed_tokens"])
def test_what_is_no_linear_of_a_block_is_no_target(name):
    with pytest.raises(UserError, match=name):
        choose_targets(linears_of("llama"), names=[name])


@pytest.mark.parametrize(("names", "exclude"), [(["q_proj"], ["q_proj"]), ([], [])])
def test_nothing_left_to_adapt_is_refused(names, exclude):
    with pytest.raises(UserError, match=r"no layer of 14 linear ones gets an adapter.*lora\.exclude"):
        choose_targets(linears_of("llama"), names=names, exclude=exclude)


def test_partial_matches_are_told():
    names = ["layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj", "k_proj"]
    targets = choose_targets(linears_of("llama"), names=names)
    assert targets.adapted == (
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
    )
    assert targets.notes == (
        "target 'layers.0.mlp.up_proj' is in 1 of 2 blocks",
        "target 'model.layers.1.self_attn.q_proj' is in 1 of 2 blocks",
    )


def test_routers_stay_and_stacked_experts_are_told():
    stock = mixture()
    assembled = put_on(stock, "nf4")
    targets = assembled.targets
    assert targets.routers == tuple(f"model.layers.{i}.mlp.shared_expert_gate" for i in range(2))
    assert targets.stacked == tuple(f"model.layers.{i}.mlp.experts" for i in range(2))
    assert len(targets.notes) == 1 and "model.layers.0.mlp.experts, model.layers.1.mlp.experts" in targets.notes[0]
    for path in targets.routers:
        router = assembled.chain.submodule(path)
        assert type(router) is nn.Linear and torch.equal(router.weight, stock.get_submodule(path).weight)
        assert path not in assembled.linears and f"{path}.weight" in assembled.loose


def test_a_router_that_is_named_is_adapted_but_never_quantized():
    assembled = put_on(mixture(), "nf4", targets=("shared_expert_gate", "q_proj"))
    kinds = {path.rpartition(".")[2]: assembled.linears[path].storage.kind for path in assembled.adapters}
    assert kinds == {"shared_expert_gate": "none", "q_proj": "nf4"}
    with torch.no_grad():  # B is 0, and the router's weight as it was
        plain = logits(assembled_of(mixture(), "none", None))
        adapted = logits(put_on(mixture(), targets=("shared_expert_gate",)))
    assert torch.allclose(adapted, plain, atol=2e-2)  # bf16 rounds at 2^-8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class DeepRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        self.experts = nn.Linear(8, 8)


class GatedUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16), nn.Linear(8, 16)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([kind(), kind()])


def chosen(kind, experts=None, **which):
    model = Model(kind)
    linears = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    routers = find_routers(linears, model.get_submodule, experts)
    return choose_targets(linears, routers=routers, **which)


def test_a_linear_gate_beside_experts_is_a_router_unless_named():
    targets = chosen(Block)
    assert targets.routers == ("layers.0.gate", "layers.1.gate") and len(targets.adapted) == 8
    assert chosen(Block, names=["gate"]).adapted == ("layers.0.gate", "layers.1.gate")
    assert chosen(Block, exclude=["gate"]) == targets


def test_all_of_a_router_of_several_layers_stays():
    targets = chosen(DeepRouter)
    assert targets.routers == tuple(f"layers.{block}.router.{part}" for block in range(2) for part in range(2))
    assert targets.adapted == ("layers.0.experts", "layers.1.experts")


def test_a_gate_that_is_no_router_is_adapted():
    assert len(chosen(GatedUnit).adapted) == 4
    assert chosen(GatedUnit, experts=16).routers == ("layers.0.gate", "layers.1.gate")  # as wide as there are experts


def test_a_convolution_holds_no_stacked_experts():
    assert not has_stacked_weights(nn.Conv1d(2, 2, 3)) and not has_stacked_weights(nn.Linear(2, 2))


@pytest.mark.parametrize("bits", ["none", "int8", "nf4"])
def test_works_on_meta(bits):
    config = AutoConfig.for_model("gpt2", **(GPT | SPECIAL))
    assembled = assemble(
        build_skeleton(config, torch.float32), None, CountingPlace(), dtype=torch.float32, bits=bits,
        adapter=AdapterSpec(rank=2, alpha=4),
    )  # fmt: skip
    assert len(assembled.adapters) == 8
    assert all(parameter.is_meta for parameter in (*assembled.chain.model.parameters(), *assembled.parameters()))
    layer = next(iter(assembled.adapters.values()))
    assert layer(torch.empty(3, layer.in_features, device="meta")).shape == (3, layer.out_features)


def test_layers_have_their_own_dropout_that_other_targets_do_not_change():
    def keys(**which):
        assembled = put_on(tiny("llama"), dropout=0.1, **which)
        assert assembled.chain.dropping == list(assembled.adapters.values())
        assembled.chain.dropout.tokens = TokenIds(
            step=0, example_ids_T=torch.zeros(5, dtype=torch.int64), position_ids_T=torch.arange(5)
        )
        return {path: tuple(layer.dropout.row_keys().tolist()) for path, layer in assembled.adapters.items()}

    every = keys()
    assert len(set(every.values())) == 14
    assert keys(targets=("up_proj",)).items() <= every.items()


def test_a_conv1d_is_known_by_the_shape_of_its_files():
    assembled = put_on(tiny("gpt2"), "nf4")
    stock = tiny("gpt2").get_submodule("transformer.h.0.mlp.c_fc")
    ours = assembled.linears["transformer.h.0.mlp.c_fc"]
    assert ours.transposed and (ours.in_features, ours.out_features) == (32, 128)
    wanted = frozen_of(stock, "nf4").storage.dense(torch.float32)
    assert torch.equal(ours.storage.dense(torch.float32), wanted)
