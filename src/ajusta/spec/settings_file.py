"""Settings as YAML: reading keeps the line of every value, writing puts each setting's help beside it.

Values are taken as the text that stands in the file and become numbers by the setting's type, exactly like flags. So
`2e-4` is a number (YAML 1.1 calls it a word), `no` is no truth value where a word is expected, and the revision
`1e10` stays what it is. Only `null`, `~` and an empty value are special: they are nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from ajusta.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One value on its way in, under its dotted name, and where it came from: `run.yaml:7` or `--set`."""

    name: str
    value: object
    origin: str


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One thing that is wrong; `names` are the settings that it is about."""

    origin: str
    text: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.origin}: {self.text}" if self.origin else self.text


def read_settings_file(path: Path) -> tuple[list[Leaf], list[Mistake]]:
    """Return every value of the file with its line, and the mistakes of its form (a key given twice).

    Raises:
        ConfigError: the file is not there, is no text, or is no YAML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a YAML file of settings") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: is no YAML: {error.problem}; expected lines such as `epochs: 3`") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is no YAML: {error}; expected lines such as `epochs: 3`") from error
    if node is None:
        return [], []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:1: holds no settings; expected lines such as `epochs: 3`")
    mistakes: list[Mistake] = []
    leaves = list(_walk(node, str(path), "", {}, mistakes))
    return leaves, mistakes


def _walk(
    node: yaml.MappingNode, file: str, prefix: str, seen: dict[str, int], mistakes: list[Mistake]
) -> Iterator[Leaf]:
    """Yield the leaves under `prefix`; a mapping inside a group is passed on as it is and refused by its type."""
    for key, value in node.value:
        line = key.start_mark.line + 1
        origin = f"{file}:{line}"
        if not isinstance(key, yaml.ScalarNode):
            mistakes.append(Mistake(origin=origin, text="a list or mapping stands where a setting's name is expected"))
            continue
        name = f"{prefix}{key.value}"
        if name in seen:
            text = f"{name!r} is given a second time (first in line {seen[name]}); keep one of them"
            mistakes.append(Mistake(origin=origin, text=text, names=(name,)))
            continue
        seen[name] = line
        if isinstance(value, yaml.MappingNode) and not prefix:
            yield from _walk(value, file, f"{name}.", seen, mistakes)
        else:
            yield Leaf(name=name, value=_plain(value), origin=origin)


def _plain(node: yaml.Node) -> object:
    """Return text, None, or a list of them; anything deeper is its own mark and no setting takes it."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == "tag:yaml.org,2002:null" else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) if isinstance(item, yaml.ScalarNode) else {} for item in node.value]
    return {}


def read_flag_value(text: str) -> object:
    """Read a value that was typed after KEY=: a list if it is written `[a, b]`, nothing if `null`, else the text."""
    if text in ("null", "~"):
        return None
    if text.startswith("[") and text.endswith("]"):
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError:
            return text
        return _plain(node) if isinstance(node, yaml.SequenceNode) else text
    return text


def flatten(values: Mapping[str, object], origins: Mapping[str, str]) -> list[Leaf]:
    """Turn `{"lora": {"r": 8}}` or `{"lora.r": 8}` into leaves."""
    leaves: list[Leaf] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = {f"{name}.{key}": item for key, item in value.items()}
            leaves += [Leaf(name=key, value=item, origin=origins.get(key, "")) for key, item in inner.items()]
        else:
            leaves.append(Leaf(name=name, value=value, origin=origins.get(name, "")))
    return leaves


def write_value(value: object) -> str:
    """Write a value on one line of YAML that reads back as the same value."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(write_value(item) for item in value) + "]"
    return _write_text(str(value))


def _write_text(text: str) -> str:
    """Quote a text where YAML would read something else; what does not print (a line break) goes in as its escape."""
    style = None if text.isprintable() else '"'
    inside_list: str = yaml.safe_dump(
        [text], default_style=style, default_flow_style=True, allow_unicode=style is None, width=float("inf")
    )
    return inside_list[1:-2]
