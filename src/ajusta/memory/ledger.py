"""Count the bytes of every live tensor storage, by category, at each operation.

The ledger is a `TorchDispatchMode`: it sees each operation's outputs, weighs a storage once when it first appears and
takes it off when it dies (a weak reference on the storage tells). It works on `meta` tensors as on real ones, with the
same figures, so the step that is planned and the step that trains are counted by one piece of code.

What it cannot see are buffers inside an operation's own C++ code; on `meta` these must be declared by the operation
(`declare_workspace`). A storage that exists before the ledger starts is counted once it is given to `adopt`, or when an
operation first returns a view of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Category(StrEnum):
    """What a byte is held for; the order is the order of the stacked bar."""

    BASE = "base weights"
    QUANTIZATION = "quantization constants"
    ADAPTERS = "adapters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    SAVED = "saved activations"
    RECOMPUTE = "recompute window"
    LOGITS = "logits and loss"
    TEMPORARY = "temporary"


@dataclass(kw_only=True)
class Peak:
    """The fullest moment seen so far."""

    live_bytes: int = 0
    operation: str = ""
    by_category: dict[Category, int] = field(default_factory=dict)


class Ledger(TorchDispatchMode):
    """Weigh live storages while the mode is active. `now`, `peak` and the category counts are in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = Peak()
        self.operations = 0
        self._category = Category.TEMPORARY
        self._by_category: dict[Category, int] = dict.fromkeys(Category, 0)
        self._live: dict[int, tuple[int, Category, weakref.ref[torch.UntypedStorage]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation as it is, then weigh what came out."""
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        before = self.now
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._weigh(leaf, self._category)
        if self.now > before:
            self._note_peak(str(func))
        return result

    @contextlib.contextmanager
    def category(self, category: Category) -> Iterator[None]:
        """Book what is allocated inside under this category."""
        outer, self._category = self._category, category
        try:
            yield
        finally:
            self._category = outer

    def adopt(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Count tensors that exist already; a storage that is known keeps its weight and takes the category."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._live:
                self._recategorize(key, category)
            else:
                self._weigh(tensor, category)
        self._note_peak("adopt")

    def declare_workspace(self, size_bytes: int, operation: str) -> None:
        """Count a buffer that an operation holds inside itself, only while it runs."""
        self.now += size_bytes
        self._by_category[self._category] += size_bytes
        self._note_peak(operation)
        self.now -= size_bytes
        self._by_category[self._category] -= size_bytes

    def start_over(self) -> None:
        """Forget the peak, keep what is live."""
        self.peak = Peak()
        self._note_peak("start")

    def live_by_category(self) -> dict[Category, int]:
        """Return the bytes live now by category, empty ones left out."""
        return {category: size for category, size in self._by_category.items() if size}

    def _weigh(self, tensor: torch.Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            self._resize(key, size)
            return

        def forget(_: object, key: int = key) -> None:
            gone, held, _ref = self._live.pop(key)
            self.now -= gone
            self._by_category[held] -= gone

        self._live[key] = (size, category, weakref.ref(storage, forget))
        self.now += size
        self._by_category[category] += size

    def _resize(self, key: int, size: int) -> None:
        """Take the new size of a known storage, which an `out=` argument may have grown."""
        held, category, reference = self._live[key]
        if size != held:
            self._live[key] = (size, category, reference)
            self.now += size - held
            self._by_category[category] += size - held

    def _recategorize(self, key: int, category: Category) -> None:
        size, held, reference = self._live[key]
        self._live[key] = (size, category, reference)
        self._by_category[held] -= size
        self._by_category[category] += size

    def _note_peak(self, operation: str) -> None:
        if self.now > self.peak.live_bytes:
            self.peak = Peak(live_bytes=self.now, operation=operation, by_category=self.live_by_category())
