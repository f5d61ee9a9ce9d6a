"""Find the fastest exact plan that fits, and the ladder of rungs below it.

Two levers move the step's peak and leave the gradient as it is: how many blocks recompute, and how many tokens pass
through the model at a time. Each candidate is traced, not estimated: its bytes, and its time on the device's roofline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ajusta.base.units import MIB, show_bytes, show_time
from ajusta.engine.weights import with_storages
from ajusta.memory.heap import KERNEL_BYTES, KERNELS_KEPT
from ajusta.planning.reserved import Reserved
from ajusta.planning.trace import Subject, Traced
from ajusta.spec.data import MicroBatch
from ajusta.spec.device import Machine
from ajusta.spec.plan import Choice, PhasePeak, Plan, Rung, Saving

LOSS_BYTES = 32 * MIB  # what a chunk of logits may take: enough rows for a fast product, small beside a block
# Kept free beside the tensors: libraries' own buffers, and what the allocator cannot give back. glibc's heap was seen
# to hold up to 0.24 of the peak in freed blocks (LAB.md); on a card it is rounding.
MARGIN_FIXED, MARGIN_SHARE = 48 * MIB, {"cpu": 0.25, "cuda": 0.03}

Batches = Callable[[int], tuple[MicroBatch, ...]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan for.

    `batches(tokens)` cuts the data's own heaviest step into micro-batches of at most `tokens`; `fullest(tokens)` and
    `measured(tokens)` are the fullest micro-batch that is trained on and that is only measured, at that size.
    """

    subject: Subject
    batches: Batches
    fullest: Callable[[int], MicroBatch]
    measured: Callable[[int], MicroBatch]
    exam_tokens: int = 0  # of the longest exam question with its answer; 0 without an exam
    step_tokens: int  # of the fullest step
    longest: int  # tokens of the longest example: no micro-batch can be shorter
    machine: Machine
    recompute: str | int  # auto | none | full | blocks
    micro_tokens: int | None  # fixed by the person
    with_savings: bool = False


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    rung: Rung
    step: PhasePeak
    others: tuple[PhasePeak, ...]  # evaluation, exam

    @property
    def seconds(self) -> float:
        return self.rung.step_seconds


def search(request: Request, traced: Traced | None = None) -> Plan:
    """Return the fastest plan within the budget; if none fits, the smallest one, marked so, with the ways out.

    `traced` is this request's subject, where it was traced before: for another budget nothing is traced twice.
    """
    kind = request.machine.device.kind
    traced = traced or Traced(request.subject, record=kind == "cuda", roofline=request.machine.roofline)
    candidates = _candidates(request, traced)
    by_time = sorted(candidates, key=lambda c: (c.seconds, -c.rung.micro_tokens))
    fitting = [c for c in by_time if _need(c.rung.peak_bytes, traced, kind) <= request.machine.budget_bytes]
    taken, fits = None, False
    for taken in fitting:
        if fits := kind != "cuda" or _reserve(request, traced, taken).need_bytes <= request.machine.budget_bytes:
            break
    taken = taken if taken is not None and fits else min(candidates, key=lambda c: c.rung.peak_bytes)
    below = {c.rung for c in candidates if c.rung.peak_bytes < taken.rung.peak_bytes}
    others = [c.rung for c in fitting if c.rung != taken.rung]
    fastest = _need(by_time[0].rung.peak_bytes, traced, kind)
    peak = max(taken.rung.peak_bytes, traced.before_bytes)
    plan = Plan(
        fits=fits,
        device=request.machine.device.name,
        dtype=request.machine.dtype,
        bits=request.subject.bits,
        blocks=traced.blocks,
        budget_bytes=request.machine.budget_bytes,
        margin_bytes=margin(peak, kind, request.machine.dtype),
        rungs=(taken.rung, *sorted(below, key=lambda rung: -rung.peak_bytes)),
        phases=(traced.load, traced.prepare, taken.step, *taken.others),
        choices=_choices(request, taken, candidates, fitting, traced),
        runner_up=others[0] if fits and others else None,
        fastest_bytes=fastest if fits and fastest > request.machine.budget_bytes else None,
    )
    if kind == "cuda":
        plan = _on_a_card(plan, _reserve(request, traced, taken))
    if request.with_savings:
        plan = replace(plan, savings=_savings(request, taken, traced))
    return plan if plan.fits else replace(plan, ways_out=ways_out(request, plan))


def _candidates(request: Request, traced: Traced) -> list[_Candidate]:
    """Trace micro-batch sizes from the largest down until a smaller one cannot be faster."""
    tracer = _Tracer(request, traced)
    candidates: list[_Candidate] = []
    sizes = _micro_sizes(request)
    for tokens in sizes:
        needs = [(_need(c.rung.peak_bytes, traced, tracer.kind), c) for c in candidates]
        fitting = [c for need, c in needs if need <= request.machine.budget_bytes]
        if fitting and tracer.most(tokens).seconds >= min(c.seconds for c in fitting):
            # Even with the least recomputed this cut is no faster, nor is a smaller one. The last rung stays.
            candidates.append(tracer.least(sizes[-1]))
            break
        candidates += tracer.candidates(tokens)
    return candidates


