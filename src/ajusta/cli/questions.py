"""What `ajusta plan` can be asked, what `ajusta explain` is asked, and how each answer is shown."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from enum import Enum

from ajusta.base.errors import UserError
from ajusta.cli.door import the_look
from ajusta.cli.speech import progress, say, say_json, speaks_unicode
from ajusta.report.explain import explanation_facts, explanation_text
from ajusta.report.plans import cards_facts, cards_text, longest_facts, longest_text, plan_facts, plan_text
from ajusta.spec.config import Config


class Question(Enum):
    """One of four; the last three by their flags."""

    PLAN = "the plan"
    ALL_GPUS = "--all-gpus"
    MAX_CONTEXT = "--max-context"
    LARGEST_MODEL = "--largest-model"

    @classmethod
    def of(cls, *, all_gpus: bool, max_context: bool, largest_model: bool, gpu: str | None) -> Question:
        """Return what the flags ask.

        Raises:
            UserError: two questions at once, or a card beside all cards.
        """
        flags = {cls.ALL_GPUS: all_gpus, cls.MAX_CONTEXT: max_context, cls.LARGEST_MODEL: largest_model}
        asked = [question for question, wanted in flags.items() if wanted]
        if len(asked) > 1:
            came = " and ".join(question.value for question in asked)
            raise UserError(f"{came} are two questions; expected one at a time; leave out {asked[-1].value}")
        if all_gpus and gpu is not None:
            raise UserError(f"--all-gpus asks of every card, and --gpu names {gpu!r}; expected one of them; drop --gpu")
        return asked[0] if asked else cls.PLAN


def ask(question: Question, config: Config, gpu: str | None, *, as_json: bool) -> bool:
    """Ask, show the answer, and say whether anything fits.

    Raises:
        UserError: a setting, the data, the model or the card cannot be used.
    """
    unicode = speaks_unicode()
    facts: object
    with progress() as listener:
        look = the_look()
        if question is Question.ALL_GPUS:
            cards = look.plan_on_cards(config, listener)
            shown, facts, fits = cards_text(cards), cards_facts(cards), any(card.plan.fits for card in cards)
        elif question is Question.MAX_CONTEXT:
            longest = look.longest_context(config, listener, gpu=gpu)
            shown, facts, fits = longest_text(longest), longest_facts(longest), True
        elif question is Question.LARGEST_MODEL:
            name, plan = look.largest_model(config, listener, gpu=gpu)
            shown = f"{name} is the largest known model that fits\n\n{plan_text(plan, unicode=unicode)}"
            facts, fits = {"model": name, "plan": plan_facts(plan)}, True
        else:
            plan = look.plan(config, listener, gpu=gpu)
            shown, facts, fits = plan_text(plan, unicode=unicode), plan_facts(plan), plan.fits
    if as_json:
        say_json(facts)
    else:
        say(shown)
    return fits


def explain(config: Config, gpu: str | None, typed: Mapping[str, object], *, as_json: bool) -> None:
    """Explain the model's memory, and say which plan to ask for next: the same as was `typed`, quantized.

    Raises:
        UserError: a setting, the data, the model or the card cannot be used.
    """
    with progress() as listener:
        explanation = the_look().explain(config, listener, gpu=gpu)
    bits = "nf4" if config.bits == "none" else config.bits
    command = _command("plan", {**typed, "--bits": bits})
    if as_json:
        say_json(explanation_facts(explanation, command))
    else:
        say(explanation_text(explanation, command))


def _command(name: str, typed: Mapping[str, object]) -> str:
    """Return the line for a shell; options that were not typed are None, those that may repeat are lists."""
    words = ["ajusta", name]
    for option, values in typed.items():
        for value in values if isinstance(values, list) else [values]:
            if value is not None:
                words += [option, str(value)]
    return shlex.join(words)
