"""A rehearsal that takes more than the budget leads to another plan: bounded, told, kept; the gradient is the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import adapter_bytes, settings, tune

from ajusta import run
from ajusta.base.errors import DoesNotFit
from ajusta.base.events import Ahead, Event, Note
from ajusta.planning.search import search
from ajusta.spec.plan import Plan
from ajusta.stages.rehearse import Rehearsal, over_budget, rehearse

KIB = 1 << 10
FREE: dict[str, Any] = {"gradient_checkpointing": "auto", "micro_batch": "auto", "batch_size": 4, "steps": 2}


def warnings(told: list[Event]) -> list[str]:
    return [event.text for event in told if isinstance(event, Note) and event.warning]


@pytest.fixture
def tensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave resident memory out: in a process of many tests it says nothing about the run."""
    monkeypatch.setattr(run, "over_budget", lambda rehearsal, plan, resident: over_budget(rehearsal, plan, None))


def fat(monkeypatch: pytest.MonkeyPatch, excess: int) -> list[Plan]:
    """Let every rehearsal measure so much more than it took; return the plans that were rehearsed."""
    plans: list[Plan] = []

    def measured(loaded: Any, optimizer: Any, plan: Plan, *batches: Any) -> Rehearsal:
        plans.append(plan)
        found = rehearse(loaded, optimizer, plan, *batches)
        phases = tuple(replace(each, measured_bytes=(each.measured_bytes or 0) + excess) for each in found.phases)
        return replace(found, phases=phases)

    monkeypatch.setattr(run, "rehearse", measured)
    return plans


def tight(model: Path, data: Path, out: Path, monkeypatch: pytest.MonkeyPatch, over: dict[str, Any] = FREE) -> int:
    """Return a budget in KiB that the fastest plan of this run just fits."""
    needs: list[int] = []

    def watched(request: Any) -> Plan:
        found = search(request)
        needs.append(found.need_bytes)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(run, "search", watched)
        tune(settings(model, data, out, **over))
    return -(-needs[0] // KIB)


@pytest.mark.usefixtures("tensors_only")
def test_the_second_plan_sets_aside_what_the_first_took_beyond_itself(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = tight(model, data, tmp_path / "free", monkeypatch)
    excess = 100 * KIB  # the margin does not hold it: it is what must stay free beside the tensors
    plans = fat(monkeypatch, excess)
    out = tmp_path / "run"
    record, told = tune(settings(model, data, out, memory=f"{budget}KiB", **FREE))
    first, second = plans
    assert second.rung.peak_bytes < first.rung.peak_bytes and second.fits
    assert second.corrected_bytes == excess and second.need_bytes <= second.budget_bytes == budget * KIB
    assert record.plan == second
    kept = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    assert kept["corrected_bytes"] == excess and kept["rungs"][0]["peak_bytes"] == second.rung.peak_bytes
    (warning,) = [text for text in warnings(told) if "rehearsal" in text]
    assert "100 KiB of tensors more than planned" in warning and "planned again" in warning
    rehearsed = [row for row in record.phases if row.measured_bytes is not None]
    assert len(rehearsed) == 4, "both rehearsals are in the record, step and evaluation each"


@pytest.mark.usefixtures("tensors_only")
def test_what_stays_under_the_budget_is_left_alone(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = fat(monkeypatch, 1000)
    record, told = tune(settings(model, data, tmp_path / "run", memory="4GiB", **FREE))
    assert len(plans) == 1 and record.plan == plans[0] and record.plan.corrected_bytes == 0
    assert not [text for text in warnings(told) if "rehearsal" in text]
    (ahead,) = [event for event in told if isinstance(event, Ahead)]
    assert dict(ahead.fullest) and [size for _, size in ahead.fullest] == sorted(dict(ahead.fullest).values())[::-1]


@pytest.mark.usefixtures("tensors_only")
def test_tensors_that_fit_no_plan_end_the_run_before_it_trains(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fat(monkeypatch, 1 << 40)
    out = tmp_path / "run"
    with pytest.raises(DoesNotFit, match="does not fit"):
        tune(settings(model, data, out, memory="4GiB", **FREE))
    assert not (out / "adapter").exists()


def test_resident_memory_beyond_any_plan_is_a_warning(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def huge(rehearsal: Rehearsal, plan: Plan, resident: int | None) -> tuple[int, str]:
        assert resident is not None
        seen.append(resident)
        return over_budget(rehearsal, plan, 1 << 50)

    monkeypatch.setattr(run, "over_budget", huge)
    record, told = tune(settings(model, data, tmp_path / "run", memory="4GiB", **FREE))
    assert record.trained.steps == 2 and len(seen) == 1
    (warning,) = [text for text in warnings(told) if "rehearsal" in text]
    assert "resident memory" in warning and "going on" in warning


@pytest.mark.usefixtures("tensors_only")
def test_plans_are_bounded_and_the_adapter_is_that_of_the_last_rung(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments that a rehearsal leaves are wiped, however often it was run."""
    whole = FREE | {"micro_batch": 4}  # one cut: more recompute is the only way, and it changes no bit
    budget = tight(model, data, tmp_path / "free", monkeypatch, whole)
    with monkeypatch.context() as patch:
        plans = fat(patch, 100 * KIB)
        record, _ = tune(settings(model, data, tmp_path / "run", memory=f"{budget}KiB", **whole))
    assert 2 <= len(plans) <= run.MOST_PLANS and plans[0].rung.recompute_blocks == 0 < record.plan.rung.recompute_blocks
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(tmp_path / "free")
