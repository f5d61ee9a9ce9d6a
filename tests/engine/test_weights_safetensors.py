from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ajusta.base.errors import ModelError
from ajusta.engine.weights import SafetensorsSource, open_weights

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "eos_token_id": 2,
}
TENSORS = {
    "a": torch.arange(24, dtype=torch.float32).reshape(6, 4),
    "b": torch.arange(6, dtype=torch.bfloat16).reshape(3, 2),
    "c": torch.tensor(3.5, dtype=torch.float16),
    "d": torch.tensor([True, False, True]),
    "e": torch.arange(4, dtype=torch.int64),
    "f": torch.zeros(0, 3),
}


def write_folder(folder: Path, config: dict | None = None, tensors: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file(TENSORS if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(TENSORS)
    weight_map = {}
    for part, chosen in enumerate((names[:3], names[3:]), start=1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({name: TENSORS[name] for name in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_every_tensor_comes_back_as_it_was_saved(tmp_path):
    source = open_weights(write_folder(tmp_path))
    assert isinstance(source, SafetensorsSource)
    assert set(source.infos) == set(TENSORS)
    for name, tensor in TENSORS.items():
        read = source.read(name)
        assert read.dtype == tensor.dtype == source.infos[name].dtype
        assert read.shape == tensor.shape == source.infos[name].shape
        assert torch.equal(read, tensor)
        assert source.infos[name].stored_bytes == source.infos[name].read_bytes == tensor.nbytes


def test_a_read_tensor_is_our_own(tmp_path):
    source = open_weights(write_folder(tmp_path))
    source.read("a").zero_()
    assert torch.equal(source.read("a"), TENSORS["a"])


def test_rows_are_a_tile_of_the_whole(tmp_path):
    source = open_weights(write_folder(tmp_path))
    assert torch.equal(source.read_rows("a", 2, 5), TENSORS["a"][2:5])
    assert torch.equal(source.read_rows("b", 2, 3), TENSORS["b"][2:3])
    for start, stop in ((-1, 2), (2, 2), (3, 7)):
        with pytest.raises(IndexError, match="of a tensor with 6 rows"):
            source.read_rows("a", start, stop)
    with pytest.raises(IndexError):
        source.read_rows("c", 0, 1)


def test_config_and_generation_are_read(tmp_path):
    source = open_weights(write_folder(tmp_path))
    assert source.config.architectures == ["LlamaForCausalLM"]
    assert source.generation == {"eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.5}')
    assert open_weights(tmp_path).generation == {"eos_token_id": [2, 3], "temperature": 0.5}


def test_shards_read_like_one_file(tmp_path):
    write_shards(tmp_path)
    source = open_weights(tmp_path, reference="org/name")
    assert source.reference == "org/name"
    assert len(source.files) == 2
    assert all(torch.equal(source.read(name), tensor) for name, tensor in TENSORS.items())


def test_the_fingerprint_follows_content_and_not_place(tmp_path):
    first = open_weights(write_folder(tmp_path / "x")).fingerprint
    assert open_weights(write_folder(tmp_path / "y")).fingerprint == first
    changed = TENSORS | {"a": TENSORS["a"] + 1}
    assert open_weights(write_folder(tmp_path / "y", tensors=changed)).fingerprint != first
    assert open_weights(write_folder(tmp_path / "y", config=CONFIG | {"eos_token_id": 1})).fingerprint != first


def test_missing_shards_are_named_with_what_is_there(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of 2 shards: model-00002.*on disk: model-00001-of-00002"):
        open_weights(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "weights.bin"])
def test_an_index_that_points_elsewhere_is_refused(tmp_path, file):
    weight_map = write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map | {"a": file}}))
    with pytest.raises(ModelError, match="expected safetensors files of the same folder"):
        open_weights(tmp_path)


def test_an_index_that_promises_too_much_or_nothing_is_refused(tmp_path):
    weight_map = write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {"z": weight_map["a"]}}))
    with pytest.raises(ModelError, match="promises z in model-00001"):
        open_weights(tmp_path)
    for text in ("{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[1]", "{"):
        index.write_text(text)
        with pytest.raises(ModelError, match="fetch it again"):
            open_weights(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_shards(tmp_path)
    save_file(
        {**{name: TENSORS[name] for name in "def"}, "a": TENSORS["a"]}, tmp_path / "model-00002-of-00002.safetensors"
    )
    with pytest.raises(ModelError, match="both hold a; expected it once"):
        open_weights(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "header", "length", "empty"])
def test_a_broken_file_is_one_line(tmp_path, damage):
    path = write_folder(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    broken = {"cut": data[:-5], "header": data[:8] + b"x" + data[9:], "length": b"\xff" * 8 + data[8:], "empty": b""}
    path.write_bytes(broken[damage])
    with pytest.raises(ModelError, match="is no whole safetensors file") as caught:
        open_weights(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_shrinks_after_opening_is_told(tmp_path):
    source = open_weights(write_folder(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="ends too early"):
        [source.read(name) for name in source.infos]


def test_pickle_is_never_loaded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(ModelError, match=r"only as pickle \(pytorch_model.bin\).*never loaded.*save_pretrained"):
        open_weights(tmp_path)


def test_folders_that_are_no_model_say_what_they_hold(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"no config.json \(it holds notes.txt\)"):
        open_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match=r"no weights \(it holds config.json, notes.txt\)"):
        open_weights(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"give one of them as the model: .*m.gguf"):
        open_weights(tmp_path)
    for name in ("x.safetensors", "y.safetensors"):
        save_file(TENSORS, tmp_path / name)
    with pytest.raises(ModelError, match=r"2 safetensors files and no model.safetensors.index.json"):
        open_weights(tmp_path)
    (tmp_path / "y.safetensors").unlink()
    assert set(open_weights(tmp_path).infos) == set(TENSORS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "unknown to this transformers; did you mean 'llama'"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "c.C"}}, "wants to run Python code"),
        ({"quantization_config": {"quant_method": "gptq"}}, "already quantized by gptq"),
        ({"hidden_size": "many"}, "no valid llama configuration"),
    ],
)
def test_a_config_that_cannot_be_used_is_told(tmp_path, change, message):
    write_folder(tmp_path, config=CONFIG | change)
    with pytest.raises(ModelError, match=message) as caught:
        open_weights(tmp_path)
    assert "\n" not in str(caught.value)


def test_code_beside_a_type_that_transformers_knows_is_not_run(tmp_path):
    folder = write_folder(tmp_path, config=CONFIG | {"auto_map": {"AutoConfig": "evil.Config"}})
    (folder / "evil.py").write_text("raise SystemExit('the code of the folder was run')")
    for trust in (False, True):
        assert type(open_weights(folder, trust_remote_code=trust).config).__name__ == "LlamaConfig"


def test_a_dtype_that_is_not_read_is_named(tmp_path):
    write_folder(tmp_path, tensors={"w": torch.zeros(4).to(torch.float8_e4m3fn)})
    with pytest.raises(ModelError, match="w is stored as F8_E4M3; expected one of F64"):
        open_weights(tmp_path)


def test_paths_that_are_no_model(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        open_weights(tmp_path / "nothing")
    folder = write_folder(tmp_path)
    with pytest.raises(ModelError, match="single weight file"):
        open_weights(folder / "model.safetensors")
    with pytest.raises(ModelError, match="is no model"):
        open_weights(folder / "config.json")
