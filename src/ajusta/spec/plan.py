"""A plan: how the run will fit, why each choice was made, and what to do if the device disagrees."""

from __future__ import annotations

from dataclasses import dataclass

from ajusta.base.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One thing that was decided, by the person or by the planner, and the reason."""

    name: str
    value: str
    because: str


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The fullest moment of one phase of the run's life, traced; sizes in bytes."""

    phase: str
    peak_bytes: int
    operation: str
    by_category: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way of running the step. Further down the ladder: less memory, more time, the same gradient."""

    recompute_blocks: int  # the first so many blocks keep their input only
    micro_tokens: int  # tokens of a micro-batch at most
    loss_chunk: int  # positions that meet the head at a time
    peak_bytes: int
    step_seconds: float = 0.0  # of the data's heaviest step, by the device's roofline; 0: not told


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What one technique takes off the step's peak, by tracing the same step without it."""

    technique: str
    bytes_without: int
    bytes_with: int


@dataclass(frozen=True, kw_only=True)
class OnCard:
    """The plan of one run for one card."""

    card: str
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Longest:
    """The longest example that fits; `limit` is the number of positions that the model knows (None: no table ends)."""

    tokens: int  # what the engine can take
    limit: int | None
    plan: Plan  # for that length, or for the model's limit where it is shorter


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was decided before the run. `budget_bytes` counts tensors above the process's own baseline."""

    fits: bool
    device: str
    dtype: str
    bits: str
    blocks: int
    budget_bytes: int
    margin_bytes: int  # kept free of tensors: what the allocator reserves beyond them, and what is held beside it
    rungs: tuple[Rung, ...]  # the first is taken; the others are the ways down
    phases: tuple[PhasePeak, ...]
    choices: tuple[Choice, ...]
    savings: tuple[Saving, ...] = ()
    ways_out: tuple[str, ...] = ()  # commands, where nothing fits
    reserved_bytes: int | None = None  # on a card: what torch's allocator takes of it in the step, replayed
    beside: tuple[tuple[str, int], ...] = ()  # on a card: what is held beside the allocator, by name
    runner_up: Rung | None = None  # the next best way that fits as well
    corrected_bytes: int = 0  # of the margin: what the rehearsal was seen to take beyond the plan before this one
    fastest_bytes: int | None = None  # what the fastest way of all would need, where it does not fit

    @property
    def rung(self) -> Rung:
        """The way that will be taken."""
        return self.rungs[0]

    @property
    def peak_bytes(self) -> int:
        """The fullest moment of the whole life."""
        return max(phase.peak_bytes for phase in self.phases)

    @property
    def need_bytes(self) -> int:
        """What the run is expected to hold at most: the peak of its tensors and the margin beside them."""
        return self.peak_bytes + self.margin_bytes

    @property
    def fullest(self) -> PhasePeak:
        """The phase with that moment."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    def sentence(self) -> str:
        """Say in one line whether it fits."""
        need, budget = show_bytes(self.need_bytes), show_bytes(self.budget_bytes)
        fullest = f"fullest in the phase {self.fullest.phase!r}"
        if self.fits:
            return f"fits: {need} of {budget}, {fullest}"
        missing = show_bytes(self.need_bytes - self.budget_bytes)
        return f"does not fit: {need} needed, {budget} given, {missing} missing, {fullest}"
