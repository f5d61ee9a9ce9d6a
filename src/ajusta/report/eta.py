"""Time left, from the run's events and a clock, and nothing else: every function here is pure.

Steps are not alike (packed rows are longer or shorter), so the training that is left is counted in tokens:

    left = tokens_left * rate + evaluations_left * cost + saves_left * cost + what comes after training

`rate` is the token-weighted median of the recent steps' seconds per token: one step that the system disturbed changes
nothing. Before the first step it is what the rehearsal measured (`Ahead.seconds_per_token`).

What comes after training is what came before it, and it costs what it cost then, less the warm-up of its first
questions. But a tuned model knows where to stop, and its exam may take half the time. So once something of the last
phases is done, what is left of them counts at the pace that they have now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ajusta.base.events import Ahead, Evaluated, Event, Examined, PhaseEnded, PhaseStarted, Progress, StepDone

RECENT_STEPS = 32
TRUSTED_STEPS = 8  # from so many on, the rehearsal no longer counts


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What is known of the run's speed so far. All times in seconds, of one monotonic clock."""

    ahead: Ahead | None = None
    step: int = 0
    total_steps: int = 0
    tokens_left: int = 0
    steps: tuple[tuple[int, float], ...] = ()  # (tokens, seconds), the recent ones
    last_time: float = 0.0  # of the last event
    before: Mapping[str, float] = field(default_factory=dict)  # measured before training: comes again after it
    again: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by kind: what came again, then and now
    heldout_seconds: float = 0.0
    save_seconds: float = 0.0
    phase: str = ""
    phase_started: float = 0.0
    done: int = 0  # of the phase, where it is countable
    total: int = 0
    ticks: tuple[tuple[int, float], ...] = ()  # (done, when), of the phase


def advance(pace: Pace, event: Event, now: float) -> Pace:
    """Return the pace after this event.

    Args:
        pace: what was known.
        event: what happened.
        now: when, in seconds of a monotonic clock.
    """
    pace = replace(pace, last_time=now)
    match event:
        case Ahead():
            made = event.first_step - 1
            return replace(pace, ahead=event, step=made, total_steps=event.total_steps, tokens_left=event.total_tokens)
        case StepDone():
            recent = (*pace.steps, (event.tokens, event.seconds))[-RECENT_STEPS:]
            total, left = event.total_steps, event.tokens_left
            return replace(pace, step=event.step, total_steps=total, tokens_left=left, steps=recent)
        case Evaluated():
            return _measured(pace, f"evaluate:{event.name}", event.when, event.seconds)
        case Examined():
            return _measured(pace, f"exam:{event.exam}", event.when, event.seconds)
        case PhaseStarted():
            return replace(pace, phase=event.phase, phase_started=now, done=0, total=0, ticks=())
        case PhaseEnded():
            saved = event.seconds if event.phase == "save" else pace.save_seconds
            return replace(pace, save_seconds=saved, phase="", done=0, total=0, ticks=())
        case Progress():
            return replace(pace, done=event.done, total=event.total, ticks=(*pace.ticks, (event.done, now)))
    return pace


def _measured(pace: Pace, name: str, when: str, seconds: float) -> Pace:
    """Remember what a measure cost: one before training will come again after it, one after it is paid."""
    warm = seconds - _warm_up(pace)
    # What the phase still takes is another measure's.
    pace = replace(pace, phase_started=pace.last_time, done=0, total=0, ticks=())
    if name == "evaluate:heldout":
        pace = replace(pace, heldout_seconds=seconds)
    if when == "before":
        return replace(pace, before={**pace.before, name: warm})
    if when != "after" or name not in pace.before:
        return pace
    kind, then = _kind(name), pace.before[name]
    earlier, lately = pace.again.get(kind, (0.0, 0.0))
    left = {key: cost for key, cost in pace.before.items() if key != name}
    return replace(pace, before=left, again={**pace.again, kind: (earlier + then, lately + seconds)})


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _warm_up(pace: Pace) -> float:
    """Return by how much the first part of a countable phase was slower than the slowest of all others."""
    starts = ((0, pace.phase_started), *pace.ticks)
    parts = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(starts) if b[0] > a[0]]
    if len(parts) < 2:
        return 0.0
    (count, seconds), *others = parts
    return max(seconds - count * max(took / many for many, took in others), 0.0)


