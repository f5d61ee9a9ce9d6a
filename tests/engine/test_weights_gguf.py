"""Each architecture: a random tiny model, written as llama.cpp's converter writes it, must come back bit for bit.

The inverse transformations here follow llama.cpp's conversion/*.py; while this was built, files written by that very
converter were read back with equal tensors and equal logits for every entry of MODELS (see LAB.md).
"""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType, Keys
from transformers import AutoConfig, AutoModelForCausalLM

from ajusta.base.errors import ModelError
from ajusta.engine.gguf_header import read_header
from ajusta.engine.weights import GgufSource, open_weights

NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "vocab_size": 48}
DECODER = NO_IDS | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SMALL = NO_IDS | {"n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama": ("llama", DECODER),
    "llama tied, with biases": (
        "llama",
        DECODER | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama with wide heads": ("llama", DECODER | {"head_dim": 16}),
    "llama 3": ("llama", DECODER | {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "llama linear": ("llama", DECODER | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2": ("qwen2", DECODER | {"tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", DECODER | {"rope_parameters": YARN}),
    "qwen3": ("qwen3", DECODER | {"head_dim": 16}),
    "gemma2": ("gemma2", DECODER | {"query_pre_attn_scalar": 8, "sliding_window": 16}),
    "phi3": ("phi3", {k: v for k, v in DECODER.items() if k != "head_dim"} | {"original_max_position_embeddings": 64}),
    "gpt2": ("gpt2", SMALL | {"n_embd": 32, "n_positions": 64, "n_inner": 128}),
    "bloom": ("bloom", SMALL | {"hidden_size": 32, "seq_length": 64}),
}


def make_model(model_type: str, settings: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Multiples of 1/256 below 1: adding and taking away 1, as for Gemma's norms, then loses no bit.
            parameter.copy_(torch.randint(-128, 128, parameter.shape) / 256)
    return model


def stored_form(name: str, weight: torch.Tensor, config) -> torch.Tensor:
    """What llama.cpp's converter does to a tensor."""
    heads = getattr(config, "num_attention_heads", None)
    if config.model_type == "llama" and (".q_proj" in name or ".k_proj" in name):
        heads = heads if ".q_proj" in name else config.num_key_value_heads
        return weight.view(heads, 2, config.head_dim // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    if config.model_type == "bloom" and "query_key_value" in name:
        parts = weight.view(config.n_head, 3, -1, *weight.shape[1:])
        return torch.cat([parts[:, part].reshape(-1, *weight.shape[1:]) for part in range(3)])
    if config.model_type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return weight.T
    if config.model_type == "gemma2" and name.endswith("norm.weight"):
        return weight + 1
    return weight


def write_metadata(writer: gguf.GGUFWriter, config) -> None:
    arch = config.model_type
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_context_length(getattr(config, "max_position_embeddings", None) or config.seq_length)
    if arch in ("gpt2", "bloom"):
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch == "phi3":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        writer.add_sliding_window(0)
        return
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def llama3_divisors(rope: dict, head_dim: int) -> np.ndarray:
    """The divisors of the frequencies, written out one by one from the definition."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        context = rope["original_max_position_embeddings"]
        if wavelength < context / rope["high_freq_factor"]:
            divisors.append(1.0)
        elif wavelength > context / rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            share = (context / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            divisors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(divisors, dtype=np.float32)


def write_gguf(path: Path, model, kind: GGMLQuantizationType | None = None, skip: str = "", **metadata) -> Path:
    """Write the model; matrices are quantized to `kind` where it is given."""
    config = model.config
    arch = {name: key for key, name in MODEL_ARCH_NAMES.items()}[config.model_type]
    writer = gguf.GGUFWriter(path, config.model_type)
    write_metadata(writer, config)
    for key, value in metadata.items():
        writer.add_uint32(key.replace("__", "."), value)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        short = name.removeprefix("transformer.")
        stored = table.get_name(name, (".weight", ".bias")) or table.get_name(short, (".weight", ".bias"))
        data = np.ascontiguousarray(stored_form(name, parameter.detach(), config).numpy())
        if stored == skip:
            continue
        if kind is not None and data.ndim == 2:
            writer.add_tensor(stored, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, data)
    if getattr(config, "rope_parameters", None) and config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config.rope_parameters, config.head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", MODELS)
def test_every_tensor_and_the_config_come_back(tmp_path, case):
    model = make_model(*MODELS[case])
    source = open_weights(write_gguf(tmp_path / "m.gguf", model))
    assert isinstance(source, GgufSource)
    parameters = dict(model.named_parameters())
    assert set(source.infos) == set(parameters)
    for name, parameter in parameters.items():
        read = source.read(name)
        assert torch.equal(read, parameter), name
        assert read.is_contiguous() and read.dtype == source.infos[name].dtype == torch.float32
        middle = max(1, read.shape[0] // 2)
        assert torch.equal(source.read_rows(name, middle - 1, middle + 1), parameter[middle - 1 : middle + 1]), name

    theirs = model.config.to_dict()
    ours = source.config.to_dict()
    different = {key for key in theirs if ours.get(key) != theirs[key]} - {"dtype", "architectures"}
    assert different == set(), {key: (theirs[key], ours.get(key)) for key in different}
    assert source.config.architectures == [type(model).__name__]


@pytest.mark.parametrize("case", ["llama", "gpt2", "bloom"])
def test_a_model_filled_from_the_file_computes_the_same(tmp_path, case):
    model = make_model(*MODELS[case])
    source = open_weights(write_gguf(tmp_path / "m.gguf", model))
    ours = AutoModelForCausalLM.from_config(source.config).float().eval()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(source.read(name))
        ids = torch.arange(12)[None]
        assert torch.equal(ours(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16"])
def test_quantized_tiles_are_the_decoder_s_own_values(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("ajusta.engine.weights_gguf._TILE_ELEMENTS", 70)  # 2 rows of 32: many tiles and a rest
    quantized = GGMLQuantizationType[kind]
    model = make_model("bloom", MODELS["bloom"][1])
    source = open_weights(write_gguf(tmp_path / "m.gguf", model, quantized))
    for name, parameter in model.named_parameters():
        stored = stored_form(name, parameter.detach(), model.config)
        if stored.ndim == 2:
            rows = gguf.dequantize(gguf.quantize(stored.numpy(), quantized), quantized)
            stored = torch.from_numpy(rows)
        if "query_key_value" in name:
            stored = stored.view(3, 4, 8, *stored.shape[1:]).swapaxes(0, 1).reshape(stored.shape)
        assert torch.equal(source.read(name).float(), stored), name
    float_types = {"F16": torch.float16, "BF16": torch.bfloat16}
    assert source.infos["transformer.word_embeddings.weight"].dtype == float_types.get(kind, torch.float32)


def test_token_ids_and_ends_come_from_the_metadata(tmp_path):
    ids = {"tokenizer__ggml__bos_token_id": 1, "tokenizer__ggml__eos_token_id": 2, "tokenizer__ggml__eot_token_id": 5}
    source = open_weights(write_gguf(tmp_path / "m.gguf", make_model(*MODELS["llama"]), **ids), reference="me")
    assert (source.config.bos_token_id, source.config.eos_token_id, source.config.pad_token_id) == (1, 2, None)
    assert source.generation == {"bos_token_id": 1, "eos_token_id": [2, 5]}
    assert source.reference == "me"
    assert source.config.rms_norm_eps == 1e-5  # not 9.999999747378752e-06, which is what the file's float32 says


def test_the_fingerprint_follows_content(tmp_path):
    model = make_model(*MODELS["llama"])
    first = open_weights(write_gguf(tmp_path / "a.gguf", model)).fingerprint
    assert open_weights(write_gguf(tmp_path / "b.gguf", model)).fingerprint == first
    assert open_weights(write_gguf(tmp_path / "c.gguf", model, GGMLQuantizationType.Q8_0)).fingerprint != first
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    assert open_weights(write_gguf(tmp_path / "d.gguf", model)).fingerprint != first


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__expert_count": 8}, "Mixture-of-Experts"),
        ({"llama__rope__dimension_count": 4}, "only 4 of 8 head dimensions are rotated"),
        ({"split__count": 3}, "one of 3 parts.*llama-gguf-split --merge"),
        ({"llama__attention__value_length": 4}, "values and keys of different size"),
        ({"llama__vocab": 1, "llama__block_count": 9}, "missing model.layers.2"),
    ],
)
def test_models_that_are_not_read_say_why(tmp_path, metadata, message):
    model = make_model(*MODELS["llama"])
    path = write_gguf(tmp_path / "m.gguf", model)
    replaced = {key.replace("__", ".") for key in metadata}
    rewrite(path, drop=replaced, add=metadata)
    with pytest.raises(ModelError, match=message):
        open_weights(path)


def rewrite(path: Path, drop: set[str], add: dict[str, int]) -> None:
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in drop and key != Keys.General.ARCHITECTURE:
            writer.add_key_value(key, field.contents(), field.types[0])
    for key, value in add.items():
        writer.add_uint32(key.replace("__", "."), value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


def test_a_missing_or_left_over_tensor_is_named(tmp_path):
    model = make_model(*MODELS["llama"])
    with pytest.raises(ModelError, match=r"missing model.layers.1.mlp.up_proj.weight \(blk.1.ffn_up.weight\)"):
        open_weights(write_gguf(tmp_path / "m.gguf", model, skip="blk.1.ffn_up.weight"))
    path = write_gguf(tmp_path / "n.gguf", make_model("llama", MODELS["llama"][1] | {"attention_bias": True}))
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_q.bias", b"blk.1.attn_x.bias"))
    with pytest.raises(ModelError, match=r"missing .*q_proj.bias.*unexpected blk.1.attn_x.bias"):
        open_weights(path)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen4")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"architecture 'qwen4'; expected one of llama, qwen2.*did you mean 'qwen"):
        open_weights(tmp_path / "m.gguf")


def test_damaged_files_are_one_line_each(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", make_model(*MODELS["llama"])).read_bytes()
    broken = tmp_path / "broken.gguf"
    damages = {
        "begins with b'GGML'": b"GGML" + whole[4:],
        "is GGUF version 9": whole[:4] + struct.pack("<I", 9) + whole[8:],
        "big-endian": whole[:4] + struct.pack(">I", 3) + whole[8:],
        "a tensor count of": whole[:8] + b"\xff" * 8 + whole[16:],
        "a metadata count of": whole[:16] + b"\xff" * 8 + whole[24:],
        "a metadata name of": whole[:24] + b"\xff" * 7 + b"\x00" + whole[32:],
        "has 10 bytes": whole[:10],
        "ends at byte": whole[:-64],
        "expected a complete download": whole[:300],
    }
    for message, data in damages.items():
        broken.write_bytes(data)
        with pytest.raises(ModelError, match=message) as caught:
            open_weights(broken)
        assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")  # transformers may warn about settings that a flipped byte made strange
def test_no_cut_and_no_flipped_byte_of_a_header_gives_a_traceback(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", make_model(*MODELS["llama"]))
    whole = path.read_bytes()
    end = min(tensor.offset for tensor in read_header(path).tensors.values())
    broken = tmp_path / "broken.gguf"
    generator = np.random.default_rng(0)
    for place in generator.integers(0, end, 200):
        data = bytearray(whole)
        data[place] ^= int(generator.integers(1, 256))
        broken.write_bytes(bytes(data) if generator.integers(2) else whole[:place])
        try:
            open_weights(broken)  # a flipped letter in a general.name is a good header
        except ModelError as error:
            assert len(str(error)) < 1500 and str(error).isprintable()


def test_an_unknown_quantization_type_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", make_model(*MODELS["llama"]))
    name = b"blk.0.attn_norm.weight"
    at = path.read_bytes().index(name) + len(name) + 4 + 8
    for kind, message in ((99, "unknown quantization type 99"), (26, "stored as I32; expected one of")):
        data = bytearray(path.read_bytes())
        data[at : at + 4] = struct.pack("<I", kind)
        path.write_bytes(bytes(data))
        with pytest.raises(ModelError, match=message):
            open_weights(path)


def test_a_file_that_shrinks_after_opening_is_told(tmp_path):
    source = open_weights(write_gguf(tmp_path / "m.gguf", make_model(*MODELS["gpt2"])))
    path = source.files[0]
    path.write_bytes(path.read_bytes()[: read_header(path).tensors["blk.1.ffn_down.weight"].offset + 8])
    with pytest.raises(ModelError, match="ends inside tensor"):
        source.read("transformer.h.1.mlp.c_proj.weight")
