"""The catalogue of known models: every row has its sources, and is the model that it says it is, to the last weight."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path, PurePath

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ajusta.base.errors import nearest
from ajusta.spec.models import KnownModel, find_model, known_models, model_names

MODELS = known_models()
each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


def weights(config: dict[str, object]) -> int:
    """Count the weights of the model that transformers builds, tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in model.parameters())


def shallow(config: dict[str, object], layers: int) -> dict[str, object]:
    """Return the configuration with that many layers; what kind each is follows from the class's own rule."""
    name = "n_layer" if "n_layer" in config else "num_hidden_layers"
    return {key: value for key, value in config.items() if key != "layer_types"} | {name: layers}


@each_model
def test_a_row_is_well_formed(model: KnownModel) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", model.name)
    assert all(re.fullmatch(r"([A-Za-z0-9._-]+/)?[A-Za-z0-9._-]+", name) for name in (model.hub, *model.aliases))
    assert model.hub.count("/") == 1
    assert model.source.startswith("https://")
    assert model.hub in model.source
    assert model.confirmed
    assert all(model.confirmed)
    assert model.licence
    assert isinstance(model.config["model_type"], str)


@each_model
def test_what_the_files_hold_beside_the_weights_is_accounted_for(model: KnownModel) -> None:
    """The hub's total counts tied matrices that are stored twice, and buffers; each is named with its shape."""
    assert model.stored - sum(math.prod(shape) for shape in model.stored_beside) == model.parameters


@each_model
def test_the_number_of_weights_is_the_published_one(model: KnownModel) -> None:
    """One layer and two layers say what every further one adds: all layers of these families have the same shapes."""
    config = model.config
    depth = config.get("n_layer", config.get("num_hidden_layers"))
    assert isinstance(depth, int)
    one, two = weights(shallow(config, 1)), weights(shallow(config, 2))
    assert one + (depth - 1) * (two - one) == model.parameters


@pytest.mark.slow
@each_model
def test_the_number_of_weights_is_the_published_one_at_full_depth(model: KnownModel) -> None:
    assert weights(model.config) == model.parameters


def test_the_catalogue_is_broad() -> None:
    sizes = [model.parameters for model in MODELS]
    assert len(MODELS) >= 45
    assert min(sizes) < 0.2e9
    assert max(sizes) > 400e9
    assert {model.config["model_type"] for model in MODELS} >= {"llama", "qwen3", "mistral", "gemma2", "bloom", "gpt2"}


def test_every_evidence_is_cited_by_a_row() -> None:
    table = tomllib.loads(files("ajusta.spec").joinpath("models.toml").read_text(encoding="utf-8"))
    assert {key for row in table["model"] for key in row["confirmed"]} == set(table["evidence"])
    assert len(table["model"]) == len(MODELS)


def test_no_name_means_two_models() -> None:
    names = [name for model in MODELS for name in model.names]
    assert len(names) == len(set(names))


@each_model
def test_a_model_is_found_by_each_of_its_names_however_they_are_written(model: KnownModel) -> None:
    for name in (model.name, model.hub, *model.aliases):
        assert find_model(name) is model
        assert find_model(f" {name.upper()} ") is model


def test_a_model_is_found_by_its_repository_without_the_owner() -> None:
    assert find_model("Llama-3.1-8B") is find_model("meta-llama/Llama-3.1-8B")
    assert find_model("bloom") is find_model("bloom-176b")


def test_an_unknown_name_is_none_and_the_nearest_one_is_near() -> None:
    for wrong in ("llama-3.1-8", "", "someone/llama-3.1-8b", "models/qwen3-8b"):
        assert find_model(wrong) is None
    assert nearest("llama-3.1-8", model_names()) == "; did you mean 'llama-3.1-8b'?"
    assert nearest("qwen-3-8b", model_names()) == "; did you mean 'qwen3-8b'?"


def test_a_configuration_is_handed_out_as_a_copy() -> None:
    """Transformers keeps the dictionary of the rotary settings and writes into it."""
    model = find_model("llama-3.1-8b")
    assert model is not None
    before = model.config
    AutoConfig.for_model(**model.config)
    assert model.config == before
    scaling = model.config["rope_scaling"]
    assert isinstance(scaling, dict)
    scaling["factor"] = 1.0
    assert model.config == before
    with pytest.raises(TypeError):
        model.settings["vocab_size"] = 1  # type: ignore[index]


def test_a_row_like_another_one_has_its_configuration_with_the_changes() -> None:
    base, instruct, twin = (find_model(name) for name in ("qwen2.5-7b", "qwen2.5-7b-instruct", "llama-3.3-70b"))
    assert base is not None
    assert instruct is not None
    assert twin is not None
    assert base.config["max_position_embeddings"] == 131072
    assert instruct.config == base.config | {"max_position_embeddings": 32768}
    assert twin.settings == find_model("llama-3.1-70b").settings  # type: ignore[union-attr]


def test_a_setting_that_the_file_gives_as_null_is_none() -> None:
    """Mistral's class has a window of 4096 by default; only the first version of the model has it."""
    first, third = find_model("mistral-7b-v0.1"), find_model("mistral-7b-v0.3")
    assert first is not None
    assert third is not None
    assert first.config["sliding_window"] == 4096
    assert third.config["sliding_window"] is None
    assert AutoConfig.for_model(**third.config).sliding_window is None


def test_looking_up_a_name_needs_no_torch() -> None:
    code = (
        "import sys; from ajusta.spec.models import find_model; "
        "print(find_model('Qwen/Qwen3-8B').name, {'torch', 'transformers'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "qwen3-8b set()"


def test_the_package_holds_the_catalogue() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["ajusta"]
    assert any(PurePath("spec/models.toml").match(pattern) for pattern in patterns)
