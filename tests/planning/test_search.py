"""The plan is the fastest one that fits, found by trying them all; what does not fit comes with ways out."""

from __future__ import annotations

import dataclasses
import re

import pytest
from architectures import stock_model
from planned import GIB, LENGTHS, Real, StoredModel, batches, fullest, request, subject
from tiny_models import numel, tiny_config

from ajusta.base.units import parse_bytes
from ajusta.planning import search as module
from ajusta.planning.search import MARGIN_FIXED, Request, full_fine_tuning_bytes, margin, search
from ajusta.planning.trace import Subject, Traced
from ajusta.spec.data import MicroBatch
from ajusta.spec.plan import PhasePeak, Plan, Rung
from ajusta.spec.roofline import Roofline
from ajusta.spec.speeds import typical_processor


class Remembered(Traced):
    """Traces a rung once in all tests of this file: each search builds its model anew, which is what takes time."""

    def __init__(self, subject: Subject, roofline: Roofline) -> None:
        super().__init__(subject, roofline=roofline)
        self._steps: dict[object, PhasePeak] = {}

    def step(self, micro: tuple[MicroBatch, ...], rung: Rung) -> PhasePeak:
        key = (tuple(each.segment_ends for each in micro), dataclasses.replace(rung, peak_bytes=0))
        if key not in self._steps:
            self._steps[key] = super().step(micro, rung)
        return self._steps[key]

    def evaluate(self, micro: MicroBatch, rung: Rung) -> PhasePeak:
        key = (micro.segment_ends, rung.loss_chunk)
        if key not in self._steps:
            self._steps[key] = super().evaluate(micro, rung)
        return self._steps[key]


SPEEDS = typical_processor(1)
_remembered: dict[object, Remembered] = {}


def remembered(what: Subject, *, record: bool = False, roofline: Roofline = SPEEDS) -> Remembered:
    assert what.adapter is not None
    key = (what.source, what.bits, what.adapter.rank)
    if key not in _remembered:
        _remembered[key] = Remembered(what, roofline)
    return _remembered[key]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Traced", remembered)


@pytest.fixture(scope="module")
def llama() -> Subject:
    return subject(StoredModel(stock_model(tiny_config("llama"))))


@dataclasses.dataclass(frozen=True)
class Tried:
    rung: Rung
    need: int


def by_brute_force(what: Subject, chunk: int, sizes: list[int]) -> list[Tried]:
    """Trace every number of recomputed blocks at every micro-batch size."""
    traced, tried = remembered(what), []
    for tokens in sizes:
        for recompute in range(traced.blocks + 1):
            rung = Rung(recompute_blocks=recompute, micro_tokens=tokens, loss_chunk=chunk, peak_bytes=0)
            step = traced.step((fullest(tokens),), rung).peak_bytes
            peak = max(step, traced.evaluate(fullest(tokens), rung).peak_bytes)
            whole = max(peak, traced.load.peak_bytes)
            seconds = traced.step_seconds(batches(tokens), rung)
            told = dataclasses.replace(rung, peak_bytes=peak, step_seconds=seconds)
            tried.append(Tried(told, whole + margin(whole, "cpu")))
    return tried


def sizes() -> list[int]:
    total, longest = sum(LENGTHS), max(LENGTHS)
    return [*(total >> n for n in range(4) if total >> n > longest), longest]


@pytest.fixture(scope="module")
def everything(llama: Subject) -> list[Tried]:
    chunk = search(request(llama, GIB)).rung.loss_chunk
    return by_brute_force(llama, chunk, sizes())


