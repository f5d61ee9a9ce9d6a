"""What can be asked without a run: would it fit, on which card, up to which length; what is in the data; what is here.

Like run.py this is a place where deciding (planning/) and doing (stages/) meet; nothing here trains or writes.
"""

from __future__ import annotations

from dataclasses import replace

from ajusta.base.errors import UserError
from ajusta.base.events import Listener, silent
from ajusta.data.demand import Demand
from ajusta.data.show import colour_segments, token_histogram
from ajusta.planning.explain import explanation
from ajusta.planning.questions import largest_that_fits, longest_text, on_cards
from ajusta.planning.request import imagined_demand, make_request
from ajusta.planning.search import Request, search
from ajusta.spec.cards import cards_by_memory
from ajusta.spec.config import Config
from ajusta.spec.device import Machine
from ajusta.spec.explanation import Explanation
from ajusta.spec.models import known_models
from ajusta.spec.plan import Longest, OnCard, Plan
from ajusta.spec.record import LookedAt
from ajusta.stages.base import as_stored, open_base
from ajusta.stages.card import machine_of
from ajusta.stages.device import look_at_machine
from ajusta.stages.doctor import Finding, look_around
from ajusta.stages.phases import Phases
from ajusta.stages.shape import Shape, open_shape
from ajusta.stages.work import prepare_data, read_work


def plan(config: Config, listener: Listener = silent, *, gpu: str | None = None) -> Plan:
    """Say what a run would take and how it would be made to fit, without running it.

    Without data, a step of full-length examples is planned for.

    Args:
        config: the settings of the run; `model` may also be a config.json or a name of the catalogue.
        listener: told what is assumed.
        gpu: the name of a card to plan for instead of this machine.

    Raises:
        UserError: a setting, the data, the model or the card cannot be used.
    """
    shape, machine = open_shape(config), _machine(config, gpu, listener)
    return search(_request(config, shape, machine, _demand(config, shape, listener), with_savings=True))


def explain(config: Config, listener: Listener = silent, *, gpu: str | None = None) -> Explanation:
    """Trace one step from full fine-tuning down to all techniques together: where the bytes go, and what each costs.

    Nothing is compared with a memory unless a card is named or `memory` is set.

    Args:
        config: as for `plan`; where `bits` is none, quantization is explained by nf4.
        listener: told what is assumed.
        gpu: the name of a card to explain for instead of this machine.

    Raises:
        UserError: a setting, the data, the model or the card cannot be used.
    """
    shape, machine = open_shape(config), _machine(config, gpu, listener)
    request = _request(config, shape, machine, _demand(config, shape, listener))
    return explanation(request, shape.reference, limited=gpu is not None or config.memory_bytes is not None)


def plan_on_cards(config: Config, listener: Listener = silent) -> tuple[OnCard, ...]:
    """Plan the same run for every card of the catalogue, the smallest first.

    Raises:
        UserError: a setting, the data or the model cannot be used.
    """
    shape = open_shape(config)
    demand = _demand(config, shape, listener)
    machines = (machine_of(card, config) for card in cards_by_memory())
    return on_cards(lambda machine: _request(config, shape, machine, demand), machines)


def longest_context(config: Config, listener: Listener = silent, *, gpu: str | None = None) -> Longest:
    """Find the longest example that can be trained on, one at a time.

    Raises:
        UserError: a setting, the model or the card cannot be used, or not even the shortest example fits.
    """
    shape, machine = open_shape(config), _machine(config, gpu, listener)

    def request_at(tokens: int) -> Request:
        asked = config.model_copy(update={"max_length": tokens, "batch_size": 1})
        return _request(asked, shape, machine, imagined_demand(asked, shape.config.get_text_config().vocab_size, None))

    found = longest_text(request_at, shape.position_limit)
    if found is None:
        raise UserError(
            f"{shape.reference} does not fit into this memory at any length; expected room for its weights at least; "
            "try --bits nf4, more --memory, or ajusta plan --largest-model"
        )
    return found


def largest_model(config: Config, listener: Listener = silent, *, gpu: str | None = None) -> tuple[str, Plan]:
    """Find the largest model of the catalogue that these settings fit; its name and its plan.

    Raises:
        UserError: a setting or the card cannot be used, or not even the smallest model fits.
    """
    machine = _machine(config, gpu, listener)

    def plan_for(name: str) -> Plan:
        asked = config.model_copy(update={"model": name})
        shape = open_shape(asked)
        return search(_request(asked, shape, machine, _demand(asked, shape, silent)))

    names = [model.name for model in sorted(known_models(), key=lambda model: model.parameters)]
    found = largest_that_fits(plan_for, names)
    if found is None:
        raise UserError(
            f"not even {names[0]} fits; expected a budget above it; give more --memory or a smaller --max-length"
        )
    return found


def look_at_data(config: Config, listener: Listener = silent) -> LookedAt:
    """Read the data as a run would and account for it: what was read, dropped and why, one example in pieces.

    Raises:
        DataError: nothing in the data can be trained on.
    """
    base = open_base(config)
    prepared = prepare_data(config, base)
    return LookedAt(
        summary=prepared.summary,
        histogram=tuple(token_histogram(prepared.summary)),
        sample=tuple(colour_segments(prepared.train[0], base.tokenizer)),
    )


def doctor(listener: Listener = silent, *, measure: bool = False) -> tuple[Finding, ...]:
    """Look at this machine: what is here, what is missing, what to do about it.

    With `measure` the device is timed for later plans, and the figures are kept in the user's cache folder.
    """
    return look_around(measure=measure)


def _machine(config: Config, gpu: str | None, listener: Listener) -> Machine:
    return look_at_machine(config, Phases(listener).note)[1] if gpu is None else machine_of(gpu, config)


def _demand(config: Config, shape: Shape, listener: Listener) -> Demand:
    """Return the most that the data asks for; without data a step of examples as long as the settings allow."""
    phases = Phases(listener)
    phases.note(f"the model's shape: {shape.told_by}")
    if config.data:
        return read_work(config, open_base(config)).demand
    demand = imagined_demand(config, shape.config.get_text_config().vocab_size, shape.position_limit)
    phases.note(f"no data given: planned for {config.batch_size} examples of {demand.longest} tokens a step")
    if demand.longest < config.max_length:
        phases.note(f"max_length is {config.max_length}, and this model knows {demand.longest} positions", warning=True)
    return demand


def _request(config: Config, shape: Shape, machine: Machine, demand: Demand, *, with_savings: bool = False) -> Request:
    config = as_stored(config, shape.reference, shape.source)
    request = make_request(config, shape.config, shape.source, machine, demand)
    return replace(request, with_savings=with_savings)
