"""The fixed general text, written for this project: its loss before and after shows what the model forgot."""

from __future__ import annotations

from importlib.resources import files

from ajusta.spec.data import Row


def general_rows() -> tuple[Row, ...]:
    """Return the text, one row a piece; never trained on, the same in every release of one major version."""
    text = files("ajusta.data").joinpath("general.txt").read_text(encoding="utf-8")
    pieces = [piece.strip() for piece in text.split("\n\n") if piece.strip()]
    return tuple(Row(source=f"general.txt:{number}", text=piece) for number, piece in enumerate(pieces, start=1))