def test_the_fastest_fitting_plan_is_taken_for_any_budget(llama: Subject, everything: list[Tried]) -> None:
    times = []
    needs = sorted({tried.need for tried in everything})
    for budget in [GIB, *(n + d for n in needs[::-2] for d in (0, -1)), needs[0] - 1]:
        plan = search(request(llama, budget))
        fitting = [tried for tried in everything if tried.need <= budget]
        assert plan.fits == bool(fitting)
        if not fitting:
            assert plan.rung.peak_bytes == min(tried.rung.peak_bytes for tried in everything)
            continue
        (taken,) = (tried for tried in everything if tried.rung == plan.rung)
        assert taken.rung.step_seconds == min(tried.rung.step_seconds for tried in fitting), budget
        assert plan.peak_bytes + plan.margin_bytes == taken.need <= budget
        times.append((budget, taken.rung.step_seconds))
    in_order = [seconds for _, seconds in sorted(times)]
    assert in_order == sorted(in_order, reverse=True)  # less memory never gives a faster plan
    assert len(set(in_order)) > 4  # and the budgets made a difference


def test_more_recompute_and_smaller_micro_batches_never_take_more(everything: list[Tried]) -> None:
    """What the search by halves stands on."""
    for one in everything:
        for other in everything:
            if (
                one.rung.recompute_blocks <= other.rung.recompute_blocks
                and one.rung.micro_tokens >= other.rung.micro_tokens
            ):
                assert one.rung.peak_bytes >= other.rung.peak_bytes


def test_the_ladder_goes_down(llama: Subject, everything: list[Tried]) -> None:
    plan = search(request(llama, GIB))
    peaks = [rung.peak_bytes for rung in plan.rungs]
    assert len(peaks) >= 3 and peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == min(tried.rung.peak_bytes for tried in everything)  # the last one is as small as can be
    assert set(plan.rungs) <= {tried.rung for tried in everything}
    fixed = search(request(llama, GIB, recompute="none"))
    assert fixed.rungs[-1].micro_tokens == max(LENGTHS)  # the person's wish leaves the cut


def test_with_plenty_nothing_is_recomputed_and_the_step_is_whole(llama: Subject) -> None:
    plan = search(request(llama, GIB))
    assert plan.fits and plan.rung.recompute_blocks == 0 and plan.rung.micro_tokens == sum(LENGTHS)
    assert plan.ways_out == () and plan.sentence().startswith("fits:")
    because = {choice.name: choice.because for choice in plan.choices}
    assert because["micro_batch"] == "a whole step at once" and "fastest" in because["gradient_checkpointing"]


@pytest.mark.parametrize(("wish", "blocks"), [("none", 0), ("full", 4), (0, 0), (1, 1), (3, 3), (99, 4)])
def test_a_persons_own_recompute_is_kept(llama: Subject, wish: str | int, blocks: int) -> None:
    plan = search(request(llama, GIB, recompute=wish))
    assert {rung.recompute_blocks for rung in plan.rungs} == {blocks}
    assert next(c for c in plan.choices if c.name == "gradient_checkpointing").because == "you asked for it"


def test_a_persons_own_micro_batch_is_kept_but_holds_the_longest_example(llama: Subject) -> None:
    for wish, taken in [(60, 60), (1000, 1000), (1, max(LENGTHS))]:
        plan = search(request(llama, GIB, micro_tokens=wish))
        assert {rung.micro_tokens for rung in plan.rungs} == {taken}
        assert next(c for c in plan.choices if c.name == "micro_batch").because == "you asked for it"


def test_the_smallest_micro_batch_is_tried_however_large_the_step(llama: Subject) -> None:
    """64 examples of 10 tokens: four halvings of the step are still 40 tokens, four examples."""
    lengths = [10] * 64
    least = search(request(llama, 0, lengths=lengths, micro_tokens=10, recompute="full"))
    plan = search(request(llama, least.peak_bytes + least.margin_bytes, lengths=lengths))
    assert plan.fits and plan.rung.micro_tokens == 10


