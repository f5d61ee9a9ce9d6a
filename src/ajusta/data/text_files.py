r"""Plain text and Markdown: one file is one document. Line ends become `\n`; nothing else is changed."""

from __future__ import annotations

from ajusta.base.errors import DataError
from ajusta.data.found import Found
from ajusta.spec.data import Row


def read_text(text: str, label: str) -> Found:
    """Return the whole file as one document.

    Raises:
        DataError: the file is blank or holds a NUL character.
    """
    if not text.strip():
        raise DataError("the file is empty")
    if "\0" in text:
        raise DataError(f"NUL byte at character {text.index(chr(0))}; the file is binary or damaged; delete the byte")
    whole = text.replace("\r\n", "\n").replace("\r", "\n")
    return Found(rows=(Row(source=f"{label}:1", text=whole),))