def seconds_per_token(pace: Pace) -> float | None:
    """Return the rate of training: the token-weighted median of recent steps, or the rehearsal's, or None.

    The first step or two can be far off (kernels are compiled, memory is touched for the first time), so the
    rehearsal's rate counts as much as a step until it is outvoted. Not more: it was cold itself, and counted.
    """
    rehearsed = pace.ahead.seconds_per_token if pace.ahead else None
    rates = [(seconds / max(tokens, 1), float(tokens)) for tokens, seconds in pace.steps]
    if rehearsed is not None and len(rates) < TRUSTED_STEPS:
        rates.append((rehearsed, sum(weight for _, weight in rates) / len(rates) if rates else 1.0))
    half = sum(weight for _, weight in rates) / 2
    reached = 0.0
    for rate, weight in sorted(rates):
        reached += weight
        if reached >= half:
            return rate
    return None


def seconds_left(pace: Pace, now: float) -> float | None:
    """Return the seconds until the run is over, or None while nothing is known to tell it from.

    Args:
        pace: what is known.
        now: the time, of the same clock as the events.
    """
    rate = seconds_per_token(pace)
    if rate is None:
        return None
    if pace.steps and not pace.tokens_left:  # training is over: what came before comes again, and has begun
        return _after_training(pace, now)
    training = pace.tokens_left * rate
    after = sum(pace.before.values())
    if not pace.steps and pace.phase == "exam" and pace.done:  # the first exam: it will come again too
        after += _as_a_whole(pace) - _warm_up(pace)
    between = _times_left(pace, "evaluate_every") * pace.heldout_seconds + _times_left(pace, "save_every") * (
        pace.save_seconds
    )
    since = now - pace.last_time if pace.steps else 0.0  # the step that is being made is partly made
    return max(training + between - since, 0.0) + after + _rest_of_phase(pace)


def _after_training(pace: Pace, now: float) -> float:
    """Return the seconds of the measures that come again, the one under way counted by what of it is done."""
    names = [name for name in pace.before if _kind(name) == pace.phase]
    under_way = names[0] if names else None
    again = dict(pace.again)
    if under_way is not None and pace.done:
        then, lately = again.get(pace.phase, (0.0, 0.0))
        again[pace.phase] = (then + pace.before[under_way], lately + _as_a_whole(pace))
    left = 0.0
    for name, cost in pace.before.items():
        then, lately = again.get(_kind(name), (0.0, 0.0))
        expected = cost * lately / then if then > 0 else cost
        if name == under_way and pace.done:
            expected = max(_rest_of_phase(pace) - (now - pace.last_time), 0.0)
        elif name == under_way:
            expected = max(expected - (now - pace.phase_started), 0.0)
        left += expected
    return left if under_way is not None else left + _rest_of_phase(pace)


def _as_a_whole(pace: Pace) -> float:
    """Return the seconds that a countable phase takes in all, from what its part so far took."""
    return (pace.last_time - pace.phase_started) / pace.done * pace.total


def _rest_of_phase(pace: Pace) -> float:
    """Return the seconds that a countable phase still takes, from what its part so far took."""
    if not pace.done or not pace.total:
        return 0.0
    return _as_a_whole(pace) * (1 - pace.done / pace.total)


def _times_left(pace: Pace, setting: str) -> int:
    """Return how many more times something that is done every so many steps will be done."""
    every = int(getattr(pace.ahead, setting)) if pace.ahead else 0
    return pace.total_steps // every - pace.step // every if every else 0