def _reserve(request: Request, traced: Traced, candidate: _Candidate) -> Reserved:
    fullest = request.fullest(candidate.rung.micro_tokens)
    return traced.reserve((fullest,), candidate.rung, request.machine.device.compute_capability)


def _on_a_card(plan: Plan, reserved: Reserved) -> Plan:
    """Put what the allocator's replay found in the place of the margin that was guessed."""
    over = reserved.need_bytes - next(phase.peak_bytes for phase in plan.phases if phase.phase == "train")
    return replace(plan, margin_bytes=over, reserved_bytes=reserved.reserved_bytes, beside=reserved.beside)


def margin(peak_bytes: int, kind: str, dtype: str = "fp32") -> int:
    """Return what is kept free beside a peak of tensors; in bf16 a processor also keeps oneDNN's compiled kernels."""
    kernels = KERNELS_KEPT * KERNEL_BYTES if (kind, dtype) == ("cpu", "bf16") else 0
    return MARGIN_FIXED + kernels + int(peak_bytes * MARGIN_SHARE[kind])


def _need(peak_bytes: int, traced: Traced, kind: str) -> int:
    peak = max(peak_bytes, traced.before_bytes)
    dtype = "bf16" if traced.subject.dtype == torch.bfloat16 else "fp32"
    return peak + margin(peak, kind, dtype)


