"""A place is where bytes live. The engine touches devices only through one.

`RealPlace` holds true tensors on the CPU or a card; `CountingPlace` holds `meta` tensors, which have a shape and a
weight but no bytes, and counts them. The same phase of the engine runs over either: that is how a plan is made by
running the very step that will train.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from ajusta.memory.ledger import Category, Ledger, Peak
from ajusta.spec.roofline import Roofline


class Place(ABC):
    """Where the tensors of one model live, and the account of what they weigh."""

    device: torch.device
    kind: str  # cpu | cuda: what the tensors are on, or stand for
    ledger: Ledger | None

    @abstractmethod
    def take(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> torch.Tensor:
        """Bring an array here; shape and dtype stay."""

    def empty(self, *shape: int, dtype: torch.dtype, category: Category) -> torch.Tensor:
        """Allocate without filling."""
        with self.category(category):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype, category: Category) -> torch.Tensor:
        """Allocate zeros."""
        with self.category(category):
            return torch.zeros(shape, dtype=dtype, device=self.device)

    @contextlib.contextmanager
    def category(self, category: Category) -> Iterator[None]:
        """Book what is allocated inside under this category, where somebody counts."""
        if self.ledger is None:
            yield
        else:
            with self.ledger.category(category):
                yield

    def mark(self, section: str, block: int | None = None) -> None:
        """Begin another section of the account, where somebody counts."""
        if self.ledger is not None:
            self.ledger.mark(section, block)

    @contextlib.contextmanager
    def counting(self) -> Iterator[Ledger]:
        """Count every allocation inside. On a real place this costs time, so only the rehearsal does it."""
        outer = self.ledger
        self.ledger = outer or Ledger(self.kind)
        try:
            with self.ledger:
                yield self.ledger
        finally:
            self.ledger = outer


class RealPlace(Place):
    """True tensors on one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.kind = self.device.type
        self.ledger = None

    def take(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> torch.Tensor:
        """Copy the array to the device."""
        return torch.from_numpy(array).to(self.device)


class CountingPlace(Place):
    """`meta` tensors: nothing is computed, everything is weighed. They stand for tensors on a device of this `kind`."""

    def __init__(self, kind: str = "cpu", *, record: bool = False, roofline: Roofline | None = None) -> None:
        self.device = torch.device("meta")
        self.kind = kind
        self.ledger = Ledger(kind, record=record, roofline=roofline)

    def take(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> torch.Tensor:
        """Return a `meta` tensor of the array's shape and dtype."""
        return torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, device=self.device)


__all__ = ["Category", "CountingPlace", "Ledger", "Peak", "Place", "RealPlace"]
