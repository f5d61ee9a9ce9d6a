"""Loops whose turns all do the same work: on `meta` three turns weigh as much as all of them.

The fullest moment of such a loop lies in its second turn at the latest, when what the first one left behind is still
held; the last turn may be shorter. So a counting place walks the first two turns and the last, and the time of the
second counts for all that are left out. That nothing is lost by it is tested: the same phases traced in full give the
same bytes and the same time (tests/planning/test_depth.py, tests/planning/test_time.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ajusta.memory.ledger import repeated

_in_full: list[bool] = [False]


def turns(starts: Sequence[int], device: torch.device) -> Iterator[int]:
    """Yield the turns to walk: all of them on a device, the first two and the last on `meta`."""
    if device.type != "meta" or len(starts) <= 3 or _in_full[-1]:
        yield from starts
        return
    yield starts[0]
    with repeated(len(starts) - 2):
        yield starts[1]
    yield starts[-1]


@contextlib.contextmanager
def in_full() -> Iterator[None]:
    """Walk every turn inside, on `meta` too: the yardstick for `turns`."""
    _in_full.append(True)
    try:
        yield
    finally:
        _in_full.pop()
