"""Talking with a tuned model: a loop over lines in a terminal, or questions given on the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajusta.cli.door import Speaker

HELP = "Type a message. /new starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def ask_each(speaker: Speaker, questions: Sequence[str], *, max_tokens: int, temperature: float, seed: int) -> None:
    """Ask each question by itself and write its answer; with several, the question stands above it."""
    for question in questions:
        if len(questions) > 1:
            sys.stdout.write(f"> {question}\n")
        messages = [{"role": "user", "content": question}]
        _write_pieces(speaker.answer(messages, max_tokens=max_tokens, temperature=temperature, seed=seed))


def converse(speaker: Speaker, *, max_tokens: int, temperature: float, seed: int) -> None:
    """Answer line after line, each with what was said before it, until /exit or the end of the input."""
    typed = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    if typed:
        _edit_lines()
        sys.stdout.write(HELP + "\n")
    messages: list[dict[str, str]] = []
    for line in _lines(typed):
        if line == "/exit":
            return
        if line == "/new":
            messages = []
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        pieces = speaker.answer(list(messages), max_tokens=max_tokens, temperature=temperature, seed=seed)
        messages.append({"role": "assistant", "content": _write_pieces(pieces)})


def _edit_lines() -> None:
    """Let the arrow keys work in what is typed, where the system has the library for it (Windows has not)."""
    try:
        import readline  # noqa: F401 -- importing it is what switches it on
    except ImportError:
        return


def _lines(typed: bool) -> Iterator[str]:
    """Yield lines until the input ends; a prompt is shown only to a person."""
    while True:
        try:
            line = input("> " if typed else "")
        except (EOFError, RuntimeError):  # RuntimeError: there is no standard input at all
            if typed:
                sys.stdout.write("\n")
            return
        yield line.strip()


def _write_pieces(pieces: Iterator[str]) -> str:
    """Write an answer as it comes and return it whole; Ctrl-C keeps what has come so far."""
    said: list[str] = []
    try:
        for piece in pieces:
            said.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not sys.stdin or not sys.stdin.isatty():
            raise
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(said)
