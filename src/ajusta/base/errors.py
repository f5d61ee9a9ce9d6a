"""Every way in which ajusta refuses, and the exit code that goes with it.

A message has three parts, in this order: what came, what was expected, what to type or do next.
Own mistakes are `assert`s, never one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK = 0
EXIT_OURS = 1
EXIT_USER = 2
EXIT_DOES_NOT_FIT = 3


class AjustaError(Exception):
    """A refusal that a person can act on; `exit_code` is what the command line returns."""

    exit_code = EXIT_OURS


class UserError(AjustaError):
    """Something the person gave is wrong: a file, a setting, a name."""

    exit_code = EXIT_USER


class ConfigError(UserError):
    """One or more settings are wrong; the message lists all of them at once."""


class DataError(UserError):
    """The data cannot be used as it is; the message names file and line."""


class ModelError(UserError):
    """The model folder, file or name cannot be used."""


class DoesNotFit(AjustaError):
    """No plan fits into the memory given; the message holds the missing bytes and the ways out."""

    exit_code = EXIT_DOES_NOT_FIT


class NumbersGoneBad(AjustaError):
    """Loss or gradients stopped being finite for too long."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known name, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return f"; did you mean {matches[0]!r}?" if matches else ""
