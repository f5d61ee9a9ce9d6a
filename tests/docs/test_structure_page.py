"""docs/structure.md names every source file exactly once, and nothing that is not there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import ajusta

SOURCE = Path(ajusta.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "structure.md").read_text(encoding="utf-8")


def listed() -> list[str]:
    """Return the names that the list of files gives a line of their own."""
    files = PAGE.split("## Every file", 1)[1]
    return re.findall(r"^- `([^`]+)`: \S", files, flags=re.MULTILINE)


def is_bare(path: Path) -> bool:
    """Whether this is a floor's `__init__.py` with a docstring and nothing else."""
    if path.name != "__init__.py" or path.parent == SOURCE:
        return False
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)


def test_every_file_has_one_line_and_every_line_a_file() -> None:
    there = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not is_bare(path)
    }
    names = listed()
    assert not [name for name, count in Counter(names).items() if count > 1]
    assert not there - set(names), "files without a line in docs/structure.md"
    assert not set(names) - there, "lines in docs/structure.md without a file"


def test_what_the_page_says_elsewhere_is_there_too() -> None:
    text = PAGE.split("## Every file", 1)[0]
    for name in re.findall(r"`([a-z_0-9]+/[\w/.]+\.(?:py|md|txt))`", text):
        place = SOURCE.parent.parent if name.startswith(("src/", "tests/", "docs/")) else SOURCE
        assert (place / name).is_file(), name
