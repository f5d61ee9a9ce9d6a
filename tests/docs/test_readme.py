"""The README, run as it stands: every shell and Python block, in order, with a tiny model in the place of the demo's.

A block that is not run says so in a comment above it, with the reason: `<!-- not run: ... -->`. A block with
`file=NAME` is written to that file first. The tables between markers are compared with what the program says.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_runs
from transformers import LlamaConfig

from ajusta.blocks.optimizer import AdamWSettings
from ajusta.cli.main import app, main
from ajusta.data.exam import read_exam
from ajusta.data.general import general_rows
from ajusta.data.json_files import read_jsonl
from ajusta.data.pack import lay_out
from ajusta.engine.assemble import AdapterSpec
from ajusta.memory.dtypes import DTYPES
from ajusta.planning.request import imagined_demand
from ajusta.planning.search import LOSS_BYTES
from ajusta.planning.trace import Subject, Traced
from ajusta.spec.config import describe, load_config
from ajusta.spec.plan import Rung
from ajusta.spec.settings_file import write_value
from ajusta.stages import device, work

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "demo/model/SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Block:
    language: str
    file: str | None
    text: str
    not_run: str | None

    @property
    def runs(self) -> bool:
        return self.language in ("sh", "python") and self.not_run is None


def blocks(page: str) -> list[Block]:
    pattern = r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<info>[^\n]+)\n(?P<text>.*?)^```$"
    found = []
    for match in re.finditer(pattern, page, flags=re.MULTILINE | re.DOTALL):
        language, *rest = match["info"].split()
        file = next((part.removeprefix("file=") for part in rest if part.startswith("file=")), None)
        found.append(Block(language=language, file=file, text=match["text"], not_run=match["why"]))
    return found


BLOCKS = blocks(README)


def exam_in(block: Block) -> bool:
    return block.file is not None and block.file.startswith("questions")


def between(name: str) -> str:
    match = re.search(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", README, flags=re.DOTALL)
    assert match, name
    return match[1].strip()


def type_command(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    words = shlex.split(line)
    assert words[0] == "ajusta", line
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code if isinstance(left.value.code, int) else 0


def test_every_block_is_of_a_known_kind() -> None:
    assert README.count("```") == 2 * len(BLOCKS)
    assert {block.language for block in BLOCKS} <= {"sh", "python", "yaml", "jsonl"}
    assert [block.text.strip() for block in BLOCKS if block.not_run] == [
        "make demo",
        "make test",
        "source .venv/bin/activate",
    ]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing, and read one row of the general text: a dozen commands are typed."""
    rows = general_rows()[:1]
    monkeypatch.setattr(work, "general_rows", lambda: rows)
    monkeypatch.setattr(device, "matmul_rate", lambda dtype, where: float(dtype.itemsize))


