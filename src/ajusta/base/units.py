"""Sizes and durations, read and written. A size is in powers of two everywhere a person sees it."""

from __future__ import annotations

import re

from ajusta.base.errors import UserError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_SIZE_UNITS = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
_TIME_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str | int) -> int:
    """Read `12GiB`, `12 GB`, `800M` or a plain number of bytes; every unit is a power of two.

    Raises:
        UserError: the text is no size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?)(?:i?b)?\s*", str(text).lower())
    if match is None:
        raise UserError(f"{text!r} is no size; expected a number with a unit; write 10GiB, 800MiB or 6000000000")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def show_bytes(count: float) -> str:
    """Write bytes as `1.52 GiB`, `340 MiB`, `12 KiB`: three digits that matter."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            value = count / size
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{count:.0f} B"


def parse_seconds(text: str | float) -> float:
    """Read `3h`, `90m`, `1h30m`, `45s`, what `show_seconds` writes (`2 h 05 min`), or a plain number of seconds.

    Raises:
        UserError: the text is no duration.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    whole = str(text).strip().lower()
    if re.fullmatch(r"(\d+(\.\d+)?\s*(s|m|min|h|d)\s*)+", whole) is None:
        raise UserError(f"{text!r} is no duration; expected a number with a unit; write 3h, 90m or 1h30m")
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([smhd])", whole)
    return sum(float(number) * _TIME_UNITS[unit] for number, unit in parts)


def show_seconds(seconds: float) -> str:
    """Write a duration as `45 s`, `3 min 20 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def show_time(seconds: float) -> str:
    """Write how long something takes, with three digits that matter below a minute: `0.0123 s`, `3 min 20 s`."""
    return f"{seconds:.3g} s" if seconds < 59.95 else show_seconds(seconds)
