"""A plan as text: whether it fits, what was decided and why, where the bytes go, and the ways down from here."""

from __future__ import annotations

from ajusta.base.units import show_bytes
from ajusta.report.show import as_plain, bar, table
from ajusta.spec.plan import Plan, Rung


def plan_text(plan: Plan, *, unicode: bool = True) -> str:
    """Return the plan for a person.

    Args:
        plan: the plan.
        unicode: whether block characters can be shown.
    """
    blocks = [plan.sentence()]
    if plan.choices:
        blocks.append("decided\n" + table([(it.name, it.value, f"because {it.because}") for it in plan.choices]))
    parts = sorted(plan.fullest.by_category.items(), key=lambda part: -part[1])
    if parts:
        title = f"the fullest moment: {plan.fullest.phase}, at {plan.fullest.operation}"
        blocks.append(f"{title}\n" + bar(parts, unicode=unicode))
    blocks.append("peak of each phase\n" + table([(it.phase, show_bytes(it.peak_bytes)) for it in plan.phases]))
    if plan.savings:
        blocks.append("what each technique saves\n" + table(_savings(plan)))
    if len(plan.rungs) > 1:
        blocks.append("if the device disagrees, in this order\n" + table(_rung(rung) for rung in plan.rungs[1:]))
    if plan.ways_out:
        blocks.append("ways out\n" + table([(way,) for way in plan.ways_out]))
    return "\n\n".join(blocks)


def _savings(plan: Plan) -> list[tuple[str, ...]]:
    """Return a row a technique: what it takes off, from what to what."""
    return [
        (
            saving.technique,
            show_bytes(saving.bytes_without - saving.bytes_with),
            f"({show_bytes(saving.bytes_without)} -> {show_bytes(saving.bytes_with)})",
        )
        for saving in plan.savings
    ]


def _rung(rung: Rung) -> tuple[str, ...]:
    """Return a row about one way down."""
    return (
        show_bytes(rung.peak_bytes),
        f"recompute {rung.recompute_blocks} blocks",
        f"{rung.micro_tokens:,} tokens at once",
        f"loss over {rung.loss_chunk:,} positions at a time",
    )


def plan_facts(plan: Plan) -> dict[str, object]:
    """Return the plan for a program: its fields, and the sums that follow from them; sizes in bytes."""
    plain = as_plain(plan)
    assert isinstance(plain, dict)
    return {**plain, "peak_bytes": plan.peak_bytes, "fullest_phase": plan.fullest.phase, "sentence": plan.sentence()}
