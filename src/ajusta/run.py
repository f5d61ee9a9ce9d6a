"""The story of a run, once through: each step takes the previous one's noun and returns a new one.

    read -> decide -> load -> rehearse -> measure -> train -> measure -> keep

Here deciding (planning/) and doing (stages/) meet; look.py is for questions that need no run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from ajusta.base.errors import DoesNotFit
from ajusta.base.events import Ahead, Listener, Progress, Saved, silent
from ajusta.base.units import show_bytes
from ajusta.blocks.optimizer import FlatAdamW
from ajusta.data.tokenizer import save_tokenizer
from ajusta.engine.adapter_files import read_adapter
from ajusta.memory.measure import MemoryWatch
from ajusta.planning.again import plan_again
from ajusta.planning.request import adapter_spec, make_request, optimizer_settings
from ajusta.planning.search import Request, search
from ajusta.spec.config import Config, load_config
from ajusta.spec.device import Machine
from ajusta.spec.plan import Plan
from ajusta.spec.record import Measured, Record, Results, Trained
from ajusta.stages.answer import Speaker
from ajusta.stages.base import Base, as_stored, open_base
from ajusta.stages.checkpoint import Progressed, load_newest, require_same
from ajusta.stages.device import environment, look_at_machine
from ajusta.stages.earlier import plan_as_before, read_earlier
from ajusta.stages.export import export_adapter, export_merged, require_form
from ajusta.stages.folder import RunFolder, open_finished, open_for_training, write_json, write_text, write_whole
from ajusta.stages.load import (
    Loaded,
    as_continued,
    check_chain,
    fill_adapters,
    keep_adapter,
    load_base,
    model_facts,
    optimizer_for,
    tuned_base,
)
from ajusta.stages.measure import Measuring, measure, measure_after, measure_before
from ajusta.stages.phases import Phases
from ajusta.stages.rehearse import Rehearsal, over_budget, rehearse
from ajusta.stages.train import Job, train
from ajusta.stages.work import Work, read_work

MOST_PLANS = 3  # of one run: where a rehearsal passes the budget, it is planned again


def finetune(config: Config, listener: Listener = silent, *, resume: bool = False) -> Record:
    """Tune a model on the data of `config`; the folder `config.run_folder` holds everything afterwards.

    Args:
        config: all settings, from `load_config`.
        listener: told what happens, as small frozen events.
        resume: go on from the newest saved state of the run folder; without one, start at the beginning.

    Returns:
        The record of the run, which is also in record.json.

    Raises:
        UserError: a setting, the data or the model cannot be used (exit code 2).
        DoesNotFit: no exact plan fits into the memory given (exit code 3).
        NumbersGoneBad: the loss or the gradients are not finite; the last good state is saved (exit code 1).
    """
    with open_for_training(config.run_folder, resume=resume) as folder:
        phases = Phases(listener, folder.log)
        decided = _decide(config, folder, phases)
        _keep_settings(decided)
        ready = _load(decided, phases)
        ready, rehearsal = _rehearse(ready, phases)
        before = measure_before(ready.measuring(), phases, ready.identity)
        trained = _train(ready, phases, rehearsal)
        after = measure_after(ready.measuring(), phases, trained)
        return _keep_record(ready, trained, (before, after), phases)


def load(folder: Path | str, listener: Listener = silent) -> Speaker:
    """Load a tuned model for answering: `load("runs/book").answer([{"role": "user", "content": "..."}])`.

    Raises:
        UserError: the folder is no finished run, or its base model is gone or has changed.
    """
    place = open_finished(Path(folder))
    config = load_config(place.config)
    base = tuned_base(config, place)
    loaded = _load_tuned(config, base, place, listener)
    return Speaker(
        loaded.model,
        loaded.place,
        base.tokenizer,
        end_token_ids=base.end_token_ids,
        system=config.text.system,
        position_limit=base.position_limit,
        listener=listener,
    )


chat = load


def evaluate(
    folder: Path | str, listener: Listener = silent, *, data: tuple[Path, ...] = (), exams: tuple[Path, ...] = ()
) -> Measured:
    """Measure a tuned model again: on its own held-out text, or on all of other `data`; with its own or other `exams`.

    Raises:
        UserError: the folder is no finished run, or the data cannot be used.
    """
    place = open_finished(Path(folder))
    config = load_config(place.config)
    base = tuned_base(config, place)
    if data:
        config = config.model_copy(update={"data": tuple(data)})
    config = config.model_copy(update={"exam": tuple(exams) or config.exam})
    work = read_work(config, base, all_heldout=bool(data))
    loaded = _load_tuned(config, base, place, listener)
    phases = Phases(listener)
    machine = look_at_machine(config, phases.note)[1]
    rung = search(make_request(config, base.config, base.source, machine, work.demand)).rung
    measuring = Measuring(loaded=loaded, base=base, work=work, rung=rung, system=config.text.system, folder=place)
    results = measure(measuring, phases, when="after")
    return Measured(results=results, adapter=str(place.adapter))


def export(folder: Path | str, out: Path | None = None, form: str = "adapter", listener: Listener = silent) -> Path:
    """Write a tuned model where other programs open it: the adapter in PEFT's format, or merged into the base.

    Args:
        folder: of a finished run.
        out: a new folder; by default `export-FORM` inside the run folder.
        form: `adapter` or `merged`.
        listener: told how far it is.

    Raises:
        UserError: the folder is no finished run, `out` exists, the base model has changed, or there is no such form.
    """
    require_form(form)
    place = open_finished(Path(folder))
    target = out or place.path / f"export-{form}"
    if form == "adapter":
        return export_adapter(place, target)
    base = tuned_base(load_config(place.config), place)
    adapter = read_adapter(place.adapter)
    return export_merged(base, adapter, target, lambda done, total: listener(_progress("export", done, total)))


@dataclass(frozen=True, kw_only=True)
class _Decided:
    """Everything up to the plan."""

    config: Config
    base: Base
    work: Work
    machine: Machine
    device: torch.device
    request: Request
    plan: Plan
    folder: RunFolder


@dataclass(frozen=True, kw_only=True)
class _Ready(_Decided):
    """And the model on its place, with its optimizer."""

    loaded: Loaded
    optimizer: FlatAdamW
    watch: MemoryWatch

    @property
    def identity(self) -> dict[str, str]:
        """What a saved state belongs to."""
        return self.work.identity(self.config, self.base)

    def measuring(self) -> Measuring:
        """What measuring needs of it."""
        return Measuring(
            loaded=self.loaded,
            base=self.base,
            work=self.work,
            rung=self.plan.rung,
            system=self.config.text.system,
            folder=self.folder,
        )


def _decide(config: Config, folder: RunFolder, phases: Phases) -> _Decided:
    """Read model and data, look at the machine, and plan; the settings that come out have everything filled in.

    Raises:
        UserError: the folder holds the state of another run.
        DoesNotFit: with the bytes that are missing and the nearest ways out.
    """
    with phases.phase("data"):
        base = open_base(config)
        config, notes = as_continued(as_stored(config, base.reference, base.source), base)
        for text in notes:
            phases.note(text, warning=True)
        work = read_work(config, base)
        phases.tell_data(work.prepared.summary)
    with phases.phase("plan"):
        earlier = read_earlier(folder)
        device, machine = look_at_machine(config, phases.note, earlier.config.dtype if earlier else None)
        config = config.model_copy(update={"dtype": machine.dtype, "revision": base.revision})
        require_same(folder.checkpoints, work.identity(config, base))
        request = make_request(config, base.config, base.source, machine, work.demand, with_savings=True)
        made = plan_as_before(earlier, config, lambda *shape: search(_shaped(request, *shape)))
        phases.tell_plan(made)
    _require_fit(made)
    return _Decided(
        config=config,
        base=base,
        work=work,
        machine=machine,
        device=device,
        request=request,
        plan=made,
        folder=folder,
    )


def _require_fit(plan: Plan) -> None:
    if not plan.fits:
        raise DoesNotFit("\n".join([plan.sentence(), "ways out:", *(f"  {way}" for way in plan.ways_out)]))


def _shaped(request: Request, recompute_blocks: int | None, micro_tokens: int | None) -> Request:
    if recompute_blocks is None:
        return request
    return replace(request, recompute=recompute_blocks, micro_tokens=micro_tokens)


def _keep_settings(decided: _Decided) -> None:
    """Write what a later command needs: the settings with everything filled in, the plan, the tokenizer."""
    folder = decided.folder
    write_text(folder.config, decided.config.to_yaml())
    write_json(folder.plan, dataclasses.asdict(decided.plan))
    write_whole(folder.tokenizer, lambda aside: save_tokenizer(decided.base.tokenizer, aside))


def _load(decided: _Decided, phases: Phases) -> _Ready:
    """Bring the model to its place, adapted, with its optimizer."""
    config = decided.config
    watch = MemoryWatch.begin(decided.device)
    with phases.phase("load", planned_bytes=decided.plan.phases[0].peak_bytes):
        loaded = load_base(
            decided.base,
            decided.device,
            dtype=decided.machine.dtype,
            bits=config.bits,
            adapter=adapter_spec(config),
            told=lambda done, total: phases.tell(_progress("load", done, total)),
            continue_from=config.lora.adapter,
        )
        for text in loaded.model.targets.notes:
            phases.note(text, warning=True)
        check_chain(loaded, decided.base, longest=decided.work.longest, packing=config.text.packing)
        optimizer = optimizer_for(loaded, optimizer_settings(config))
    return _Ready(**vars(decided), loaded=loaded, optimizer=optimizer, watch=watch)


def _rehearse(ready: _Ready, phases: Phases) -> tuple[_Ready, Rehearsal]:
    """Run the worst step once; return what it measured. From here on the time left is known.

    Where it takes more than the budget, plan again with what was measured, up to MOST_PLANS plans in all.

    Raises:
        DoesNotFit: the tensors alone pass the budget, and no plan is small enough.
    """
    for number in range(1, MOST_PLANS + 1):
        rehearsal = _rehearse_once(ready, phases)
        resident = ready.watch.now_and_peak()[1] if ready.device.type == "cpu" else None
        over, counted = over_budget(rehearsal, ready.plan, resident)
        if not over:
            break
        told = f"the rehearsal took {show_bytes(over)} of {counted} more than planned, and passes the budget"
        again = plan_again(ready.request, ready.plan, over) if number < MOST_PLANS else ready.plan
        if counted == "tensors":
            _require_fit(again)
        if number == MOST_PLANS or not again.fits or again.rung == ready.plan.rung:
            phases.note(f"{told}; going on with this plan: give more --memory, or a smaller --max-length", warning=True)
            break
        phases.note(f"{told}: planned again with so much set aside", warning=True)
        phases.tell_plan(again)
        write_json(ready.folder.plan, dataclasses.asdict(again))
        ready = replace(ready, plan=again)
        ready.watch.forget_peak()
    phases.tell(_ahead(ready, Progressed(), rehearsal))
    return ready, rehearsal


def _rehearse_once(ready: _Ready, phases: Phases) -> Rehearsal:
    with phases.phase("rehearse") as own:
        tokens, demand = ready.plan.rung.micro_tokens, ready.work.demand
        rehearsal = rehearse(
            ready.loaded, ready.optimizer, ready.plan, demand.fullest(tokens), demand.fullest_measured(tokens)
        )
        own += rehearsal.phases
    return rehearsal


def _ahead(ready: _Ready, progress: Progressed, rehearsal: Rehearsal) -> Ahead:
    work, config = ready.work, ready.config
    return Ahead(
        total_steps=work.total_steps,
        total_tokens=work.demand.order.total_tokens(work.total_steps) - work.demand.order.total_tokens(progress.step),
        first_step=progress.step + 1,
        evaluate_every=config.evaluate_every if work.prepared.heldout else 0,
        save_every=config.save_every,
        seconds_per_token=rehearsal.seconds_per_token,
        planned_bytes=ready.plan.need_bytes,
        fullest=rehearsal.fullest,
    )


def _train(ready: _Ready, phases: Phases, rehearsal: Rehearsal) -> Trained:
    """Make the steps that are left and put the adapter into the run folder: the best one where that was asked for."""
    folder, loaded, base, config = ready.folder, ready.loaded, ready.base, ready.config
    progress, notes = load_newest(folder.checkpoints, ready.optimizer, ready.identity)
    for text in notes:
        phases.note(text, warning=True)
    if progress.step:
        phases.note(f"going on from step {progress.step} of {ready.work.total_steps}")
        phases.tell(_ahead(ready, progress, rehearsal))
    with phases.phase("train", planned_bytes=ready.plan.need_bytes):
        job = Job(
            config=config,
            model=loaded.model,
            place=loaded.place,
            optimizer=ready.optimizer,
            rung=ready.plan.rung,
            order=ready.work.demand.order,
            examples=ready.work.demand.examples,
            heldout=ready.work.batches(ready.work.prepared.heldout, ready.plan.rung.micro_tokens),
            total_steps=ready.work.total_steps,
            checkpoints=folder.checkpoints,
            identity=ready.identity,
            save_best=lambda: keep_adapter(folder.best, loaded, base, config),
            watch=ready.watch,
            started=phases.started,
        )
        trained = train(job, progress, phases.tell)
    if trained.interrupted:
        where = f"step {trained.steps} of {trained.total_steps}"
        phases.note(f"left after {where}: {trained.stopped_because}; the same command with --resume goes on")
    elif config.early_stopping and trained.best_step not in (None, trained.steps):
        phases.note(f"the adapter of step {trained.best_step} is kept: its held-out loss was the lowest")
        fill_adapters(loaded, folder.best)
    path = keep_adapter(folder.adapter, loaded, base, config)
    phases.tell(Saved(path=str(path), step=trained.steps, kind="adapter"))
    return trained


def _keep_record(ready: _Ready, trained: Trained, results: tuple[Results, Results], phases: Phases) -> Record:
    """Write down what the run was."""
    before, after = results
    record = Record(
        version=version("ajusta"),
        model=model_facts(ready.base, ready.loaded),
        plan=ready.plan,
        data=ready.work.prepared.summary,
        trained=trained,
        phases=phases.measures,
        exam_results=(*before.exams, *after.exams),
        loss_results=(*before.losses, *after.losses),
        folder=str(ready.folder.path),
        adapter=str(ready.folder.adapter),
        environment=environment(ready.machine.device),
    )
    write_json(ready.folder.record, record.as_json())
    return record


def _load_tuned(config: Config, base: Base, place: RunFolder, listener: Listener) -> Loaded:
    device, machine = look_at_machine(config, Phases(listener).note)
    return load_base(
        base,
        device,
        dtype=machine.dtype,
        bits=config.bits,
        adapter=replace(adapter_spec(config), dropout=0.0),
        told=lambda done, total: listener(_progress("load", done, total)),
        continue_from=place.adapter,
    )


def _progress(phase: str, done: int, total: int) -> Progress:
    return Progress(phase=phase, done=done, total=total)