@pytest.mark.parametrize("bits", ["none", "int8", "nf4"])
def test_what_does_not_fit_says_so_and_offers_three_ways_out(llama: Subject, bits: str) -> None:
    what = dataclasses.replace(llama, bits=bits, adapter=dataclasses.replace(llama.adapter, rank=8))  # type: ignore[type-var]
    plan = search(request(what, MARGIN_FIXED))
    assert not plan.fits and len(plan.ways_out) == 3
    assert plan.sentence().startswith("does not fit:") and "missing" in plan.sentence()
    assert plan.ways_out[1].startswith("--bits nf4") == (bits != "nf4")
    assert f"max_length={max(8, max(LENGTHS) // 2)}" in "".join(plan.ways_out)
    given = re.match(r"--memory (\S+)", plan.ways_out[0])
    assert given is not None
    assert search(request(what, parse_bytes(given[1]))).fits  # the first way out is true
    assert not search(request(what, parse_bytes(given[1]) - (2 << 20))).fits  # and asks for no more than it must


def test_the_peak_of_the_whole_life_counts(llama: Subject) -> None:
    plan = search(request(llama, GIB))
    assert [phase.phase for phase in plan.phases] == ["load", "optimizer", "train", "evaluate"]
    assert plan.peak_bytes == max(phase.peak_bytes for phase in plan.phases) == plan.fullest.peak_bytes
    assert plan.rung.peak_bytes == max(phase.peak_bytes for phase in plan.phases[1:])
    assert all(sum(phase.by_category.values()) == phase.peak_bytes for phase in plan.phases)


@pytest.mark.parametrize(("kind", "bits"), [("llama", "nf4"), ("gpt2", "none"), ("bloom", "int8")])
def test_rungs_of_the_ladder_weigh_what_they_say(kind: str, bits: str) -> None:
    what = subject(StoredModel(stock_model(tiny_config(kind))), bits)
    plan, real = search(request(what, 34 << 20)), Real(what)
    for rung in plan.rungs[:: max(1, len(plan.rungs) // 3)]:
        step = real.step((fullest(rung.micro_tokens),), rung).live_bytes
        evaluation = real.evaluate(fullest(rung.micro_tokens), rung).live_bytes
        assert max(step, evaluation) == rung.peak_bytes, rung


@pytest.mark.parametrize(("kind", "bits"), [("llama", "none"), ("llama", "nf4"), ("gpt2", "int8")])
def test_savings_are_the_same_step_without_each_technique(kind: str, bits: str) -> None:
    stock = stock_model(tiny_config(kind))
    what = subject(StoredModel(stock), bits)
    asked = request(what, GIB, recompute=2, with_savings=True)
    plan = search(asked)
    saved = {saving.technique: saving for saving in plan.savings}
    assert list(saved) == ["gradient checkpointing", "LoRA", *(["quantization"] if bits != "none" else [])]
    assert all(saving.bytes_with == plan.rung.peak_bytes for saving in plan.savings)
    kept = search(dataclasses.replace(asked, recompute="none", with_savings=False))
    assert saved["gradient checkpointing"].bytes_without == step_of(kept)
    # Full fine-tuning: a gradient and two moments in fp32 for every weight instead of those of the adapters.
    adapters = remembered(what).adapter_parameters
    assert saved["LoRA"].bytes_without - plan.rung.peak_bytes == 12 * (numel(stock) - adapters)
    if bits != "none":
        plain = search(dataclasses.replace(asked, subject=dataclasses.replace(what, bits="none"), with_savings=False))
        assert saved["quantization"].bytes_without == step_of(plain) > step_of(plan)


def step_of(plan: Plan) -> int:
    return next(phase.peak_bytes for phase in plan.phases if phase.phase == "train")


def test_full_fine_tuning_counts_each_weight_once(llama: Subject) -> None:
    stock = stock_model(tiny_config("llama"))
    for bits in ("none", "int8", "nf4"):
        traced = remembered(dataclasses.replace(llama, bits=bits))
        assert full_fine_tuning_bytes(traced) == 12 * (numel(stock) - traced.adapter_parameters)


def test_the_margin_grows_with_the_peak() -> None:
    assert margin(0, "cpu") == MARGIN_FIXED
    assert margin(100 * GIB, "cuda") == MARGIN_FIXED + 3 * GIB


def test_a_request_is_a_noun(llama: Subject) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        request(llama, GIB).longest = 1  # type: ignore[misc]
    assert isinstance(request(llama, GIB), Request)
