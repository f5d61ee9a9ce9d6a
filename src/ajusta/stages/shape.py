"""A model by its shape alone, for a plan: a name that is known, a config.json, or the headers of its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from ajusta.base.errors import ModelError, UserError, nearest
from ajusta.engine.weights import WeightSource, open_weights
from ajusta.engine.weights_config import read_config
from ajusta.spec.config import Config
from ajusta.spec.models import find_model, model_names
from ajusta.stages.base import position_limit
from ajusta.stages.fetch import fetch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a plan needs to know of a model; `source` is None where only its configuration is at hand."""

    reference: str
    config: PretrainedConfig
    source: WeightSource | None
    told_by: str  # where the shape comes from, for a person

    @property
    def position_limit(self) -> int | None:
        """Tokens; None where the model has no table of positions."""
        return position_limit(self.config)


def open_shape(config: Config) -> Shape:
    """Find the shape of the model; no weight is read, and for a name of the catalogue nothing is fetched.

    Raises:
        UserError: there is no such path, and no model is known by this name.
        ModelError: what is there cannot be used; one line says why.
    """
    name = config.model
    path = Path(name).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        path = path.parent  # config.json, or a file of weights beside it
    if path.is_dir() and not any(path.glob("*.safetensors")):
        facts, _ = read_config(path, config.trust_remote_code)
        return Shape(reference=name, config=facts, source=None, told_by=f"{path / 'config.json'}, without any weights")
    known = None if path.exists() else find_model(name)
    if known is not None:
        return Shape(
            reference=known.hub, config=_built(known.name, known.config), source=None, told_by=f"known: {known.hub}"
        )
    if not path.exists() and "/" not in name:
        raise UserError(
            f"model {name!r} is no path here and no name of the catalogue; expected a folder, a .gguf file, a "
            f"config.json, org/name on the hub or one of {len(model_names())} names such as llama-3.1-8b"
            f"{nearest(name.lower(), model_names())}"
        )
    where = str(path) if path.exists() else name
    fetched = fetch(where, config.revision, offline=config.offline, allow_code=config.trust_remote_code)
    source = open_weights(fetched.path, trust_remote_code=config.trust_remote_code, reference=name)
    return Shape(reference=name, config=source.config, source=source, told_by=f"the headers of {fetched.path.name}")


def _built(name: str, settings: dict[str, object]) -> PretrainedConfig:
    try:
        return AutoConfig.for_model(**settings)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ModelError(
            f"this transformers does not take the settings of {name} ({error}); expected release 5; "
            "pip install -U 'transformers>=5,<6'"
        ) from error
