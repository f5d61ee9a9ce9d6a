"""The `ajusta` command: parse, call one function of `ajusta.run`, show what it returns, answer for every failure."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ajusta.base.errors import EXIT_DOES_NOT_FIT, EXIT_OURS, AjustaError, UserError, nearest
from ajusta.cli.speech import be_lenient, complain, progress, say, say_json, shows_colour, speaks_unicode

FORMS = ("adapter", "merged")
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class Interrupted(AjustaError):
    """Ctrl-C."""

    exit_code = EXIT_INTERRUPTED


class Commands(TyperGroup):
    """The group of commands; it takes Ctrl-C before typer does, whose answer changed between releases."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            training = ctx.invoked_subcommand == "train"
            hint = "; the same command with --resume goes on from the last saved state" if training else ""
            raise Interrupted(f"stopped by Ctrl-C{hint}") from None


app = typer.Typer(
    cls=Commands,
    name="ajusta",
    help="Fine-tune a language model on your own data on one GPU (or none), and never run out of memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="A folder, a .gguf file or a hub name.")
]
PlannedModelOption = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="As for train, or a config.json, or a known name.")
]
DataOption = Annotated[
    list[Path] | None, typer.Option("--data", "-d", metavar="PATH", help="File or folder to learn from; may repeat.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML file of settings.")]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Memory that the run may use, such as 10GiB; or auto.")
]
BitsOption = Annotated[
    str | None, typer.Option("--bits", metavar="none|int8|nf4", help="How the frozen weights are stored.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, such as lora.r=8; may repeat."),
]
LengthOption = Annotated[
    str | None, typer.Option("--max-length", metavar="TOKENS", help="Longest text that the model sees at once.")
]
ExamOption = Annotated[
    list[Path] | None, typer.Option("--exam", metavar="FILE", help="Questions with known answers; may repeat.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write the result as JSON.")]
FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")]


def _version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        from ajusta import __version__

        say(f"ajusta {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fine-tune a language model on your own data on one GPU (or none), and never run out of memory."""


@app.command()
def train(
    model: ModelOption = None,
    data: DataOption = None,
    config: ConfigOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder of the run.")] = None,
    exam: ExamOption = None,
    epochs: Annotated[str | None, typer.Option(metavar="N", help="Times that each example is seen.")] = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="Steps of the optimizer, instead.")] = None,
    memory: MemoryOption = None,
    bits: BitsOption = None,
    set_: SetOption = None,
    stop_after: Annotated[
        str | None, typer.Option(metavar="TIME", help="Save and leave after this time, such as 3h.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last saved state.")] = False,
) -> None:
    """Tune a model on your data; the run folder holds everything."""
    from ajusta.cli.settings import make_config

    flags = {"model": model, "data": data, "out": out, "exam": exam, "epochs": epochs, "steps": steps}
    flags |= {"memory": memory, "bits": bits, "stop_after": stop_after}
    settings = make_config(config, flags, set_ or (), required=("model", "data"))
    from ajusta.cli.door import the_run
    from ajusta.report.show import outcome_text

    with progress() as listener:
        record = the_run().finetune(settings, listener, resume=resume)
    say(outcome_text(record))


@app.command()
def chat(
    folder: FolderArgument,
    question: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ask this and leave; may repeat.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(metavar="X", min=0.0, help="0 for always the likeliest word.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Where chance starts from.")] = 0,
) -> None:
    """Talk with a tuned model."""
    from ajusta.cli.conversation import ask_each, converse
    from ajusta.cli.door import the_run

    with progress() as listener:
        speaker = the_run().chat(folder, listener)
    if question:
        ask_each(speaker, question, max_tokens=max_tokens, temperature=temperature, seed=seed)
    else:
        converse(speaker, max_tokens=max_tokens, temperature=temperature, seed=seed)


