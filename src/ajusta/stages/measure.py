"""Measure a model as it is: losses on held-out and on general text, and its exams."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ajusta.spec.plan import Rung
from ajusta.spec.record import ExamResult, LossResult, Results, Trained
from ajusta.stages.base import Base
from ajusta.stages.evaluate import Asking, report_loss, take_exam, take_loss
from ajusta.stages.folder import RunFolder, write_json
from ajusta.stages.load import Loaded
from ajusta.stages.phases import Phases
from ajusta.stages.work import Work


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """All that measuring needs."""

    loaded: Loaded
    base: Base
    work: Work
    rung: Rung
    system: str | None
    folder: RunFolder

    def asking(self) -> Asking:
        """How its exams are asked."""
        return Asking(
            chain=self.loaded.model.chain,
            place=self.loaded.place,
            tokenizer=self.base.tokenizer,
            system=self.system,
            end_token_ids=self.base.end_token_ids,
            batch_tokens=self.rung.micro_tokens,
            position_limit=self.base.position_limit,
        )


def measure(job: Measuring, phases: Phases, *, when: str, step: int = 0) -> Results:
    """Take every loss and every exam once."""
    losses = []
    with phases.phase("evaluate"):
        for name, examples in (("heldout", job.work.prepared.heldout), ("general", job.work.general)):
            batches = job.work.batches(examples, job.rung.micro_tokens)
            if not batches:
                continue
            began = time.monotonic()
            chain, place = job.loaded.model.chain, job.loaded.place
            losses.append(take_loss(chain, place, batches, job.rung.loss_chunk, name=name, when=when))
            report_loss(losses[-1], phases.tell, step=step, seconds=time.monotonic() - began)
    exams = []
    for exam in job.work.exams:
        with phases.phase("exam"):
            answers = job.folder.exams / f"{exam.name}-{when}.jsonl"
            exams.append(
                take_exam(
                    job.asking(), exam.questions, name=exam.name, when=when, listener=phases.tell, answers_file=answers
                )
            )
    return Results(losses=tuple(losses), exams=tuple(exams))


def measure_before(job: Measuring, phases: Phases, identity: dict[str, str]) -> Results:
    """Measure before training, or recall what an interrupted run of the same identity and exams measured."""
    measured = {**identity, **{f"exam {exam.name}": exam.digest for exam in job.work.exams}}
    kept = _recall(job.folder.before, measured)
    if kept is not None:
        return kept
    results = measure(job, phases, when="before")
    write_json(job.folder.before, {"identity": measured, **asdict(results)})
    return results


def measure_after(job: Measuring, phases: Phases, trained: Trained) -> Results:
    """Measure after training; a run that was interrupted is measured when it is done."""
    return Results() if trained.interrupted else measure(job, phases, when="after", step=trained.steps)


def _recall(path: Path, identity: dict[str, str]) -> Results | None:
    if not path.is_file():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept.get("identity") != identity:
        return None
    return Results(
        losses=tuple(LossResult(**row) for row in kept["losses"]),
        exams=tuple(ExamResult(**row) for row in kept["exams"]),
    )


__all__ = ["Measuring", "measure", "measure_after", "measure_before"]
