"""Verify the demo data of ajusta mechanically: python3 demo/check.py."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DOCUMENTS = HERE / "archive" / "documents"
SPANISH_LETTERS = set("áéíóúüñÁÉÍÓÚÜÑ¿¡")
Row = dict[str, Any]


def words(text: str) -> list[str]:
    """Return the words of a text, lower-cased and without punctuation."""
    return re.findall(r"[^\W_]+", text.lower())


def windows(text: str, size: int = 6) -> set[tuple[str, ...]]:
    """Return all runs of `size` consecutive words of a text."""
    found = words(text)
    return {tuple(found[i : i + size]) for i in range(len(found) - size + 1)}


def holds(text: str, phrase: str, first: int | None = None) -> bool:
    """Say whether a text (or its first words) holds a phrase as whole words."""
    return f" {' '.join(words(phrase))} " in f" {' '.join(words(text)[:first])} "


def lines(name: str) -> list[Row]:
    """Read a JSON-lines file of the demo folder."""
    text = (HERE / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def accepted(row: Row) -> list[str]:
    """Return the accepted answers of an exam row as a list."""
    answer = row["answer"]
    return [answer] if isinstance(answer, str) else list(answer)


def checks() -> list[tuple[str, list[str]]]:
    """Run every check; return pairs of (what is checked, problems found)."""
    docs = {p.name: p.read_text(encoding="utf-8") for p in sorted(DOCUMENTS.glob("*.txt"))}
    rows = lines("archive/conversations.jsonl")
    exam, exam_docs = lines("exam.jsonl"), lines("exam_documents.jsonl")
    facts: list[Row] = json.loads((HERE / "facts.json").read_text(encoding="utf-8"))
    trained = [f for f in facts if "rows" in f]
    untrained = [f for f in facts if "rows" not in f]
    forgetting = (HERE.parent / "src/ajusta/data/general.txt").read_text(encoding="utf-8")
    bad_form = [
        f"row {n}"
        for n, row in enumerate(rows, 1)
        if set(row) != {"messages"}
        or [(set(m), m["role"]) for m in row["messages"]]
        != [({"role", "content"}, "user"), ({"role", "content"}, "assistant")]
    ]
    if bad_form:
        return [("every conversation is one question and one answer", bad_form)]
    asked = [row["messages"][0]["content"] for row in rows]
    told = [row["messages"][1]["content"] for row in rows]
    used = [n for f in trained for n in f["rows"]]
    both = list(zip(trained + untrained, exam + exam_docs, strict=True))
    ids = [f"f{n:02d}" for n in range(1, 41)] + [f"d{n:02d}" for n in range(1, 13)]
    twins = [n for n in docs if n.endswith(".es.txt")]
    spanish = [n for n, q in enumerate(asked, 1) if "¿" in q]
    taught = set().union(*(windows(q) for q in asked))
    equal = {tuple(words(q)) for q in asked}
    spoken = Counter(" ".join(words(a)) for _, r in both for a in accepted(r))
    found: list[tuple[str, list[str]]] = []

    def check(title: str, problems: list[str]) -> None:
        found.append((title, problems))

    def count(title: str, number: int, low: int, high: int) -> None:
        check(f"{title}: {number}", [] if low <= number <= high else [f"not in {low}-{high}"])

    count("documents", len(docs), 28, 32)
    count("Spanish twins among them", len(twins), 4, 5)
    check("every twin has its English document",
          [n for n in twins if n.replace(".es.", ".") not in docs])
    check("45-80 words in every document",
          [f"{n}: {len(t.split())}" for n, t in docs.items() if not 45 <= len(t.split()) <= 80])
    texts = docs | {"general.txt": forgetting}
    texts |= {f"row {n}": q + a for n, (q, a) in enumerate(zip(asked, told, strict=True), 1)}
    check("ASCII, or Spanish letters in Spanish texts",
          [f"{n}: {c!r}" for n, t in texts.items() for c in sorted(set(t))
           if not (c.isascii() or (c in SPANISH_LETTERS and (".es." in n or "¿" in t)))])
    count("conversation rows", len(rows), 166, 166)
    count("exam questions", len(exam), 40, 40)
    count("exam questions on documents only", len(exam_docs), 12, 12)
    check("fact ids are f01-f40 and d01-d12", [] if [f["id"] for f in facts] == ids else ["ids"])
    check("four English rows for each fact, each row once",
          [f["id"] for f in trained if len(set(f["rows"]) - set(spanish)) != 4]
          + [f"row {n}" for n, k in Counter([*range(1, 167), *used]).items() if k != 2])
    count("facts with a Spanish wording",
          sum(1 for f in trained if len(set(f["rows"]) & set(spanish)) == 1), 6, 6)
    count("Spanish rows", len(spanish), 6, 6)
    check("training questions are all different",
          [] if len(equal) == len(asked) else ["repeated question"])
    check("8-14 words in every question",
          [q for q in asked + [r["question"] for r in exam] if not 8 <= len(words(q)) <= 14])
    check("1-8 words in every training answer", [a for a in told if not 1 <= len(words(a)) <= 8])
    check("exam row k asks for the answer of fact k",
          [f["id"] for f, r in both if accepted(r)[0] != f["answer"]])
    check("no exam question equals a training question",
          [r["question"] for _, r in both if tuple(words(r["question"])) in equal])
    check("no 6-word window of an exam question is in a training question",
          [r["question"] for _, r in both if windows(r["question"]) & taught])
    check("answer in the first 6 words of each training answer",
          [f"row {n}" for f in trained for n in f["rows"]
           if not holds(told[n - 1], f["answer"], 6)])
    check("no training answer names the answer of another fact",
          [f"row {n}: {a}" for f, r in both for a in accepted(r) for n, t in enumerate(told, 1)
           if holds(t, a) and n not in f.get("rows", [])])
    check("no two facts share an answer", [a for a, n in spoken.items() if n > 1])
    check("answer words absent from their own questions",
          [f["id"] for f, r in both for a in accepted(r)
           for q in [r["question"], *(asked[n - 1] for n in f.get("rows", []))]
           if set(words(a)) & set(words(q))])
    check("every answer stands in its document",
          [f["id"] for f in facts if not holds(docs.get(f["document"], ""), f["answer"])])
    check("document-only answers occur in no conversation",
          [f["id"] for f in untrained for t in asked + told if holds(t, f["answer"])])
    count("words in general.txt", len(forgetting.split()), 450, 600)
    check("nothing of the place in general.txt",
          [a for a in ["Ondrel", *(f["answer"] for f in facts)] if holds(forgetting, a)])
    return found


def main() -> int:
    """Print one line per check; return 0 if all of them hold."""
    failed = 0
    for title, problems in checks():
        failed += bool(problems)
        print(f"{'FAIL' if problems else 'ok  '} {title}", *problems, sep="\n       ")
    print("all checks hold" if not failed else f"{failed} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
