"""A plan as text for a person."""

from __future__ import annotations

from collections.abc import Mapping

from ajusta.report.show import as_plain, show_record


def plan_text(plan: object) -> str:
    """Return every field of the plan, bytes as sizes."""
    plain = as_plain(plan)
    assert isinstance(plain, Mapping), type(plan)
    return "plan\n" + show_record(plain)
