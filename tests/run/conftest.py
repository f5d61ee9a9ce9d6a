"""Models, data and a finished run, made once; the general text is cut short, since every run reads it twice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import tiny_runs

from ajusta.cli.main import main
from ajusta.data.general import general_rows
from ajusta.stages import work


@pytest.fixture(scope="session", autouse=True)
def short_general_text() -> Iterator[None]:
    """One row of the general text instead of all."""
    rows = general_rows()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "general_rows", lambda: rows)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_runs.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def finished(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plain run of six steps that nothing disturbed; only to be read."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    tiny_runs.tune(tiny_runs.settings(model, data, out))
    return out


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Type a command in this process; returns the exit code."""

    def type_command(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ajusta", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code if isinstance(left.value.code, int) else 0

    return type_command
