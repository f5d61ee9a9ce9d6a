"""Buffers that an operation holds inside its own C++ code: no output of it, so no ledger sees them.

Each entry belongs to an operation on a kind of device, and gives the bytes out of the call's own shapes, with the
source in its docstring. Read that source again when torch changes it. `UNMEASURED` names the entries that were never
held against an allocator; all others were, by tests/memory/test_workspaces.py and bench/plan_accuracy.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ajusta.memory import workspaces_cpu, workspaces_cuda

Rule = Callable[[tuple[Any, ...], dict[str, Any], Any], int]

RULES: dict[tuple[str, Any], Rule] = {
    **{("cpu", operation): rule for operation, rule in workspaces_cpu.RULES.items()},
    **{("cuda", operation): rule for operation, rule in workspaces_cuda.RULES.items()},
}
UNMEASURED: frozenset[tuple[str, Any]] = frozenset(("cuda", operation) for operation in workspaces_cuda.RULES)


def hidden_bytes(func: Any, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Return the bytes that this call holds inside itself while it runs; None where that is nothing."""
    rule = RULES.get((kind, func))
    return None if rule is None else rule(args, kwargs, result) or None
