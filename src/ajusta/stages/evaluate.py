"""Losses and exams: running sums only, so the peak does not grow with the rows."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ajusta.base.events import Evaluated, Examined, Listener, Progress
from ajusta.data.chat import chat_prompt_ids
from ajusta.data.exam import Question, grade
from ajusta.engine.chain import Chain
from ajusta.engine.generate import generate
from ajusta.engine.step import loss_only
from ajusta.memory.place import Place
from ajusta.spec.data import MicroBatch
from ajusta.spec.record import Answer, ExamResult, LossResult
from ajusta.stages.folder import write_text

ANSWER_TOKENS = 12  # the strict grader reads the first so many tokens


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


def take_exam(
    chain: Chain,
    place: Place,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    name: str,
    when: str,
    system: str | None,
    end_token_ids: Sequence[int],
    batch_tokens: int,
    listener: Listener,
    answers_file: Path | None = None,
) -> ExamResult:
    """Ask every question, grade the first `ANSWER_TOKENS` tokens of each answer, write all answers to a file.

    Rows of about equal length are asked side by side, at most `batch_tokens` tokens at a time (one row at least).
    """
    start = time.monotonic()
    prompts = [
        chat_prompt_ids(tokenizer, [{"role": "user", "content": question.question}], system=system)
        for question in questions
    ]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    given: dict[int, str] = {}
    while order:
        longest = len(prompts[order[-1]]) + ANSWER_TOKENS
        rows = max(1, min(len(order), batch_tokens // longest))
        chosen, order = order[-rows:], order[:-rows]
        tokens = generate(
            chain,
            place,
            [prompts[index] for index in chosen],
            max_new_tokens=ANSWER_TOKENS,
            end_token_ids=end_token_ids,
        )
        for index, ids in zip(chosen, tokens, strict=True):
            given[index] = str(tokenizer.decode(ids, skip_special_tokens=True))
        listener(Progress(phase="exam", done=len(given), total=len(prompts)))
    answers = [
        Answer(
            question=question.question,
            expected=question.accepted,
            given=given[index],
            correct=grade(given[index], question.accepted),
        )
        for index, question in enumerate(questions)
    ]
    correct = sum(answer.correct for answer in answers)
    if answers_file is not None:
        lines = [
            json.dumps(
                {"question": a.question, "expected": list(a.expected), "given": a.given, "correct": a.correct},
                ensure_ascii=False,
            )
            for a in answers
        ]
        answers_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(answers_file, "\n".join(lines) + "\n")
    seconds = time.monotonic() - start
    listener(Examined(exam=name, when=when, correct=correct, total=len(questions), seconds=seconds))
    return ExamResult(exam=name, when=when, correct=correct, total=len(questions))
