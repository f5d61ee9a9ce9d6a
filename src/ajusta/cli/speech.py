"""How the command line speaks: results on standard output, progress on standard error, one message for a refusal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajusta.report.terminal import TerminalListener


def be_lenient() -> None:
    """Let no character stop a command: what a terminal cannot show, or what is no text, is written as its escape."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a stream put in place by a test or a host may have none
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Write a result."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_json(value: object) -> None:
    """Write a result for a program."""
    import json

    from ajusta.report.show import as_plain

    say(json.dumps(as_plain(value), indent=2))


def complain(text: str) -> None:
    """Write why the command stops."""
    sys.stdout.flush()
    sys.stderr.write(text.rstrip() + "\n")
    sys.stderr.flush()


def speaks_unicode() -> bool:
    """Whether standard output can show block characters."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def shows_colour() -> bool:
    """Whether standard output is a terminal whose owner wants colour."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


@contextmanager
def progress() -> Iterator[TerminalListener]:
    """Give a listener that shows progress on standard error, and close its view at the end."""
    from ajusta.report.terminal import TerminalListener

    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    with TerminalListener(sys.stderr, live) as listener:
        yield listener
