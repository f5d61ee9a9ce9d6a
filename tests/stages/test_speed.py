"""What is measured of a device is complete and finite, and the amounts are what a ledger counts. Nothing is timed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from ajusta.memory.ledger import Ledger
from ajusta.spec.roofline import SHORT_SIDE, Roofline
from ajusta.stages import doctor as doctor_module
from ajusta.stages import speed
from ajusta.stages.known import Known, recall

CPU = torch.device("cpu")


def counting(**more: float) -> Roofline:
    figures = {"bandwidth_bytes_per_s": 1e30, "per_operation_s": 0.0, **more}
    rate = figures.pop("matmul_flops", 1e30)
    return Roofline(matmul_flops={"fp32": rate}, source="counts", measured=False, **figures)  # type: ignore[arg-type]


def test_a_measurement_is_complete() -> None:
    roofline = speed.measure_roofline(CPU, 0.02)
    for rates in (
        roofline.matmul_flops, roofline.thin_flops, roofline.few_flops, roofline.attention_flops, roofline.short_flops
    ):  # fmt: skip
        assert set(rates) == {"fp32", "bf16"} and all(0 < rate < math.inf for rate in rates.values())
    assert set(roofline.kernels) == {f"{kind} {dtype}" for kind in ("nf4", "int8") for dtype in ("fp32", "bf16")}
    assert all(kernel.call_s > 0 and kernel.numbers_per_s > 0 for kernel in roofline.kernels.values())
    assert 0 < roofline.per_operation_s < 1 and roofline.narrow_bytes_per_s > 0
    assert roofline.measured and torch.__version__ in roofline.source


@pytest.mark.parametrize(
    ("make", "roofline"),
    [
        (lambda: speed._product(torch.float32, CPU, speed.TOKENS, 64), counting(matmul_flops=1.0)),
        (lambda: speed._product(torch.float32, CPU, SHORT_SIDE, 64), counting(matmul_flops=1.0)),
        (lambda: speed._attention(torch.float32, CPU, 96), counting(matmul_flops=1.0)),
        (lambda: speed._stream(torch.float32, CPU), counting(bandwidth_bytes_per_s=1.0)),
    ],
)
def test_a_probe_does_the_amount_that_it_says(make: Callable[[], speed._Probe], roofline: Roofline) -> None:
    probe = make()
    with Ledger(roofline=roofline) as ledger:
        probe.run()
    assert ledger.seconds == pytest.approx(probe.amount, rel=0.02)  # the means of rows are left out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_takes_what_the_work_of_a_step_leaves_over(dtype: torch.dtype) -> None:
    run = speed._small_step(dtype, CPU)
    known = Roofline(
        matmul_flops={"fp32": 1e9}, bandwidth_bytes_per_s=1e9, per_operation_s=0.0, source="made up", measured=False
    )
    work = speed._seconds_by(known, run, CPU)
    assert work == speed._seconds_by(known, run, CPU) > 0
    calls = speed._seconds_by(counting(per_operation_s=1.0), run, CPU)
    assert 500 < calls < 1500 and calls == pytest.approx(round(calls))
    told = speed._call_seconds(known, run, work + calls * 2e-5, CPU)
    assert told == pytest.approx(2e-5)
    assert 0 < speed._call_seconds(known, run, work / 2, CPU) < 1e-10  # a disturbed measurement


def test_every_probe_has_its_turn_in_every_round_and_the_best_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    taken = iter(range(100, 0, -1))

    def fastest(run: Callable[[], object], device: torch.device, seconds: float) -> float:
        run()
        assert seconds == pytest.approx(2.0 / speed.ROUNDS / 2)
        return next(taken)

    monkeypatch.setattr(speed, "_fastest", fastest)
    probes = {name: speed._Probe(run=lambda name=name: turns.append(name), amount=1.0) for name in "ab"}
    best = speed._best_seconds(probes, CPU, 2.0)
    assert turns == ["a", "b"] * speed.ROUNDS
    assert best == {"a": 100 - 2 * (speed.ROUNDS - 1), "b": 99 - 2 * (speed.ROUNDS - 1)}


def test_doctor_measures_only_when_asked_and_keeps_what_it_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor_module, "matmul_rate", lambda *_: 1e11)
    monkeypatch.setattr(doctor_module, "choose_dtype", lambda *_: ("fp32", "so told"))
    asked: list[torch.device] = []
    quick = speed.measure_roofline(CPU, 0.02)

    def measure(device: torch.device) -> Roofline:
        asked.append(device)
        return quick

    monkeypatch.setattr(doctor_module, "measure_roofline", measure)
    by_name = {finding.name: finding for finding in doctor_module.look_around()}
    assert not asked and "ajusta doctor --measure" in by_name["speed for plans"].value
    by_name = {finding.name: finding for finding in doctor_module.look_around(measure=True)}
    assert len(asked) == 1 and "devices.json" in by_name["speed for plans"].value
    assert {"products", "attention", "bandwidth", "each operation", "expanding weights"} <= set(by_name)
    _, found = doctor_module.find_device("auto")
    kept = recall(found, pytest.fail)
    assert kept is not None and kept == Known(roofline=quick)
    assert dataclasses.asdict(kept.roofline) == dataclasses.asdict(quick)
    by_name = {finding.name: finding for finding in doctor_module.look_around()}
    assert by_name["speed for plans"].value == quick.source and by_name["speed for plans"].problem is None


def test_doctor_says_where_its_figures_cannot_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    monkeypatch.setattr(doctor_module, "measure_roofline", lambda device: speed.measure_roofline(device, 0.02))
    device, found = doctor_module.find_device("cpu")
    finding = doctor_module._measured(device, found)[-1]
    assert finding.problem is not None and finding.cure is not None and "XDG_CACHE_HOME" in finding.cure
