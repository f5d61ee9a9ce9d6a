"""What the helpers of the tests do: no torch, so that they are there at once."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection


def take(size: int, connection: Connection) -> None:
    connection.send("ready")
    connection.recv()
    try:
        held = bytearray(size)
    except MemoryError:
        connection.send("refused")
        return
    connection.send(f"held {len(held)}")


def leave(code: int, connection: Connection) -> None:
    os._exit(code)


def never(connection: Connection) -> None:
    connection.recv()
