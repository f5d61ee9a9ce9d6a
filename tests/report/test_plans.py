from __future__ import annotations

import dataclasses

from ajusta.report.plans import plan_facts, plan_text
from ajusta.spec.plan import Choice, PhasePeak, Plan, Rung, Saving

MIB = 1 << 20


def make(**changes: object) -> Plan:
    rungs = tuple(
        Rung(recompute_blocks=blocks, micro_tokens=512, loss_chunk=128, peak_bytes=peak * MIB)
        for blocks, peak in ((10, 800), (30, 600))
    )
    step = PhasePeak(
        phase="step", peak_bytes=800 * MIB, operation="mm", by_category={"saved": 300 * MIB, "weights": 500 * MIB}
    )
    plan = Plan(
        fits=True,
        device="cpu",
        dtype="fp32",
        bits="nf4",
        blocks=30,
        budget_bytes=1024 * MIB,
        margin_bytes=64 * MIB,
        rungs=rungs,
        phases=(PhasePeak(phase="load", peak_bytes=500 * MIB, operation="copy", by_category={}), step),
        choices=(Choice(name="dtype", value="fp32", because="bf16 is slower here"),),
        savings=(Saving(technique="nf4", bytes_without=900 * MIB, bytes_with=800 * MIB),),
    )
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def test_a_plan_says_why_where_and_what_then() -> None:
    text = plan_text(make(), unicode=False)
    assert text.isascii()
    assert text.startswith("fits: 864 MiB of 1.00 GiB")
    assert "dtype  fp32  because bf16 is slower here" in text
    assert "the fullest moment: step, at mm\n  |######################################" in text
    assert "nf4  100 MiB  (900 MiB -> 800 MiB)" in text
    assert "600 MiB  recompute 30 blocks  512 tokens at once" in text
    assert "ways out" not in text


def test_a_plan_that_does_not_fit_names_the_ways_out() -> None:
    text = plan_text(make(fits=False, ways_out=("ajusta plan --bits nf4",)))
    assert text.startswith("does not fit")
    assert text.endswith("ways out\n  ajusta plan --bits nf4")


def test_a_plan_for_a_program_holds_the_sums_too() -> None:
    facts = plan_facts(make())
    assert (facts["peak_bytes"], facts["fullest_phase"], facts["bits"]) == (800 * MIB, "step", "nf4")
