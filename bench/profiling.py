"""torch's profiler over one step: what the CPU allocator was asked for, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

_MEMORY_EVENT = "[memory]"  # the profiler's own name for an allocation or a release


def allocated_peak(run: Callable[[], object]) -> int:
    """Return the most bytes that torch's CPU allocator held at a time while `run` ran, above what it held before.

    Summed up from the allocator's own events, so operations' inner buffers count, and it does not matter who asked.
    Buffers of MKL and oneDNN do not pass through it, on either side.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        run()
    events = [event for event in taken.profiler.kineto_results.events() if event.name() == _MEMORY_EVENT]
    assert events, "the profiler counted no allocation"
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def operations(run: Callable[[], object], rows: int = 25) -> str:
    """Return the profiler's table of the operations of `run`, the costliest first."""
    with profile(activities=[ProfilerActivity.CPU]) as taken:
        run()
    return taken.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=60)
