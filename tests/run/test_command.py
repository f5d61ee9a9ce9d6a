"""The real command from end to end, in a process of its own that can reach nothing and write nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import FAST, flags, write_exam

# Any connection, any name that is looked up and any file opened for writing outside of the allowed place is an error.
FORBID = """
import os, sys
PLACE, LOG = os.environ["ALLOWED"], os.environ["LOG"]

def watch(event, given):
    bad = event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
    if event == "open" and isinstance(given[0], (str, bytes)) and given[1] and set(str(given[1])) & set("wax+"):
        path = os.path.abspath(os.fsdecode(given[0]))
        bad = not path.startswith((PLACE, "/dev/", "/proc/self", "/memfd"))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") and given[-1] == -1:  # else beside an open folder
        bad = not os.path.abspath(os.fsdecode(given[0])).startswith((PLACE, "/proc/nohome"))
    if bad:
        with os.fdopen(os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "w") as file:
            file.write(f"{event} {given!r}\\n")

sys.addaudithook(watch)
"""
# Several commands in one process, since importing torch takes longer than all of them.
DRIVER = """
import contextlib, io, json, sys
from ajusta.cli.main import main
results = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["ajusta", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


def environment(place: Path) -> dict[str, str]:
    hooks = place / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(FORBID, encoding="utf-8")
    temporary = place / "tmp"
    temporary.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "TORCH"))}
    return {
        **kept,
        "HOME": "/proc/nohome",  # nobody can write there, not even root
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(hooks),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "ALLOWED": str(place),
        "LOG": str(place / "log"),
    }


def commands(model: Path, data: Path, place: Path) -> list[list[str]]:
    exam, run = write_exam(place / "exam.jsonl"), str(place / "run")
    source = ["-m", str(model), "-d", str(data)]
    quick = flags({**FAST, "steps": 3, "bits": "nf4"})
    return [
        ["train", *source, "-o", run, "--exam", str(exam), *quick],
        ["train", *source, "-o", run, "--exam", str(exam), *quick, "--resume"],
        ["evaluate", run, "--json"],
        ["evaluate", run, "-d", str(data / "keys.jsonl"), "--exam", str(exam)],
        ["chat", run, "--question", "Where is key 3?", "--max-tokens", "8"],
        ["export", run, "-o", str(place / "adapter")],
        ["export", run, "-o", str(place / "merged"), "--format", "merged"],
        ["plan", *source, *quick, "--json"],
        ["plan", *source, *quick, "--memory", "1MiB"],
        ["data", str(data), "-m", str(model)],
        ["doctor"],
        ["train", *source, "-o", run, *quick],
        ["train", *source, "-o", str(place / "second"), "--epochs", "many"],
        ["chat", str(place)],
    ]


def check(results: list[tuple[int, str, str]], place: Path) -> None:
    codes = [code for code, _, _ in results]
    assert codes == [0] * 8 + [3, 0, 0, 2, 2, 2], [said for code, _, said in results if code]
    assert not any("Traceback" in said + out for _, out, said in results)
    (train, again, measured, other, chat, adapter, merged, plan, tight, account, doctor, *refused) = results
    for _, out, said in (train, again):
        assert "before -> after" in out and "exam exam" in out and "loss on heldout" in out
        assert "the adapter is in" in out and "step" not in out
        assert "plan took" in said and "because" in said and "before -> after" not in said
    assert "step 3/3" in train[2] and "step 3/3" not in again[2]
    assert {row["name"] for row in json.loads(measured[1])["results"]["losses"]} == {"heldout", "general"}
    assert "exam exam" in other[1]
    assert chat[1].endswith("\n") and "load" not in chat[1]
    assert (adapter[1], merged[1]) == (f"{place / 'adapter'}\n", f"{place / 'merged'}\n")
    assert json.loads(plan[1])["fits"] is True
    assert "does not fit" in tight[1] and "missing" in tight[1]
    assert "examples to train on" in account[1] and "[[" in account[1]
    assert "device" in doctor[1]
    assert all(out == "" and any(line.startswith("ajusta: ") for line in said.splitlines()) for _, out, said in refused)
    run = place / "run"
    names = {path.name for path in run.iterdir()} - {".lock"}
    files = {"config.yaml", "plan.json", "before.json", "record.json", "events.jsonl"}
    assert names == files | {"adapter", "tokenizer", "checkpoints", "exams"}
    assert {path.name for path in (run / "exams").iterdir()} == {"exam-before.jsonl", "exam-after.jsonl"}
    lines = (run / "exams" / "exam-after.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line) for line in lines]
    assert all(set(row) == {"question", "expected", "given", "correct"} for row in answers) and len(answers) == 2


def test_the_whole_cycle_needs_nothing_but_its_own_folder(model: Path, data: Path, tmp_path: Path) -> None:
    typed = commands(model, data, tmp_path)
    words = [sys.executable, "-W", "error::ResourceWarning", "-c", DRIVER, json.dumps(typed)]
    done = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    log = tmp_path / "log"
    assert not log.exists(), log.read_text(encoding="utf-8")
    check([tuple(result) for result in json.loads(done.stdout)], tmp_path)
    assert {path.name.split("_")[0] for path in (tmp_path / "tmp").iterdir()} <= {"torchinductor"}


@pytest.mark.slow
def test_each_command_by_itself(model: Path, data: Path, tmp_path: Path) -> None:
    ajusta = Path(sys.executable).parent / "ajusta"
    env, results = environment(tmp_path), []
    for words in commands(model, data, tmp_path):
        done = subprocess.run([str(ajusta), *words], env=env, capture_output=True, text=True, timeout=500, check=False)
        results.append((done.returncode, done.stdout, done.stderr))
    check(results, tmp_path)
    log = tmp_path / "log"
    assert not log.exists(), log.read_text(encoding="utf-8")
