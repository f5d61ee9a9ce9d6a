"""Losses and exams: running sums only, so the peak does not grow with the rows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ajusta.base.errors import UserError
from ajusta.base.events import Evaluated, Examined, Listener, Progress
from ajusta.data.chat import chat_prompt_ids
from ajusta.data.exam import GRADED_TOKENS, Question, grade
from ajusta.engine.chain import Chain
from ajusta.engine.generate import generate
from ajusta.engine.step import loss_only
from ajusta.memory.place import Place
from ajusta.spec.data import MicroBatch
from ajusta.spec.record import Answer, ExamResult, LossResult
from ajusta.stages.folder import write_text


def take_loss(
    chain: Chain, place: Place, batches: Sequence[MicroBatch], loss_chunk: int, *, name: str, when: str
) -> LossResult:
    """Return the mean loss per token over all batches; the same for any cut into batches."""
    total, tokens = 0.0, 0
    for micro in batches:
        if micro.num_trained:
            total += float(loss_only(chain, place, micro, loss_chunk))
            tokens += micro.num_trained
    loss = total / tokens if tokens else float("nan")
    perplexity = math.exp(loss) if loss < 700 else float("inf")
    return LossResult(name=name, when=when, loss=loss, perplexity=perplexity, tokens=tokens)


def report_loss(result: LossResult, listener: Listener, *, step: int, seconds: float, best: bool = False) -> None:
    """Tell the listener about a loss."""
    listener(
        Evaluated(
            name=result.name,
            when=result.when,
            step=step,
            loss=result.loss,
            perplexity=result.perplexity,
            tokens=result.tokens,
            seconds=seconds,
            best=best,
        )
    )


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How an exam is asked: the model's place, tokenizer and limits."""

    chain: Chain
    place: Place
    tokenizer: PreTrainedTokenizerBase
    system: str | None
    end_token_ids: Sequence[int]
    batch_tokens: int
    position_limit: int | None = None


def take_exam(
    asking: Asking,
    questions: Sequence[Question],
    *,
    name: str,
    when: str,
    listener: Listener,
    answers_file: Path | None = None,
) -> ExamResult:
    """Ask every question, grade the first `GRADED_TOKENS` tokens of each answer, write all answers to a file.

    Raises:
        UserError: a question is longer than the model can take.
    """
    start = time.monotonic()
    given = _ask(asking, questions, listener)
    answers = [
        Answer(
            question=question.question,
            expected=question.accepted,
            given=text,
            correct=grade(text, question.accepted),
        )
        for question, text in zip(questions, given, strict=True)
    ]
    correct = sum(answer.correct for answer in answers)
    if answers_file is not None:
        _keep_answers(answers_file, answers)
    seconds = time.monotonic() - start
    listener(Examined(exam=name, when=when, correct=correct, total=len(questions), seconds=seconds))
    return ExamResult(exam=name, when=when, correct=correct, total=len(questions))


def _ask(asking: Asking, questions: Sequence[Question], listener: Listener) -> list[str]:
    """Return the beginning of each answer.

    Rows of about equal length are asked side by side, at most `batch_tokens` tokens at a time (one row at least).
    """
    prompts = [_prompt(asking, question) for question in questions]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    given: dict[int, str] = {}
    while order:
        longest = len(prompts[order[-1]]) + GRADED_TOKENS
        rows = max(1, min(len(order), asking.batch_tokens // longest))
        chosen, order = order[-rows:], order[:-rows]
        answers = generate(
            asking.chain,
            asking.place,
            [prompts[index] for index in chosen],
            max_new_tokens=GRADED_TOKENS,
            end_token_ids=asking.end_token_ids,
        )
        for index, ids in zip(chosen, answers, strict=True):
            given[index] = str(asking.tokenizer.decode(ids, skip_special_tokens=True))
        listener(Progress(phase="exam", done=len(given), total=len(prompts)))
    return [given[index] for index in range(len(prompts))]


def _prompt(asking: Asking, question: Question) -> list[int]:
    turns = [{"role": "user", "content": question.question}]
    ids = chat_prompt_ids(asking.tokenizer, turns, system=asking.system)
    limit = asking.position_limit
    if limit is not None and len(ids) + GRADED_TOKENS > limit:
        raise UserError(
            f"the question of {question.source} has {len(ids)} tokens; expected at most {limit - GRADED_TOKENS}, the "
            f"model's {limit} positions less the answer; shorten it"
        )
    return ids


def _keep_answers(path: Path, answers: Sequence[Answer]) -> None:
    lines = [
        json.dumps(
            {"question": a.question, "expected": list(a.expected), "given": a.given, "correct": a.correct},
            ensure_ascii=False,
        )
        for a in answers
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines) + "\n")