class _Tracer:
    """Traces rungs of one request; what was traced is not traced again."""

    def __init__(self, request: Request, traced: Traced) -> None:
        self.request, self.traced, self.kind = request, traced, request.machine.device.kind
        self._measured: dict[int, tuple[PhasePeak, ...]] = {}
        self.chunk = loss_chunk(request.subject.config.get_text_config().vocab_size)

    def candidates(self, micro_tokens: int) -> list[_Candidate]:
        """Trace one micro-batch size: no block recomputed, all, and where that helps the fewest that fit."""
        if self.request.recompute != "auto":
            return [self.least(micro_tokens)]
        most, least = self.most(micro_tokens), self.least(micro_tokens)
        found = [most, least]
        budget = self.request.machine.budget_bytes
        needs = [_need(c.rung.peak_bytes, self.traced, self.kind) for c in (most, least)]
        if needs[0] > budget >= needs[1]:
            found += self._between(most, least, micro_tokens)
        return found

    def most(self, micro_tokens: int) -> _Candidate:
        """Trace one micro-batch size with as few blocks recomputed as may be: the most bytes, the least time."""
        return self._trace(0, micro_tokens) if self.request.recompute == "auto" else self.least(micro_tokens)

    def least(self, micro_tokens: int) -> _Candidate:
        """Trace one micro-batch size with every block recomputed, or as many as the person wants."""
        blocks, wish = self.traced.blocks, self.request.recompute
        count = {"none": 0, "full": blocks, "auto": blocks}.get(str(wish), int(wish) if isinstance(wish, int) else 0)
        return self._trace(min(count, blocks), micro_tokens)

    def _between(self, most: _Candidate, least: _Candidate, micro_tokens: int) -> list[_Candidate]:
        """Find the fewest recomputed blocks that fit. The peak falls nearly evenly with their number: guess by that."""
        low, high = most, least  # low does not fit, high does
        found: list[_Candidate] = []
        while high.rung.recompute_blocks - low.rung.recompute_blocks > 1:
            middle = self._trace(self._guess(low.rung, high.rung), micro_tokens)
            if _need(middle.rung.peak_bytes, self.traced, self.kind) <= self.request.machine.budget_bytes:
                high = middle
                found.append(middle)
            else:
                low = middle
        return found

    def _guess(self, low: Rung, high: Rung) -> int:
        """Return the number of blocks, strictly between, at which a straight line meets the budget."""
        span = high.recompute_blocks - low.recompute_blocks
        over = _need(low.peak_bytes, self.traced, self.kind) - self.request.machine.budget_bytes
        fall = _need(low.peak_bytes, self.traced, self.kind) - _need(high.peak_bytes, self.traced, self.kind)
        steps = -(-span * over // max(fall, 1))
        return low.recompute_blocks + min(max(steps, 1), span - 1)

    def _trace(self, recompute: int, micro_tokens: int) -> _Candidate:
        fullest = self.request.fullest(micro_tokens)
        rung = Rung(recompute_blocks=recompute, micro_tokens=micro_tokens, loss_chunk=self.chunk, peak_bytes=0)
        step = self.traced.step((fullest,), rung)
        others = self._others(rung)
        seconds = self.traced.step_seconds(self.request.batches(micro_tokens), rung)
        peak = max(phase.peak_bytes for phase in (step, *others))
        return _Candidate(rung=replace(rung, peak_bytes=peak, step_seconds=seconds), step=step, others=others)

    def _others(self, rung: Rung) -> tuple[PhasePeak, ...]:
        """Trace evaluation and exam once a micro-batch size: no policy changes them."""
        tokens, exam = rung.micro_tokens, self.request.exam_tokens
        if tokens not in self._measured:
            phases = [self.traced.evaluate(self.request.measured(tokens), rung)]
            if exam:
                phases.append(self.traced.answer(max(1, tokens // exam), exam))
            self._measured[tokens] = tuple(phases)
        return self._measured[tokens]


def loss_chunk(vocabulary: int) -> int:
    """Return how many positions meet the head at a time: their logits and gradient, fp32, stay under LOSS_BYTES."""
    return max(16, LOSS_BYTES // (2 * 4 * vocabulary))


def _micro_sizes(request: Request) -> list[int]:
    """Candidate sizes: the whole step at once, some halves of it, and the longest example: no cut is smaller."""
    if request.micro_tokens is not None:
        return [max(request.micro_tokens, request.longest)]
    halves = [request.step_tokens >> times for times in range(4)]
    return [*(size for size in halves if size > request.longest), request.longest]


def _choices(
    request: Request, taken: _Candidate, candidates: list[_Candidate], fitting: list[_Candidate], traced: Traced
) -> tuple[Choice, ...]:
    rung, blocks = taken.rung, traced.blocks
    keep = [c for c in candidates if c.rung.recompute_blocks == 0 and c.rung.micro_tokens == rung.micro_tokens]
    without = show_bytes(keep[0].rung.peak_bytes) if keep else "more"
    if request.recompute != "auto":
        why = "you asked for it"
    elif rung.recompute_blocks == 0:
        why = "keeping every block's activations fits, and is the fastest"
    else:
        why = f"keeping all would take {without}; these are the fewest that fit"
    if request.micro_tokens is not None:
        cut = "you asked for it"
    elif rung.micro_tokens >= request.step_tokens:
        cut = "a whole step at once"
    elif any(c.rung.micro_tokens > rung.micro_tokens for c in fitting):
        cut = "the next larger cut fits too, and would be slower; the gradient is the same"
    else:
        cut = "a step is cut so that it fits; the gradient is the same"
    timed = () if traced.roofline is None else (_time(rung, traced.roofline.source),)
    return (
        Choice(name="memory", value=show_bytes(request.machine.budget_bytes), because=request.machine.budget_because),
        Choice(name="dtype", value=request.machine.dtype, because=request.machine.dtype_because),
        Choice(name="bits", value=request.subject.bits, because=_why_bits(request)),
        Choice(name="gradient_checkpointing", value=f"{rung.recompute_blocks} of {blocks} blocks", because=why),
        Choice(
            name="micro_batch",
            value=f"{rung.micro_tokens} tokens",
            because=cut,
        ),
        Choice(
            name="loss chunk",
            value=f"{rung.loss_chunk} positions",
            because=f"logits of one chunk stay under {show_bytes(LOSS_BYTES)}",
        ),
        *timed,
    )


def _why_bits(request: Request) -> str:
    if with_storages(request.subject.source) is not None:
        return "its weights are stored so"
    return "as set; a plan never changes what is learned"


def _time(rung: Rung, source: str) -> Choice:
    because = f"of the traced work and the {source}"
    return Choice(name="time of a step", value=f"about {show_time(rung.step_seconds)}", because=because)


def _savings(request: Request, taken: _Candidate, traced: Traced) -> tuple[Saving, ...]:
    """Trace the taken step again with each technique left out, the others as they are."""
    rung, peak = taken.rung, taken.rung.peak_bytes
    fullest = request.fullest(rung.micro_tokens)
    savings = []
    kept = traced.step((fullest,), replace(rung, recompute_blocks=0)).peak_bytes
    savings.append(Saving(technique="gradient checkpointing", bytes_without=kept, bytes_with=peak))
    full = full_fine_tuning_bytes(traced) + peak
    savings.append(Saving(technique="LoRA", bytes_without=full, bytes_with=peak))
    if request.subject.bits != "none":
        plain = Traced(replace(request.subject, bits="none")).step((fullest,), rung).peak_bytes
        savings.append(Saving(technique="quantization", bytes_without=plain, bytes_with=peak))
    return tuple(savings)


def full_fine_tuning_bytes(traced: Traced) -> int:
    """Return what full fine-tuning would hold more: gradient and two moments, fp32, for every frozen weight."""
    return 3 * 4 * (traced.parameters - traced.adapter_parameters)


def ways_out(request: Request, plan: Plan) -> tuple[str, ...]:
    """Name what would make it fit; these change what is learned or what is given, so they are only proposed."""
    need = plan.need_bytes
    ways = [f"--memory {-(-need // MIB)}MiB   (what it needs)"]
    if request.subject.bits == "none":
        ways.append("--bits nf4   (frozen weights in 4 bits)")
    elif request.subject.bits == "int8" and with_storages(request.subject.source) is None:
        ways.append("--bits nf4   (4 bits instead of 8)")
    ways.append(f"--set max_length={max(8, request.longest // 2)}   (shorter pieces of text)")
    if request.subject.adapter is not None and request.subject.adapter.rank > 4:
        ways.append(f"--set lora.r={request.subject.adapter.rank // 2}   (a smaller adapter)")
    return tuple(ways[:3])
