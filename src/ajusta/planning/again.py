"""Plan again with what the rehearsal measured: where the device takes more than was traced, the excess is set aside."""

from __future__ import annotations

from dataclasses import replace

from ajusta.planning.search import Request, search, ways_out
from ajusta.spec.plan import Plan


def plan_again(request: Request, before: Plan, over_bytes: int) -> Plan:
    """Return the fastest plan that fits if `over_bytes` more are held than any plan says.

    Args:
        request: what was planned for.
        before: the plan that took more; what was already set aside for it stays so.
        over_bytes: what it took beyond its need.
    """
    aside = before.corrected_bytes + over_bytes
    machine = replace(request.machine, budget_bytes=request.machine.budget_bytes - aside)
    found = search(replace(request, machine=machine))
    plan = replace(
        found,
        budget_bytes=request.machine.budget_bytes,
        margin_bytes=found.margin_bytes + aside,
        corrected_bytes=aside,
    )
    return plan if plan.fits else replace(plan, ways_out=ways_out(request, plan))
