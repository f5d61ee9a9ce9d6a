"""Every setting is read by the part of the program that it is about: one that nothing reads would be a lie."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ajusta
from ajusta.spec.config import describe

ROOT = Path(ajusta.__file__).parent
GROUPS = ("text", "lora", "optimizer")
# Settings that are read through a property of Config.
THROUGH = {"memory": "memory_bytes", "stop_after": "stop_after_seconds", "out": "run_folder"}


def reads(tree: ast.AST) -> Iterator[str]:
    """Yield `name` for `config.name` and `group.name` for a group, also where the group has a name of its own."""
    groups = {group: group for group in GROUPS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr in GROUPS:
            groups |= {target.id: node.value.attr for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        if owner == "config":
            yield node.attr
        if owner in groups:
            yield f"{groups[owner]}.{node.attr}"


def used_in(package: str) -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.glob(package)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for name in reads(function):
                    yield name, path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def users() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for package in ("run.py", "stages/*.py", "planning/*.py"):
        for name, where in used_in(package):
            found.setdefault(name, set()).add(where)
    return found


@pytest.mark.parametrize("name", [row.name for row in describe()])
def test_every_setting_is_read_somewhere(name: str, users: dict[str, set[str]]) -> None:
    assert users.get(THROUGH.get(name, name)), f"nothing in run.py, stages/ or planning/ reads {name}"
