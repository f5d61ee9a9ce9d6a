"""What every test has: no network, fixed chance. Set before torch or transformers is imported by anything."""

from __future__ import annotations

import ipaddress
import os
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Slow machines are no failures, and a run says the same as the run before it.
hypothesis.settings.register_profile("ajusta", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("ajusta")


def _is_loopback(address: Any) -> bool:
    """Whether a socket's address stays on this machine; a path is a Unix socket and does."""
    if not isinstance(address, tuple):
        return True
    host = address[0]
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name that would have to be looked up outside


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test reach anything but this machine: ajusta promises that nothing leaves it."""

    def guarded(connect: Callable[..., Any]) -> Callable[..., Any]:
        def connect_if_local(self: socket.socket, address: Any) -> Any:
            if not _is_loopback(address):
                raise AssertionError(f"a test tried to reach {address!r}; only this machine may be reached")
            return connect(self, address)

        return connect_if_local

    monkeypatch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))


@pytest.fixture(autouse=True)
def fixed_chance() -> Iterator[None]:
    """Start every test from the same random state; torch is seeded by the tests that use it."""
    random.seed(0)
    np.random.seed(0)
    yield
