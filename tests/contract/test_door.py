"""What people build on, frozen: public names, options, counts of settings, and what `--help` costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import typer

import ajusta
from ajusta.cli.main import app
from ajusta.spec.config import Config, describe
from ajusta.spec.settings_check import group_of

MOST_SETTINGS, MOST_IN_A_GROUP, MOST_OPTIONS = 25, 8, 12
PUBLIC = [
    "AjustaError",
    "Config",
    "DoesNotFit",
    "UserError",
    "__version__",
    "evaluate",
    "explain",
    "export",
    "finetune",
    "load",
    "load_config",
    "plan",
]
OPTIONS = {
    "train": "--bits --config --data --epochs --exam --memory --model --out --resume --set --steps --stop-after",
    "chat": "--max-tokens --question --seed --temperature",
    "evaluate": "--data --exam --json",
    "export": "--format --out",
    "plan": (
        "--all-gpus --bits --config --data --gpu --json --largest-model --max-context --max-length "
        "--memory --model --set"
    ),
    "explain": "--bits --config --data --gpu --json --max-length --memory --model --set",
    "doctor": "--json --measure",
    "data": "--json --max-length --model --set",
}
HEAVY = ["torch", "transformers", "numpy", "pydantic", "rich", "yaml", "huggingface_hub"]


def commands() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def options(command: Any) -> list[str]:
    longest = (max(part.opts, key=len) for part in command.params if part.param_type_name == "option")
    return sorted(name for name in longest if name != "--help")


def test_the_public_names() -> None:
    assert sorted(ajusta.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(ajusta))
    with pytest.raises(AttributeError, match="finetune"):
        _ = ajusta.fine_tune  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(ajusta, name)
    assert name == "__version__" or value.__doc__


def test_the_options_of_every_command() -> None:
    assert {name: " ".join(options(command)) for name, command in commands().items()} == OPTIONS


@pytest.mark.parametrize("name", OPTIONS)
def test_no_command_has_too_many_options_and_each_has_help(name: str) -> None:
    command = commands()[name]
    assert len(options(command)) <= MOST_OPTIONS
    assert command.help
    assert all(part.help for part in command.params if part.param_type_name == "option")


def test_the_number_of_settings() -> None:
    assert len(Config.model_fields) <= MOST_SETTINGS
    for info in Config.model_fields.values():
        group = group_of(info)
        assert group is None or len(group.model_fields) <= MOST_IN_A_GROUP


def test_every_setting_has_help_and_says_what_it_expects() -> None:
    for row in describe():
        assert row.help and row.expects, row.name
        assert "\n" not in row.help and not row.help.endswith("."), row.name


def loaded_after(statement: str) -> list[str]:
    """Return which heavy modules are loaded once a fresh interpreter has run the statement."""
    program = (
        "import json, sys\n"
        f"sys.argv = ['ajusta', *{statement.split()!r}]\n"
        "import ajusta\n"
        "if len(sys.argv) > 1:\n"
        "    import ajusta.cli.main\n"
        "    try:\n"
        "        ajusta.cli.main.main()\n"
        "    except SystemExit as left:\n"
        "        assert not left.code, left.code\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60, check=True)
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


@pytest.mark.parametrize("words", ["", "--help", "--version", "train --help", "plan --help"])
def test_help_and_the_import_load_nothing_heavy(words: str) -> None:
    # Newer releases of typer read a command's own options with pydantic; the list of commands needs none.
    assert set(loaded_after(words)) <= ({"pydantic"} if " " in words else set())
