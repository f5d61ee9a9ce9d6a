"""The demo's archive and exams are what the README says they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ajusta.spec.config import load_config
from ajusta.stages.base import open_base
from ajusta.stages.work import read_work

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "demo" / "model" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MOST_TOKENS = 45_000  # that may pass through the model in the whole training, prompts counted


def test_the_archive_holds_what_it_claims() -> None:
    """Counts, answers, and that no wording of the exam stands in what is trained on."""
    result = subprocess.run([sys.executable, str(ROOT / "demo" / "check.py")], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout
    assert "FAIL" not in result.stdout


def test_the_settings_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(Path("demo/demo.yaml"))
    assert config.bits == "nf4" and config.gradient_checkpointing == "auto" and config.memory_bytes is not None


@pytest.mark.slow
def test_the_training_stays_within_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    if not MODEL.exists():
        pytest.fail(f"{MODEL} is missing; make demo fetches it")
    monkeypatch.chdir(ROOT)
    config = load_config(Path("demo/demo.yaml"))
    demand = read_work(config, open_base(config)).demand
    assert demand.order.total_tokens(demand.steps) <= MOST_TOKENS
