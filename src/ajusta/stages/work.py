"""What there is to do: the examples in their order, what the loss is taken on, the exams, how many steps."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from ajusta.base.errors import UserError
from ajusta.data.chat import chat_prompt_ids
from ajusta.data.demand import Demand
from ajusta.data.exam import GRADED_TOKENS, Question, read_exam
from ajusta.data.general import general_rows
from ajusta.data.order import Order
from ajusta.data.pack import micro_batches
from ajusta.data.prepare import Prepared, prepare
from ajusta.data.readers import Reading, read
from ajusta.spec.config import Config
from ajusta.spec.data import Example, MicroBatch
from ajusta.stages.base import Base
from ajusta.stages.checkpoint import digest_of

# Settings that leave the learned numbers as they are, or as they are but for rounding; data and base have digests.
_MAY_CHANGE = frozenset(
    {"model", "data", "out", "exam", "memory", "device", "stop_after", "save_every", "offline", "revision"}
    | {"gradient_checkpointing", "micro_batch", "trust_remote_code"}
)


@dataclass(frozen=True, kw_only=True)
class Exam:
    """A file of questions."""

    name: str
    questions: tuple[Question, ...]

    @property
    def digest(self) -> str:
        """What tells this exam from another one of the same name."""
        return digest_of([[question.question, question.accepted] for question in self.questions])


@dataclass(frozen=True, kw_only=True)
class Work:
    """All that the data asks of the run."""

    prepared: Prepared
    general: tuple[Example, ...]
    exams: tuple[Exam, ...]
    demand: Demand

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.demand.steps

    @property
    def longest(self) -> int:
        """Tokens of the longest example, trained on or measured."""
        return max(len(example) for example in (*self.demand.examples, *self.demand.measured))

    def batches(self, examples: tuple[Example, ...], micro_tokens: int) -> tuple[MicroBatch, ...]:
        """Cut examples into micro-batches, for an evaluation."""
        return micro_batches(examples, micro_tokens, packing=self.demand.packing)

    def identity(self, config: Config, base: Base) -> dict[str, str]:
        """Return what a saved state belongs to: every setting that matters by its name, the data, the base."""
        data = hashlib.sha256()
        for example in (*self.prepared.train, *self.prepared.heldout):
            data.update(example.ids.tobytes() + example.trained.tobytes())
        return {**_settings(config), "data": data.hexdigest(), "base": base.source.fingerprint}


def _settings(config: Config) -> dict[str, str]:
    """Return the settings that the learned numbers depend on, by dotted name."""
    found: dict[str, str] = {}
    for name, value in config.model_dump(mode="json").items():
        if name in _MAY_CHANGE:
            continue
        inner = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: json.dumps(each) for key, each in inner.items()}
    return found


def read_work(config: Config, base: Base, *, all_heldout: bool = False) -> Work:
    """Read the data and the exams and lay out the run; with `all_heldout` all of the data is for measuring.

    Raises:
        DataError: nothing in the data can be trained on, or an exam file is broken.
    """
    prepared = prepare_data(config, base)
    if all_heldout:
        prepared = replace(prepared, heldout=(*prepared.train, *prepared.heldout))
    order = Order(
        lengths=tuple(len(example) for example in prepared.train), batch_size=config.batch_size, seed=config.seed
    )
    general, exams = general_examples(config, base), read_exams(config.exam)
    demand = Demand(
        examples=prepared.train,
        order=order,
        steps=config.steps or config.epochs * order.steps_per_epoch,
        packing=config.text.packing,
        measured=(*prepared.heldout, *general),
        exam_tokens=_longest_answer(exams, config, base),
    )
    return Work(prepared=prepared, general=general, exams=exams, demand=demand)


def _longest_answer(exams: tuple[Exam, ...], config: Config, base: Base) -> int:
    """Return the tokens of the longest exam question with its answer."""
    prompts = [
        chat_prompt_ids(base.tokenizer, [{"role": "user", "content": question.question}], system=config.text.system)
        for exam in exams
        for question in exam.questions
    ]
    return max(map(len, prompts)) + GRADED_TOKENS if prompts else 0


def prepare_data(config: Config, base: Base) -> Prepared:
    """Read what `config.data` names and turn it into examples.

    Raises:
        UserError: no data is named, or nothing in it can be trained on.
    """
    if not config.data:
        raise UserError("no data was given; expected files or folders of text; add --data PATH")
    text = config.text
    return prepare(
        read(config.data, strict=text.strict),
        base.tokenizer,
        max_length=config.max_length,
        heldout_fraction=text.heldout_fraction,
        seed=config.seed,
        system=text.system,
        end_token_ids=base.end_token_ids,
        overlap=text.overlap,
        model_limit=base.position_limit,
        strict=text.strict,
    )


def general_examples(config: Config, base: Base) -> tuple[Example, ...]:
    """Return the fixed general text as examples."""
    rows = general_rows()
    reading = Reading(rows=rows, dropped=(), notes=(), files=1)
    return prepare(
        reading,
        base.tokenizer,
        max_length=config.max_length,
        heldout_fraction=0.0,
        seed=0,
        end_token_ids=base.end_token_ids,
        model_limit=base.position_limit,
    ).train


def read_exams(paths: tuple[Path, ...]) -> tuple[Exam, ...]:
    """Read exam files; each is named after its file, and after its folder too where two files have one name.

    Raises:
        DataError: a file is no exam.
        UserError: the same file is given twice.
    """
    stems = [path.stem for path in paths]
    names = [
        path.stem if stems.count(path.stem) == 1 else f"{path.resolve().parent.name}-{path.name}".replace(".", "-")
        for path in paths
    ]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"two exams are called {twice[0]!r}; expected each file once; rename one of them")
    return tuple(Exam(name=name, questions=read_exam(path)) for name, path in zip(names, paths, strict=True))
