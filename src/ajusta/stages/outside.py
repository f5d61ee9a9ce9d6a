"""Measure what a card holds beside tensors, under the names of memory/outside.py, in a process made for it.

The process that asks has a context already, and cannot see what that took. So another one is started, which makes a
context, then runs a few operations, and says what torch counts; the free memory of the card tells the rest. Written
without a card at hand: no figure of it has been seen yet.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Protocol

import torch

WAIT_S = 120.0  # for the other process to import torch and to come back
_SIDE = 1024


class Other(Protocol):
    """The other process. Each step waits until it is done; what was taken is held until the end."""

    def make_context(self) -> None:
        """Make the context, and nothing else."""

    def work(self) -> tuple[int, int]:
        """Run some operations; return the bytes of a cuBLAS workspace and what torch's allocator has reserved."""


def outside_bytes(other: Other, free_bytes: Callable[[], int]) -> Mapping[str, int]:
    """Return bytes by the term's name, from the card's free memory before, between and after the steps of another.

    A term that comes out at nothing, since other programs came or went meanwhile, is left out.
    """
    at_first = free_bytes()
    other.make_context()
    with_context = free_bytes()
    workspace, reserved = other.work()
    at_last = free_bytes()
    found = {
        "CUDA context": at_first - with_context,
        "cuBLAS workspace of the forward pass": workspace,
        "cuBLAS workspace of the backward pass": workspace,
        "kernels": with_context - at_last - reserved,
    }
    return {name: size for name, size in found.items() if size > 0}


def measure_outside(device: torch.device) -> Mapping[str, int]:
    """Return what this card holds beside tensors; nothing for a processor, or where the other process fails."""
    if device.type != "cuda":
        return {}
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        return outside_bytes(_Remote(ours), lambda: int(torch.cuda.mem_get_info(device)[0]))
    except (EOFError, BrokenPipeError, TimeoutError):
        return {}
    finally:
        ours.close()  # which the other process reads as the end
        process.join(timeout=WAIT_S)


class _Remote:
    """Our end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def make_context(self) -> None:
        self._answer()

    def work(self) -> tuple[int, int]:
        self._pipe.send(None)
        workspace, reserved = self._answer()
        return workspace, reserved

    def _answer(self) -> tuple[int, int]:
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError
        answer: tuple[int, int] = self._pipe.recv()
        return answer


def _serve(pipe: Connection) -> None:
    """Be the other process: a step, then wait to be asked for the next one."""
    try:
        for figures in _steps():
            pipe.send(figures)
            pipe.recv()
    except EOFError:
        return


def _steps() -> Iterator[tuple[int, int]]:
    torch.cuda.mem_get_info()
    yield 0, 0
    left = torch.randn(_SIDE, _SIDE, device="cuda")
    before = torch.cuda.memory_allocated()
    product = left @ left
    workspace = torch.cuda.memory_allocated() - before - product.nbytes
    for dtype in (torch.float32, torch.bfloat16):
        hidden = left.to(dtype).requires_grad_(True)
        torch.autograd.backward(torch.nn.functional.silu(hidden @ hidden).pow(2).mean(-1).exp().sum())
    torch.cuda.synchronize()
    yield max(workspace, 0), torch.cuda.memory_reserved()
