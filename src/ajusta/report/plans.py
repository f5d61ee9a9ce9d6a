"""A plan as text: whether it fits, what was decided and why, where the bytes go, and the ways down from here."""

from __future__ import annotations

from collections.abc import Sequence

from ajusta.base.units import show_bytes, show_time
from ajusta.report.show import as_plain, bar, table
from ajusta.spec.plan import Longest, OnCard, Plan, Rung


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
    if plan.reserved_bytes is not None:
        rows = [("torch's allocator reserves", show_bytes(plan.reserved_bytes))]
        rows += [(name, show_bytes(size)) for name, size in plan.beside]
        blocks.append("on the card, by replay of the allocator\n" + table(rows))
    if plan.runner_up is not None:
        blocks.append("the next best way\n" + table([_rung(plan.runner_up)]))
    if plan.fastest_bytes is not None:
        missing = show_bytes(plan.fastest_bytes - plan.budget_bytes)
        blocks.append(
            f"missing to be the fastest: {missing} (the fastest way of all takes {show_bytes(plan.fastest_bytes)})"
        )
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
        *([f"about {show_time(rung.step_seconds)} a step"] if rung.step_seconds else []),
    )


def cards_text(cards: Sequence[OnCard]) -> str:
    """Return one line a card, the smallest first."""
    rows = []
    for card in cards:
        plan, rung = card.plan, card.plan.rung
        how = (
            f"recompute {rung.recompute_blocks} of {plan.blocks} blocks, {rung.micro_tokens:,} tokens at once"
            if plan.fits
            else f"{show_bytes(plan.need_bytes - plan.budget_bytes)} missing"
        )
        rows.append((card.card, "fits" if plan.fits else "no", show_bytes(plan.need_bytes), plan.dtype, how))
    fit = sum(card.plan.fits for card in cards)
    return f"fits on {fit} of {len(cards)} cards\n" + table(rows)


def cards_facts(cards: Sequence[OnCard]) -> list[dict[str, object]]:
    """Return the same for a program."""
    return [{"card": card.card, **plan_facts(card.plan)} for card in cards]


def longest_text(longest: Longest) -> str:
    """Say how long a text may be, by the memory and by the model."""
    lines = [f"{longest.tokens:,} tokens fit, one example at a time and every block recomputed"]
    if longest.limit is not None and longest.limit < longest.tokens:
        lines.append(
            f"the model itself knows {longest.limit:,} positions: beyond them this is engine capacity, not a length "
            "that the model was made for"
        )
    lines.append(f"at {longest.plan.rung.micro_tokens:,} tokens: {longest.plan.sentence()}")
    return "\n".join(lines)


def longest_facts(longest: Longest) -> dict[str, object]:
    """Return the same for a program; `tokens` is engine capacity where it is above `limit`."""
    return {"tokens": longest.tokens, "limit": longest.limit, "plan": plan_facts(longest.plan)}


def plan_facts(plan: Plan) -> dict[str, object]:
    """Return the plan for a program: its fields, and the sums that follow from them; sizes in bytes."""
    plain = as_plain(plan)
    assert isinstance(plain, dict)
    return {**plain, "peak_bytes": plan.peak_bytes, "fullest_phase": plan.fullest.phase, "sentence": plan.sentence()}