@app.command()
def evaluate(
    folder: FolderArgument,
    data: DataOption = None,
    exam: ExamOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a tuned model again, on its own held-out text or on other data."""
    from ajusta.cli.door import the_run
    from ajusta.report.show import outcome_text

    with progress() as listener:
        record = the_run().evaluate(folder, listener, data=tuple(data or ()), exams=tuple(exam or ()))
    if as_json:
        say_json(record)
    else:
        say(outcome_text(record))


def _check_form(form: str) -> None:
    """Refuse a form that nothing writes."""
    if form not in FORMS:
        raise UserError(f"--format is {form!r}; expected {' or '.join(FORMS)}{nearest(form, FORMS)}")


@app.command()
def export(
    folder: FolderArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Where to write it.")] = None,
    form: Annotated[str, typer.Option("--format", metavar="adapter|merged", help="What to write.")] = "adapter",
) -> None:
    """Write a tuned model in a form that other programs open."""
    _check_form(form)
    from ajusta.cli.door import the_run

    with progress() as listener:
        where = the_run().export(folder, out, form, listener)
    say(str(where))


@app.command()
def plan(
    model: PlannedModelOption = None,
    data: DataOption = None,
    config: ConfigOption = None,
    memory: MemoryOption = None,
    gpu: Annotated[str | None, typer.Option(metavar="CARD", help="Plan for this card, such as 'RTX 3060'.")] = None,
    bits: BitsOption = None,
    max_length: LengthOption = None,
    set_: SetOption = None,
    all_gpus: Annotated[bool, typer.Option("--all-gpus", help="One line for each card that is known.")] = False,
    max_context: Annotated[bool, typer.Option("--max-context", help="The longest text that fits.")] = False,
    largest_model: Annotated[bool, typer.Option("--largest-model", help="The largest known model that fits.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a run would take, and how it would be made to fit."""
    from ajusta.cli.questions import Question, ask
    from ajusta.cli.settings import make_config

    asked = Question.of(all_gpus=all_gpus, max_context=max_context, largest_model=largest_model, gpu=gpu)
    flags = {"model": model, "data": data, "memory": memory, "bits": bits, "max_length": max_length}
    required = () if asked is Question.LARGEST_MODEL else ("model",)
    settings = make_config(config, flags, set_ or (), required=required)
    fits = ask(asked, settings, gpu, as_json=as_json)
    if not fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


@app.command()
def explain(
    model: PlannedModelOption = None,
    data: DataOption = None,
    config: ConfigOption = None,
    memory: MemoryOption = None,
    gpu: Annotated[str | None, typer.Option(metavar="CARD", help="Show where this card ends.")] = None,
    bits: BitsOption = None,
    max_length: LengthOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the memory of a step goes, from full fine-tuning down to all techniques together, and why."""
    from ajusta.cli import questions
    from ajusta.cli.settings import make_config

    flags = {"model": model, "data": data, "memory": memory, "bits": bits, "max_length": max_length}
    settings = make_config(config, flags, set_ or (), required=("model",))
    others = [pair for pair in set_ or () if pair.partition("=")[0].strip() != "bits"]
    typed = {"--model": model, "--data": data, "--config": config, "--memory": memory, "--gpu": gpu}
    questions.explain(settings, gpu, {**typed, "--max-length": max_length, "--set": others}, as_json=as_json)


@app.command()
def doctor(
    as_json: JsonOption = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the device for later plans, and keep the figures.")
    ] = False,
) -> None:
    """Look at this machine: what is here, what is missing, what to do about it."""
    from ajusta.cli.door import the_look
    from ajusta.report.show import doctor_text

    with progress() as listener:
        findings = the_look().doctor(listener, measure=measure)
    if as_json:
        say_json(findings)
    else:
        say(doctor_text(findings))


@app.command()
def data(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files, or folders of them.")],
    model: ModelOption = None,
    max_length: LengthOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is read from your data, what is dropped and why, and what the model would be trained on."""
    from ajusta.cli.settings import make_config

    flags = {"data": paths, "model": model, "max_length": max_length}
    settings = make_config(None, flags, set_ or (), required=("model", "data"))
    from ajusta.cli.door import the_look
    from ajusta.report.show import data_text

    with progress() as listener:
        seen = the_look().look_at_data(settings, listener)
    if as_json:
        say_json({"summary": seen.summary, "histogram": seen.histogram, "sample": seen.sample})
    else:
        say(data_text(seen, colour=shows_colour(), unicode=speaks_unicode()))


def main() -> None:
    """Run the command that was typed and exit: 0 done, 2 the person's mistake, 3 does not fit, 1 ours, 130 Ctrl-C."""
    be_lenient()
    sys.exit(answer_for(app))


def answer_for(command: Any) -> int:
    """Run a command and return its exit code; whatever goes wrong becomes one message on standard error."""
    try:
        command(prog_name="ajusta")
    except AjustaError as error:
        complain(f"ajusta: {error}")
        return _after(error.exit_code)
    except Exception as error:  # broad: the last resort of the program, so that nobody is shown a bare traceback
        complain(
            f"ajusta: something went wrong that should not: {type(error).__name__}: {error}\n"
            "This is a mistake in ajusta. AJUSTA_DEBUG=1 shows where; please report it with that output."
        )
        return _after(EXIT_OURS)
    return 0


def _after(code: int) -> int:
    """Show the traceback to those who asked for it, and hand the exit code on."""
    if os.environ.get("AJUSTA_DEBUG"):
        traceback.print_exc()
    return code
