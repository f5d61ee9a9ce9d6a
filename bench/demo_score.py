"""The demo's exam over several seeds, and its control: the same training with every fact's answers exchanged.

    python bench/demo_score.py --seeds 0 1 2          the demo as it is
    python bench/demo_score.py --control --seeds 0    each fact's rows carry another fact's answers; none is left true
    ... --control --documents                         the same, beside the documents, which still tell the truth

The control shows that the exam measures what was learned from the rows, not what could be guessed. Each run is the
command itself in a process of its own; minutes each on two cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ajusta.stages.device import processor_name

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
SHIFT = 17  # fact n is told the answers of fact n + 17; 17 and 40 have no common divisor, so none keeps its own


def exchanged_archive(folder: Path) -> Path:
    """Write the archive with every fact's answers moved to another fact; return it."""
    archive = folder / "archive"
    shutil.copytree(DEMO / "archive", archive)
    rows = [json.loads(line) for line in (archive / "conversations.jsonl").read_text("utf-8").splitlines()]
    facts = [fact for fact in json.loads((DEMO / "facts.json").read_text("utf-8")) if "rows" in fact]
    told = [[rows[number - 1]["messages"][1]["content"] for number in fact["rows"]] for fact in facts]
    for place, fact in enumerate(facts):
        others = told[(place + SHIFT) % len(facts)]
        for turn, number in enumerate(fact["rows"]):
            rows[number - 1]["messages"][1]["content"] = others[turn % len(others)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (archive / "conversations.jsonl").write_text(text, "utf-8")
    return archive


def run(seed: int, control: bool, documents: bool) -> dict[str, object]:
    """Train and examine once; return the scores, the tokens and the seconds."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        words = [sys.executable, "-m", "ajusta", "train", "--config", str(DEMO / "demo.yaml"), "--out", str(out)]
        words += ["--set", f"seed={seed}"]
        if control:
            archive = exchanged_archive(Path(place))
            words += ["--data", str(archive if documents else archive / "conversations.jsonl")]
        began = time.monotonic()
        subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        record = json.loads((out / "record.json").read_text("utf-8"))
    scores = {f"{each['exam']} {each['when']}": f"{each['correct']}/{each['total']}" for each in record["exam_results"]}
    return {
        "seed": seed,
        "control": control,
        "true_documents": documents or not control,
        "cpu": processor_name(),
        **scores,
        "tokens": record["trained"]["tokens"],
        "training_seconds": round(record["trained"]["seconds"], 1),
        "whole_seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Run the seeds asked for and print one row of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--control", action="store_true", help="exchange the answers between facts")
    parser.add_argument("--documents", action="store_true", help="leave the true documents in the control")
    chosen = parser.parse_args()
    for seed in chosen.seeds:
        print(json.dumps(run(seed, chosen.control, chosen.documents), ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
