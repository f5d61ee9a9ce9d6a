"""What else a person asks of the planner: on which cards, up to which length. Each answer is a plan that was traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ajusta.planning.search import Request, search
from ajusta.planning.trace import Traced
from ajusta.spec.device import Machine
from ajusta.spec.plan import Longest, OnCard, Plan

STEP = 64  # tokens: lengths are asked for in multiples of it
MOST_TOKENS = 1 << 22


def on_cards(request_for: Callable[[Machine], Request], machines: Iterable[Machine]) -> tuple[OnCard, ...]:
    """Return the plan for each machine; a model is traced once for each dtype, not for each card.

    So the times in these plans are those of the first card with that dtype. They order the ways of one plan, and a
    card's ways come out in the same order on another.
    """
    traced: dict[str, Traced] = {}
    found = []
    for machine in machines:
        request = request_for(machine)
        if machine.dtype not in traced:
            traced[machine.dtype] = Traced(request.subject, record=True, roofline=machine.roofline)
        found.append(OnCard(card=machine.device.name, plan=search(request, traced[machine.dtype])))
    return tuple(found)


def longest_text(request_at: Callable[[int], Request], limit: int | None) -> Longest | None:
    """Return the longest example that can be trained on, one at a time and with every exact lever pulled.

    Args:
        request_at: the request for one example of so many tokens.
        limit: positions that the model knows; longer texts are within the engine's reach, not within the model's.
    """
    first = request_at(STEP)
    traced = Traced(first.subject, record=first.machine.device.kind == "cuda", roofline=first.machine.roofline)

    def plan_at(units: int) -> Plan:
        request = request_at(units * STEP)
        return search(replace(request, recompute="full", micro_tokens=request.longest), traced)

    fits, too_long = 0, 1
    while plan_at(too_long).fits:
        fits, too_long = too_long, 2 * too_long
        if fits * STEP >= MOST_TOKENS:
            break
    while too_long - fits > max(1, fits // 64):
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if plan_at(middle).fits else (fits, middle)
    if fits == 0:
        return None
    tokens = fits * STEP
    return Longest(tokens=tokens, limit=limit, plan=plan_at(max(1, min(tokens, limit or tokens) // STEP)))


def largest_that_fits(plan_for: Callable[[str], Plan], names: Sequence[str]) -> tuple[str, Plan] | None:
    """Return the largest of models, given from the smallest to the largest, that fits, by halving the list."""
    low, high, best = 0, len(names) - 1, None
    while low <= high:
        middle = (low + high) // 2
        plan = plan_for(names[middle])
        if plan.fits:
            best, low = (names[middle], plan), middle + 1
        else:
            high = middle - 1
    return best
