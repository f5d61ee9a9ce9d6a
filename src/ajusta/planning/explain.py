"""The same step traced five times, with one technique more each time: where the bytes go, and what each one costs.

Everything is traced as a plan is (planning/trace.py): the engine's own step on a counting place. Full fine-tuning,
which the engine does not offer, is the yardstick of engine/full.py: the same chain with every weight trained. All five
are weighed on one micro-batch, the fullest of the shortest cut, so that they differ by the technique alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ajusta.engine.full import FullTraining
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.ledger import Section
from ajusta.memory.place import Category, CountingPlace
from ajusta.planning.depth import fullest
from ajusta.planning.kept import block_memory
from ajusta.planning.reserved import reserve
from ajusta.planning.search import Request, loss_chunk, margin
from ajusta.planning.trace import Traced, seconds_of_step
from ajusta.spec.data import MicroBatch
from ajusta.spec.explanation import Explanation, Level
from ajusta.spec.plan import Rung

TECHNIQUES = ("full fine-tuning", "LoRA", "quantization", "gradient checkpointing", "chunked loss")
_LABELS = {Category.ADAPTERS: "trained weights", Category.TEMPORARY: "other"}  # the others by their own names


@dataclass(frozen=True, kw_only=True)
class _Case:
    """What all ways have in common: the micro-batch that is weighed, those of the step, whether a memory is given."""

    request: Request
    micro: MicroBatch
    batches: tuple[MicroBatch, ...]
    limited: bool

    @property
    def replays(self) -> bool:
        """Whether a card's allocator is asked, too."""
        return self.limited and self.request.machine.device.kind == "cuda"


@dataclass(frozen=True, kw_only=True)
class _Way:
    """One way to train, traced. `reserved_bytes` is what a card must give, None on a processor or where nobody asks."""

    trained: int
    bits: str
    rung: Rung
    sections: Sequence[Section]
    step_seconds: float
    reserved_bytes: int | None


def explanation(request: Request, model: str, *, limited: bool) -> Explanation:
    """Trace the five ways.

    Args:
        request: what to plan for. Bits of `none` become nf4 where quantization comes in.
        model: its name, for a person.
        limited: whether the machine's budget is to be compared with.

    Raises:
        ModelError: the model cannot be built.
        UserError: a wrong target name, or no linear is left to adapt.
    """
    subject, machine = request.subject, request.machine
    text = subject.config.get_text_config()
    tokens = request.micro_tokens or request.longest
    case = _Case(
        request=request, micro=request.fullest(tokens), batches=tuple(request.batches(tokens)), limited=limited
    )
    bits = "nf4" if subject.bits == "none" else subject.bits
    plain, coarse = (
        Traced(replace(subject, bits=stored), record=case.replays, roofline=machine.roofline)
        for stored in ("none", bits)
    )
    rows = max(each.num_trained for each in (case.micro, *case.batches))
    whole = Rung(recompute_blocks=0, micro_tokens=tokens, loss_chunk=max(1, rows), peak_bytes=0)
    again = replace(whole, recompute_blocks=plain.blocks)
    chunked = replace(again, loss_chunk=loss_chunk(text.vocab_size))
    ways = [_full(case, whole), _traced(case, plain, whole)]
    ways += [_traced(case, coarse, rung) for rung in (whole, again, chunked)]
    assert subject.adapter is not None
    return Explanation(
        model=model,
        model_type=subject.config.model_type,
        parameters=plain.parameters,
        blocks=plain.blocks,
        vocabulary=text.vocab_size,
        dtype=machine.dtype,
        rank=subject.adapter.rank,
        device=machine.device.name,
        budget_bytes=machine.budget_bytes if limited else None,
        step_tokens=sum(each.num_tokens for each in case.batches),
        micro_batches=len(case.batches),
        micro_tokens=case.micro.num_tokens,
        speeds=machine.roofline.source,
        speeds_measured=machine.roofline.measured,
        block=block_memory(plain, case.micro, whole),
        levels=tuple(_level(case, technique, way) for technique, way in zip(TECHNIQUES, ways, strict=True)),
    )


def _full(case: _Case, rung: Rung) -> _Way:
    """Trace full fine-tuning, over the whole depth: on `meta` that takes less than a second."""
    subject, machine = case.request.subject, case.request.machine
    place = CountingPlace(subject.kind, record=case.replays, roofline=machine.roofline)
    chain = build_skeleton(subject.config, subject.dtype).chain
    with place.counting() as ledger:
        training = FullTraining(chain, subject.optimizer, place)

        def trace(micro: MicroBatch) -> tuple[Section, ...]:
            ledger.start_over()
            training.step(micro, 0.0)
            return ledger.cut()

        sections = trace(case.micro)
        known = {case.micro.num_tokens: sections}
        seconds = seconds_of_step(case.batches, lambda micro: known.get(micro.num_tokens) or trace(micro))
    reserved = None
    if case.replays:
        stands, capability = range(len(chain.blocks)), machine.device.compute_capability
        reserved = reserve(sections, stands, training.resident_bytes(), capability).need_bytes
    return _Way(
        trained=training.parameters,
        bits="none",
        rung=rung,
        sections=sections,
        step_seconds=seconds,
        reserved_bytes=reserved,
    )


def _traced(case: _Case, traced: Traced, rung: Rung) -> _Way:
    """Trace a step of the engine."""
    capability = case.request.machine.device.compute_capability
    return _Way(
        trained=traced.adapter_parameters,
        bits=traced.subject.bits,
        rung=rung,
        sections=traced.step_sections((case.micro,), rung),
        step_seconds=traced.step_seconds(case.batches, rung),
        reserved_bytes=traced.reserve((case.micro,), rung, capability).need_bytes if case.replays else None,
    )


def _level(case: _Case, technique: str, way: _Way) -> Level:
    """Turn a trace into what is shown of it."""
    machine, peak = case.request.machine, fullest(way.sections)
    need = way.reserved_bytes
    if case.limited and need is None:
        need = peak.live_bytes + margin(peak.live_bytes, machine.device.kind, machine.dtype)
    sizes = ((category, peak.by_category.get(category, 0)) for category in Category)
    return Level(
        technique=technique,
        trained=way.trained,
        bits=way.bits,
        recompute_blocks=way.rung.recompute_blocks,
        loss_rows=min(way.rung.loss_chunk, max(1, case.micro.num_trained)),
        peak_bytes=peak.live_bytes,
        operation=peak.operation,
        by_category={_LABELS.get(category, str(category)): size for category, size in sizes if size},
        saved_bytes=_saved(way.sections),
        recompute_bytes=_most(way.sections, Category.RECOMPUTE),
        logits_bytes=_most(way.sections, Category.LOGITS),
        step_seconds=way.step_seconds,
        need_bytes=need,
        fits=None if need is None else need <= machine.budget_bytes,
    )


def _saved(sections: Sequence[Section]) -> int:
    """Return what the forward pass has kept when it is done."""
    return next(section for section in sections if section.name == "loss").begin.get(Category.SAVED, 0)


def _most(sections: Sequence[Section], category: Category) -> int:
    """Return the most that a category holds at the fullest moment of any section."""
    return max(section.peak.by_category.get(category, 0) for section in sections)
