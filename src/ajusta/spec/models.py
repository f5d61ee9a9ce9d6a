"""Open language models that are known by name: their sizes, so that a plan needs no network and no download.

The rows stand in models.toml, each with where its facts come from. Nothing here needs torch or transformers: a row's
`config` is what transformers' configuration class is called with.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """One model: what it is called, how large it is, and who says so."""

    name: str  # our short name, in lower case
    hub: str  # owner/repository on huggingface.co
    aliases: tuple[str, ...] = ()  # other names, and repositories with the same configuration
    licence: str  # as the hub's card tags it
    parameters: int  # weights of the causal language model, tied ones counted once
    stored: int  # numbers in the hub's files
    stored_beside: tuple[tuple[int, ...], ...] = ()  # shapes of what they hold beside the weights
    source: str  # URL of the file that the configuration is taken from
    confirmed: tuple[str, ...]  # where else it can be read: URL and what is found there
    settings: Mapping[str, object] = field(repr=False, hash=False)  # flat and read-only; see `config`

    @property
    def config(self) -> dict[str, object]:
        """Settings for transformers' configuration class, `model_type` among them; a copy, as the class keeps parts."""
        return copy.deepcopy(dict(self.settings))

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that `find_model` takes for this model, in lower case; the repository also without its owner."""
        spelled = (self.name, self.hub, self.hub.rpartition("/")[2], *self.aliases)
        return tuple(dict.fromkeys(name.lower() for name in spelled))


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return every model of models.toml, in the order of the file; read once."""
    table = tomllib.loads(files("ajusta.spec").joinpath("models.toml").read_text(encoding="utf-8"))
    return tuple(_models(table["model"], table["evidence"]))


def _models(rows: list[dict[str, Any]], evidence: Mapping[str, str]) -> Iterator[KnownModel]:
    """Turn rows into models; a row that is `like` another one comes after it."""
    settings: dict[str, dict[str, object]] = {}
    for row in rows:
        like = settings[row["like"]] if "like" in row else {}
        settings[row["name"]] = like | row.get("config", {}) | dict.fromkeys(row.get("null", ()))
        yield KnownModel(
            name=row["name"],
            hub=row["hub"],
            aliases=tuple(row.get("aliases", ())),
            licence=row["licence"],
            parameters=row["parameters"],
            stored=row.get("stored", row["parameters"]),
            stored_beside=tuple(tuple(shape) for shape in row.get("stored_beside", ())),
            source=row["source"],
            confirmed=tuple(evidence[key] for key in row["confirmed"]),
            settings=MappingProxyType(settings[row["name"]]),
        )


@cache
def _by_name() -> Mapping[str, KnownModel]:
    """Return the models by everything they are called."""
    return {name: model for model in known_models() for name in model.names}


def find_model(text: str) -> KnownModel | None:
    """Return the model that a person means, or None.

    Args:
        text: short name, repository on the hub (with or without its owner) or alias; upper and lower case are the same.
    """
    return _by_name().get(text.strip().lower())


def model_names() -> tuple[str, ...]:
    """Return the short names in the order of the file: to list them, and to find the nearest to one that is wrong."""
    return tuple(model.name for model in known_models())
