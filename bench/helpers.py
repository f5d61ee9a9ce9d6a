"""Fresh processes that run one function each: what goes wrong in there is a row, and not the end of the bench."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).resolve().parent
PATIENCE_S = 180.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "passive",  # threads that wait leave the core to others; it moves no memory
}


def server(preload: str, environment: Mapping[str, str] = QUIET) -> ForkServerContext:
    """Return a server of fresh processes that has imported the module `preload` of this folder, and done no more.

    A process that leaves it need not load torch again, and has no thread of torch's yet.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    os.environ.update(environment)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    return context


class Gone(Exception):
    """A helper ended, or was ended, before it had told all; `code` is its exit code, None if it took too long."""

    def __init__(self, text: str, code: int | None) -> None:
        super().__init__(text)
        self.code = code


class Helper:
    """A fresh process that runs `module.name(*arguments, connection)`."""

    def __init__(self, context: ForkServerContext, module: str, name: str, *arguments: object) -> None:
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(module, name, *arguments, theirs))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.join(PATIENCE_S)
        self._process.kill()

    def tell(self, word: str) -> None:
        """Tell it that it may go on."""
        self._connection.send(word)

    def told(self, patience_s: float = PATIENCE_S) -> Any:
        """Return the next thing that it tells.

        Raises:
            Gone: it ended, or took longer than `patience_s` and was ended.
        """
        if not self._connection.poll(patience_s):
            self._process.kill()
            raise Gone(f"it took more than {patience_s:.0f} s", None)
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join(PATIENCE_S)
            raise Gone(f"its process ended with {self._process.exitcode}", self._process.exitcode) from None


def _serve(module: str, name: str, *arguments: object) -> None:
    getattr(importlib.import_module(module), name)(*arguments)
