"""The benchmark's text: a public-domain novel out of a package, or the project's own documents where it cannot be had.

Debian's `r-cran-janeaustenr` carries Jane Austen's novels as R's lazy-load database: records laid end to end, each a
4-byte big-endian length and a zlib stream of one serialized character vector. That vector is simple enough to be read
here, so no R and no package for R's files is needed.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "bench"
PACKAGE = "r-cran-janeaustenr"
DATABASE = Path("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
TITLE = "PRIDE AND PREJUDICE"
_STRSXP, _CHARSXP, _NA = 16, 9, -1  # R's types of a character vector and of one string in it; NA's length


def text(least_characters: int) -> tuple[str, str]:
    """Return (the text, where it is from), at least `least_characters` long, repeated where the source is shorter."""
    try:
        found, source = "\n".join(_novel(_database())), f"Pride and Prejudice, out of Debian's {PACKAGE}"
    except (OSError, subprocess.SubprocessError, LookupError, ValueError, struct.error, zlib.error) as error:
        found = "\n\n".join(path.read_text(encoding="utf-8") for path in _own_documents())
        source = f"the project's own documents, repeated: no novel here ({type(error).__name__}: {error})"
    while len(found) < least_characters:
        found += "\n\n" + found
    return found, source


def _own_documents() -> list[Path]:
    documents = sorted((ROOT / "demo" / "archive" / "documents").glob("*.txt"))
    return [*documents, ROOT / "src" / "ajusta" / "data" / "general.txt"]


def _database() -> bytes:
    """Return the package's database: the installed one, the one kept from before, or a fresh download."""
    for path in (Path("/") / DATABASE, CACHE / DATABASE):
        if path.is_file():
            return path.read_bytes()
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise LookupError("there is no apt-get here")
    CACHE.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "-qq", PACKAGE], cwd=CACHE, check=True, capture_output=True, timeout=120)
    archive = next(CACHE.glob(f"{PACKAGE}_*.deb"))
    subprocess.run(["dpkg-deb", "-x", str(archive), str(CACHE)], check=True, capture_output=True, timeout=60)
    return (CACHE / DATABASE).read_bytes()


def _novel(database: bytes) -> list[str]:
    for record in _records(database):
        lines = _character_vector(record)
        if lines[0] == TITLE:
            return lines
    raise LookupError(f"{PACKAGE} holds no {TITLE}")


def _records(database: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(database):
        stream = zlib.decompressobj()
        yield stream.decompress(database[at + 4 :])
        at = len(database) - len(stream.unused_data)


def _character_vector(record: bytes) -> list[str]:
    """Read one character vector of R's serialization (XDR, version 3); R Internals, section 1.8."""
    if record[:2] != b"X\n":
        raise ValueError("the record is not in R's XDR form")
    (encoding_length,) = struct.unpack_from(">i", record, 14)
    at = 18 + encoding_length
    flags, count = struct.unpack_from(">ii", record, at)
    if flags & 0xFF != _STRSXP:
        raise ValueError(f"the record is of R's type {flags & 0xFF}, not a character vector")
    at += 8
    lines = []
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", record, at)
        assert flags & 0xFF == _CHARSXP
        at += 8
        lines.append("" if length == _NA else record[at : at + length].decode("utf-8"))
        at += max(length, 0)
    return lines
