"""One side of the comparison in a process of its own, stepping when it is told to.

The parent starts it (spawned, so that nothing is shared), and the two talk over a pipe: a question is a method's name
and its arguments, an answer is `("ok", result)` or `("error", one line)`. The side's libraries are imported here, and
only in its own process: what they take is its baseline.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol

from measures import Job, Resident, Step, peak_resident_bytes, resident_bytes


class Trainer(Protocol):
    """What `ours` and `stock` each offer: the model loaded, the adapter in it, the optimizer made."""

    def step(self, index: int) -> float:
        """Take one optimizer step on chunk `index`; return its mean loss."""

    def held_bytes(self) -> int:
        """Return what it holds between steps besides weights, adapters and optimizer state (gradient buffers)."""


class SideError(Exception):
    """A side could not do what it was asked; the text is its row in the table."""


class Side:
    """The parent's hand on one side. Its figures are taken in the side's own process."""

    def __init__(self, name: str, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, job), name=f"bench-{name}", daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._answer()  # it is loaded
        except SideError:
            self.close()
            raise

    def step(self, index: int) -> Step:
        """Take and time one step."""
        return self._ask("step", index)

    def resident(self) -> Resident:
        """Return the peak so far."""
        return self._ask("resident")

    def allocated_bytes(self, index: int) -> int:
        """Return the allocated peak of one more step above weights, adapters and optimizer state."""
        return self._ask("allocated_bytes", index)

    def profile(self, index: int) -> str:
        """Return torch's table of one more step's operations."""
        return self._ask("profile", index)

    def _ask(self, question: str, *arguments: Any) -> Any:
        self._pipe.send((question, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            outcome, result = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise SideError(f"{self.name}: its process ended with exit code {self._process.exitcode}") from None
        if outcome == "error":
            raise SideError(f"{self.name}: {result}")
        return result

    def close(self) -> None:
        """End the process and wait for it."""
        self._pipe.close()  # which the process reads as the end
        self._process.join(timeout=60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(pipe: Connection, name: str, job: Job) -> None:
    """Be the side's process: load, then answer until the pipe is closed."""
    warnings.simplefilter("ignore")
    try:
        module = importlib.import_module(name)  # ours | stock
        worker = _Worker(module.open_trainer, job)
        pipe.send(("ok", None))
        while True:
            question, arguments = pipe.recv()
            pipe.send(("ok", getattr(worker, question)(*arguments)))
    except EOFError:
        return
    except Exception as error:  # whatever went wrong on this side is a result, and the parent prints it
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))


class _Worker:
    """Takes the figures around a trainer's steps."""

    def __init__(self, open_trainer: Callable[[Job], Trainer], job: Job) -> None:
        self._imported_bytes = resident_bytes()
        self._trainer = open_trainer(job)
        gc.collect()

    def step(self, index: int) -> Step:
        started = time.perf_counter()
        loss = self._trainer.step(index)
        return Step(loss=loss, seconds=time.perf_counter() - started)

    def resident(self) -> Resident:
        return Resident(peak_bytes=peak_resident_bytes(), imported_bytes=self._imported_bytes)

    def allocated_bytes(self, index: int) -> int:
        gc.collect()
        held = self._trainer.held_bytes()
        return held + profiling().allocated_peak(lambda: self._trainer.step(index))

    def profile(self, index: int) -> str:
        return profiling().operations(lambda: self._trainer.step(index))


def profiling() -> Any:
    """Return the module that profiles; it imports torch, which must not come before a side's own imports."""
    return importlib.import_module("profiling")
