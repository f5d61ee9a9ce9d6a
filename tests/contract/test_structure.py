"""What docs/structure.md promises about the source, read from the source itself: floors, ceilings, forbidden calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import ajusta

ROOT = Path(ajusta.__file__).parent

# Imports go down only; packages on the same floor do not know each other.
FLOORS = {
    "base": 0,
    "spec": 1,
    "memory": 2,
    "data": 3,
    "blocks": 3,
    "engine": 4,
    "planning": 5,
    "stages": 5,
    "report": 5,
    "run": 6,
    "look": 6,
    "cli": 7,
    "": 7,  # ajusta/__init__.py, the public door
    "__main__": 8,
}
MOST_LINES, MOST_FUNCTION_LINES = 400, 60
LONGER_FILES: dict[str, str] = {}  # kernel files only: name and why it is longer
BROAD_EXCEPT = {"cli/main.py": 1}  # the last resort of the program; it must say `broad:` and why
NO_PICKLE = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}
FORBIDDEN_ARGUMENTS = {("trust_remote_code", True), ("allow_pickle", True), ("shell", True), ("weights_only", False)}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Source:
    path: Path
    name: str  # dotted, without "ajusta."
    tree: ast.Module
    text: str

    def __str__(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> str:
        return self.name.split(".")[0]


def _source(path: Path) -> Source:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(part for part in parts if part != "__init__")
    text = path.read_text(encoding="utf-8")
    return Source(path=path, name=name, tree=ast.parse(text), text=text)


SOURCES = [_source(path) for path in sorted(ROOT.rglob("*.py"))]
MODULES = {source.name for source in SOURCES}
each_source = pytest.mark.parametrize("source", SOURCES, ids=str)


def imported(source: Source, tree: ast.AST | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line, module of ours without "ajusta.") for every import in the tree, those for types alone as well."""
    for node in ast.walk(tree or source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "ajusta":
                    yield node.lineno, alias.name.partition(".")[2]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ajusta":
            module = (node.module or "").partition(".")[2]
            for alias in node.names:
                inner = f"{module}.{alias.name}".strip(".")
                yield node.lineno, inner if inner in MODULES else module


def functions(source: Source) -> Iterator[Function]:
    return (node for node in ast.walk(source.tree) if isinstance(node, Function))


def dotted(node: ast.expr) -> str:
    """Return `torch.load` for the expression that says so, or an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def test_the_source_is_found() -> None:
    assert {"base.errors", "spec.config", "cli.main"} <= MODULES
    assert {source.package for source in SOURCES} <= set(FLOORS), "a new package needs its floor"


@each_source
def test_imports_go_down_only(source: Source) -> None:
    wrong = [
        f"line {line}: {source.package or 'ajusta'} (floor {FLOORS[source.package]}) imports {target}"
        for line, target in imported(source)
        if target.split(".")[0] != source.package
        and (target.split(".")[0], source.package) != ("", "cli")  # the command line asks the door for its version
        and FLOORS[target.split(".")[0]] >= FLOORS[source.package]
    ]
    assert not wrong


@each_source
def test_no_relative_import(source: Source) -> None:
    assert not [node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom) and node.level]


def test_no_import_cycle() -> None:
    graph = {source.name: sorted({target for _, target in imported(source)} - {""}) for source in SOURCES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for target in graph.get(module, ()):
            visit(target, (*path, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@each_source
def test_no_file_is_too_long(source: Source) -> None:
    lines = len(source.text.splitlines())
    assert lines <= MOST_LINES or str(source) in LONGER_FILES, f"{lines} lines"


def test_exemptions_are_still_needed() -> None:
    by_name = {str(source): source for source in SOURCES}
    for name, reason in LONGER_FILES.items():
        assert reason
        assert len(by_name[name].text.splitlines()) > MOST_LINES, name


@each_source
def test_no_function_is_too_long(source: Source) -> None:
    long = {
        node.name: length
        for node in functions(source)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_FUNCTION_LINES
    }
    assert not long


@each_source
def test_imports_stand_at_the_top(source: Source) -> None:
    if source.package == "cli":
        return  # there they wait, so that --help answers at once
    inside = [
        f"{function.name}, line {node.lineno}"
        for function in functions(source)
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert not inside


@each_source
def test_no_broad_except(source: Source) -> None:
    lines = source.text.splitlines()
    broad = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(kind is None or dotted(kind) in ("Exception", "BaseException") for kind in kinds):
            broad.append(node.lineno)
    assert len(broad) <= BROAD_EXCEPT.get(str(source), 0), broad
    assert all("# broad: " in lines[line - 1] for line in broad)


@each_source
def test_every_argument_and_result_is_typed(source: Source) -> None:
    untyped = []
    for node in functions(source):
        given = node.args
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
        bare = [arg.arg for arg in named if arg.annotation is None and arg.arg not in ("self", "cls")]
        untyped += [f"{node.name}({name})" for name in bare]
        untyped += [f"{node.name} ->"] if node.returns is None else []
    assert not untyped


@each_source
def test_every_module_and_public_name_says_what_it_is(source: Source) -> None:
    silent = [] if ast.get_docstring(source.tree) else ["the module"]

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.ClassDef, Function)) and not node.name.startswith("_"):
                if not ast.get_docstring(node):
                    silent.append(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    look(node.body, f"{prefix}{node.name}.")

    look(source.tree.body, "")
    assert not silent


@each_source
def test_what_a_public_function_raises_is_said(source: Source) -> None:
    unsaid = []
    for node in source.tree.body:
        if not isinstance(node, Function) or node.name.startswith("_"):
            continue
        said = ast.get_docstring(node) or ""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call):
                kind = dotted(inner.exc.func)
                if kind.endswith("Error") or kind in ("DoesNotFit", "NumbersGoneBad"):
                    unsaid += [] if kind in said else [f"{node.name}: {kind}"]
    assert not unsaid


@each_source
def test_nothing_that_runs_foreign_code(source: Source) -> None:
    wrong = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            wrong += [alias.name for alias in node.names if alias.name.split(".")[0] in NO_PICKLE]
        elif isinstance(node, ast.ImportFrom):
            wrong += [node.module] if (node.module or "").split(".")[0] in NO_PICKLE else []
        elif isinstance(node, ast.Call):
            wrong += [dotted(node.func)] if dotted(node.func) in FORBIDDEN_CALLS else []
            wrong += [
                f"{word.arg}={word.value.value}"
                for word in node.keywords
                if isinstance(word.value, ast.Constant) and (word.arg, word.value.value) in FORBIDDEN_ARGUMENTS
            ]
    assert not wrong


@each_source
def test_code_is_ascii_and_annotations_wait(source: Source) -> None:
    assert source.text.isascii()
    assert "from __future__ import annotations" in source.text or not any(functions(source))
