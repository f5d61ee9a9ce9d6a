"""From flags to settings: every flag is text that the one schema of `spec.config` reads, beside the file's lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ajusta.base.errors import ConfigError

if TYPE_CHECKING:
    from ajusta.spec.config import Config


def make_config(
    file: Path | None, flags: Mapping[str, object], pairs: Iterable[str], *, required: Iterable[str]
) -> Config:
    """Return the Config of a file, of flags by setting's name, and of `--set KEY=VALUE` pairs.

    Raises:
        ConfigError: one or more of them are wrong; all are named.
    """
    from ajusta.spec.config import load_config

    given = {name: value for name, value in flags.items() if value not in (None, [], ())}
    origins = {name: f"--{name.replace('_', '-')}" for name in given}
    for name, value in read_pairs(pairs).items():
        if name in given:
            raise ConfigError(f"--set {name}: is given as {origins[name]} too; keep one of them")
        given[name], origins[name] = value, "--set"
    return load_config(file, given, origins=origins, required=required)


def read_pairs(pairs: Iterable[str]) -> dict[str, object]:
    """Read `KEY=VALUE` texts.

    Raises:
        ConfigError: a text has no `=`, or a key comes twice.
    """
    from ajusta.spec.config import describe
    from ajusta.spec.settings_file import read_flag_value

    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            names = ", ".join(setting.name for setting in describe())
            raise ConfigError(f"--set {pair}: expected KEY=VALUE, for example --set lora.r=8; the keys are: {names}")
        if name in found:
            raise ConfigError(f"--set {name}: is given twice; keep one of them")
        found[name] = read_flag_value(value)
    return found
