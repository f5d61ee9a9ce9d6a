"""Bytes of a file become text: UTF-8, UTF-16 with its mark, else Windows-1252, only where that is certain.

A fallback that never fails turns a damaged file into nonsense in silence; so ours fails: Windows-1252 is taken only if
each byte has a meaning there and the file is not mostly good UTF-8 with a few broken bytes.
"""

from __future__ import annotations

import codecs
import re

from ajusta.base.errors import DataError

_MARKS = (
    (codecs.BOM_UTF8, "utf-8", "UTF-8 with a byte order mark"),
    (codecs.BOM_UTF32_LE, "utf-32-le", "UTF-32 LE"),  # before UTF-16 LE, whose mark is its beginning
    (codecs.BOM_UTF32_BE, "utf-32-be", "UTF-32 BE"),
    (codecs.BOM_UTF16_LE, "utf-16-le", "UTF-16 LE"),
    (codecs.BOM_UTF16_BE, "utf-16-be", "UTF-16 BE"),
)
_MULTIBYTE = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_HIGH = re.compile(rb"[\x80-\xff]")


def decode(data: bytes) -> tuple[str, str | None]:
    """Return the text without its byte order mark, and the name of the encoding where it is not plain UTF-8.

    Raises:
        DataError: the bytes are no text; the message names the offset in the file.
    """
    for mark, codec, name in _MARKS:
        if data.startswith(mark):
            try:
                return data[len(mark) :].decode(codec), name
            except UnicodeDecodeError as error:
                raise DataError(f"{name}, but byte {error.start + len(mark)} cannot be decoded") from error
    if data.count(0) * 4 > len(data):
        raise DataError(f"NUL byte at offset {data.index(0)}: binary, or UTF-16 without a mark; save it as UTF-8")
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError as error:
        return _windows(data, error), "Windows-1252"


def _windows(data: bytes, utf8_error: UnicodeDecodeError) -> str:
    offset = utf8_error.start
    good = sum(len(match) for match in _MULTIBYTE.findall(data))
    high = len(_HIGH.findall(data))
    if good * 2 > high:
        raise DataError(f"UTF-8 with a broken byte 0x{data[offset]:02x} at offset {offset}; save it again as UTF-8")
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError as error:
        message = f"byte 0x{data[error.start]:02x} at offset {error.start} is neither UTF-8 nor Windows-1252"
        raise DataError(f"{message}; save the file as UTF-8") from error
