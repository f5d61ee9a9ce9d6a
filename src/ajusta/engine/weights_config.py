"""config.json and generation_config.json of a model folder, with one clear line for all that can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ajusta.base.errors import ModelError, nearest
from ajusta.engine.weights_base import one_line

_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in a file.

    Raises:
        ModelError: the file is unreadable, is no JSON, or holds no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable as JSON ({error}); expected a JSON object; fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; expected a JSON object; fetch it again")
    return value


def read_config(
    folder: Path, trust_remote_code: bool, *, may_be_quantized: bool = False
) -> tuple[PretrainedConfig, dict[str, object]]:
    """Return the folder's configuration and config.json as stored.

    A `model_type` that transformers knows is built by transformers' own class even if config.json points to code
    (`auto_map`): that code is then neither read nor run. Only an unknown type with code needs `trust_remote_code`.
    With `may_be_quantized` it may describe weights that bitsandbytes quantized; the configuration then says no more of
    it, since the weights' own names tell.

    Raises:
        ModelError: no config.json, unknown type, remote code without leave, an already quantized model, bad values.
    """
    path = folder / "config.json"
    if not path.is_file():
        there = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "nothing"
        raise ModelError(f"{folder} has no config.json (it holds {there}); expected a Hugging Face model folder")
    facts = read_json(path)
    model_type = facts.get("model_type")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES
    if not known and not (trust_remote_code and "auto_map" in facts):
        raise ModelError(_unknown_type(path, model_type, "auto_map" in facts))
    _refuse_quantized(path, facts, may_be_quantized)
    try:
        run_code = trust_remote_code and not known
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=run_code)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        why = one_line(error)
        raise ModelError(f"{path} is no valid {model_type} configuration: {why}; fetch or repair it") from error
    vars(config).pop("quantization_config", None)
    if not config.architectures:
        config.architectures = causal_class_names(str(model_type))
    return config, facts


def causal_class_names(model_type: str) -> list[str] | None:
    """Return the name of transformers' causal language model of this type, as `architectures` wants it."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if name is None:
        return None
    return [name] if isinstance(name, str) else [str(name[0])]


def read_generation(folder: Path, facts: dict[str, object]) -> dict[str, object]:
    """Return generation_config.json, or where there is none the token ids of config.json.

    Raises:
        ModelError: the file is there and is no JSON object.
    """
    path = folder / "generation_config.json"
    if path.is_file():
        return read_json(path)
    return {key: facts[key] for key in _GENERATION_KEYS if facts.get(key) is not None}


def _unknown_type(path: Path, model_type: object, has_code: bool) -> str:
    if has_code:
        return (
            f"{path} says model_type {model_type!r} and wants to run Python code that came with the model (auto_map); "
            f"expected a model that transformers knows by itself; if you trust its author, set trust_remote_code"
        )
    if not isinstance(model_type, str):
        return f"{path} has no model_type; expected the name of a transformers model, for example llama; fetch it again"
    near = nearest(model_type, CONFIG_MAPPING_NAMES)
    return (
        f"{path} says model_type {model_type!r}, unknown to this transformers{near}; expected a type that it knows; "
        f"update transformers"
    )


def _refuse_quantized(path: Path, facts: dict[str, object], by_bitsandbytes: bool) -> None:
    quantization = facts.get("quantization_config")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "an unnamed method")
        if by_bitsandbytes and method == "bitsandbytes":
            return
        raise ModelError(
            f"{path} describes weights already quantized by {method}; expected float weights (ajusta quantizes on "
            f"arrival), or a folder with bitsandbytes' weights; choose the model's plain version"
        )