@pytest.mark.usefixtures("quick")
def test_every_block_runs_in_the_order_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_runs.write_model(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    codes: dict[str, int] = {}
    for block in BLOCKS:
        text = block.text.replace(MODEL, str(model))
        if block.file is not None:
            file = tmp_path / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        if block.language == "jsonl":
            assert read_exam(tmp_path / str(block.file)) if exam_in(block) else not read_jsonl(text, "README").dropped
        elif block.language == "yaml":
            load_config(tmp_path / str(block.file))
        elif block.runs and block.language == "python":
            exec(compile(text, "README", "exec"), {})
        elif block.runs:
            for line in text.splitlines():
                codes[line] = type_command(line, monkeypatch)
                assert codes[line] == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "what each technique saved" in said and "exam questions" in said
    names = {path.name for path in (tmp_path / "runs" / "second").iterdir()} - {".lock"}
    assert names <= {name.rstrip("/") for name in re.findall(r"^\| `([\w./]+)` \|", README, flags=re.MULTILINE)}
    assert {path.name for path in (tmp_path / "runs" / "papers").iterdir()} >= {"export-adapter", "export-merged"}


def test_every_command_is_shown() -> None:
    shown = " ".join(block.text for block in BLOCKS)
    assert [command.callback.__name__ for command in app.registered_commands if command.callback] == [
        "train", "chat", "evaluate", "export", "plan", "explain", "doctor", "data"
    ]  # fmt: skip
    for command in app.registered_commands:
        assert command.callback is not None and f"ajusta {command.callback.__name__}" in shown


def settings_table() -> str:
    rows = ["| setting | default | it may be | what it is |", "|---|---|---|---|"]
    for row in describe():
        unit = f" [{row.unit}]" if row.unit else ""
        default = write_value(row.default) if row.default not in ("", ()) else ""
        rows.append(f"| `{row.name}` | {default} | {row.expects} | {row.help}{unit} |")
    return "\n".join(rows)


def test_the_table_of_settings_is_the_program_s_own() -> None:
    assert between("settings") == settings_table(), "put this between the markers:\n" + settings_table()


def traced_table() -> str:
    """Trace one step of 512 tokens in fp32 of a model of the demo model's shape, kept whole and recomputed."""
    config = load_config(overrides={"batch_size": 1, "max_length": 512}, required=())
    chunk = LOSS_BYTES // (2 * 4 * SHAPE["vocab_size"])
    rows = ["| weights | blocks recomputed | kept from forwards to backwards | peak of the step |", "|---|---|---|---|"]
    for bits in ("none", "nf4"):
        subject = Subject(
            config=LlamaConfig(**SHAPE),
            source=None,
            dtype=DTYPES["fp32"],
            bits=bits,
            adapter=AdapterSpec(rank=16, alpha=16.0),
            optimizer=AdamWSettings(),
        )
        traced = Traced(subject)
        micro = lay_out(imagined_demand(config, SHAPE["vocab_size"], 512).examples)
        assert traced.adapter_parameters == 4_884_480
        for recompute in (0, 30):
            rung = Rung(recompute_blocks=recompute, micro_tokens=512, loss_chunk=chunk, peak_bytes=0)
            peak = traced.step((micro,), rung)
            saved = peak.by_category["saved activations"] / 2**20
            name = "fp32" if bits == "none" else bits
            rows.append(f"| {name} | {recompute} of 30 | {saved:.1f} MiB | {peak.peak_bytes / 2**20:.0f} MiB |")
    return "\n".join(rows)


@pytest.mark.slow
def test_the_traced_figures_are_the_planner_s_own() -> None:
    table = traced_table()
    assert between("traced") == table, "put this between the markers:\n" + table


def test_the_figures_that_are_arithmetic() -> None:
    hidden, inner, width = 576, 1536, 192
    sizes = [(hidden, hidden), (hidden, width), (hidden, width), (hidden, hidden)]
    sizes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    linears = 30 * sum(a * b for a, b in sizes)
    trained = 30 * sum(16 * (a + b) for a, b in sizes)
    whole = linears + 49_152 * hidden + 61 * hidden
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    mib: Callable[[float], float] = lambda count: count / 2**20  # noqa: E731
    for figure in (
        f"{whole:,} numbers",
        f"have {trained:,}.",
        f"{linears:,} numbers",
        f"{mib(trained * 16):.1f} MiB",
        f"{mib(trained * 4):.1f} MiB",
        f"{whole * 16 / 2**30:.2f} GiB",
        f"{bits:.3f} bits",
        f"{mib(linears * 4):.0f} MiB in\nfp32",
        f"{mib(linears * bits / 8):.1f} MiB in NF4",
        f"{mib(linears):.0f} MiB and",
        f"{mib(49_152 * hidden * 4):.0f} MiB here",
        f"{mib(512 * hidden * 4):.3f} MiB",
        f"{16 * (hidden + inner):,} trained",
        f"{hidden * inner:,} frozen",
    ):
        assert figure in README, figure
