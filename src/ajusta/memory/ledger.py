"""Count the bytes of every live tensor storage, by category, at each operation.

The ledger is a `TorchDispatchMode`: it sees each operation's outputs, weighs a storage once when it first appears and
takes it off when it dies (a weak reference on the storage tells). It works on `meta` tensors as on real ones, with the
same figures, so the step that is planned and the step that trains are counted by one piece of code.

What it cannot see are buffers inside an operation's own C++ code: memory/workspaces.py declares those. A storage that
exists before the ledger starts is counted once it is given to `adopt`, or when an operation first returns a view of it.

The account is cut into sections (`mark`): the forward pass of block 3, the loss, the update. Each section knows what
was live at its start and end and its fullest moment, so that a life with more blocks can be put together of them.

Given the roofline of a device, the ledger also sums up how long the operations take on it (memory/roofline.py). What
is left out on `meta`, as an expansion's tiles are, is declared by whoever leaves it out (`declare_work`, `repeated`).
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

from ajusta.memory.answers import Answers
from ajusta.memory.roofline import NOTHING, Clock, Work, work_of
from ajusta.memory.workspaces import hidden_bytes
from ajusta.spec.roofline import Roofline

_ADOPT = "adopt"


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
    DEQUANTIZED = "dequantization window"
    ATTENTION = "attention workspace"
    TEMPORARY = "temporary"


@dataclass(kw_only=True)
class Peak:
    """The fullest moment seen so far."""

    live_bytes: int = 0
    operation: str = ""
    by_category: dict[Category, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One storage comes (`bytes` above 0) or goes (below); `storage` numbers storages in the order of their coming."""

    storage: int
    bytes: int
    category: Category
    operation: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """One stretch of the account; `block` is the number of the block it belongs to, None for the rest of the model."""

    name: str
    block: int | None
    begin: dict[Category, int]
    peak: Peak
    end: dict[Category, int]
    events: tuple[Event, ...] = ()
    seconds: float = 0.0  # by the ledger's roofline; 0 without one


class Ledger(TorchDispatchMode):
    """Weigh live storages while the mode is active. `now`, `peak` and the category counts are in bytes.

    Args:
        kind: cpu | cuda, the kind of device whose hidden buffers count; `meta` tensors stand for it.
        record: keep every coming and going, for the timeline and for the allocator's replay.
        roofline: of the device whose time is summed up; None leaves that out, which is a little faster.
    """

    def __init__(self, kind: str = "cpu", *, record: bool = False, roofline: Roofline | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind
        self._clock = None if roofline is None else Clock(roofline)
        self._large = 0 if roofline is None else roofline.fresh_from_bytes
        self._small_now, self._small_begin = 0, 0  # bytes of tensors below that
        self._answers = Answers()
        self._seconds = 0.0  # of the section that is open
        self._times = 1  # how many turns of a loop the present one stands for
        self.now = 0
        self.operations = 0
        self.sections: list[Section] = []
        self.record = record
        self._events: list[Event] = []
        self._fullest = Peak()
        self._peak = Peak()  # of the section that is open
        self._begin: dict[Category, int] = {}
        self._name: tuple[str, int | None] = ("start", None)
        self._category = Category.TEMPORARY
        self._by_category: dict[Category, int] = dict.fromkeys(Category, 0)
        self._live: dict[int, tuple[int, Category, weakref.ref[torch.UntypedStorage], int]] = {}
        self._seen = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave torch's compiler out of it: to be wrapped by it would import it, which takes longer than a trace."""
        return False

    def __enter__(self) -> Ledger:
        """Start counting."""
        _active.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting; what is live stays in the account and is taken off when it dies."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _active.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation as it is, then weigh what came out."""
        result = self._answers(func, args, kwargs or {})
        self.operations += 1
        before = self.now
        if self._clock is not None:
            work = work_of(func, args, kwargs or {}, result)
            if work is not NOTHING:
                self._seconds += self._times * self._clock.seconds(work)
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._weigh(leaf, self._category, func)
        hidden = hidden_bytes(func, self.kind, args, kwargs or {}, result)
        if hidden is not None:
            name = str(func)
            self.declare_workspace(hidden, name, Category.ATTENTION if "attention" in name else None)
        elif self.now > before:
            self._note_peak(str(func))
        return result

    @property
    def peak(self) -> Peak:
        """The fullest moment since the account was last started over."""
        return max(self._fullest, self._peak, key=lambda peak: peak.live_bytes)

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
        small = self._small_now
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._live:
                self._recategorize(key, category)
            else:
                self._weigh(tensor, category, _ADOPT)
        self._small_begin += self._small_now - small
        self._note_peak(_ADOPT)

    def declare_workspace(self, size_bytes: int, operation: str, category: Category | None = None) -> None:
        """Count a buffer that an operation holds inside itself, only while it runs."""
        held = category or self._category
        self._seen += 1
        self._come(size_bytes, held, self._seen, operation)
        self._note_peak(operation)
        self._go(size_bytes, held, self._seen)

    def spend(self, work: Work) -> None:
        """Add the time of some work on the device of the roofline; without one, time is not counted."""
        if self._clock is not None:
            self._seconds += self._times * self._clock.seconds(work)

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count the time of what is done inside `times` over; memory is counted as it is."""
        outer, self._times = self._times, self._times * times
        try:
            yield
        finally:
            self._times = outer

    @property
    def seconds(self) -> float:
        """The time of all operations since the account was last started over; 0 without a roofline."""
        return sum(section.seconds for section in self.sections) + self._section_seconds()

    def start_over(self) -> None:
        """Forget peak, sections, events and time, keep what is live."""
        self.sections, self._events, self._fullest = [], [], Peak()
        self._open("start", None)

    def mark(self, name: str, block: int | None = None) -> None:
        """Close the section that is open and begin another one, unless it is the same."""
        if self._name != (name, block):
            self._close()
            self._open(name, block)

    def cut(self) -> tuple[Section, ...]:
        """Close the section that is open and return all since the account was started over."""
        self.mark("end")
        return tuple(self.sections)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number that a tensor's storage has in the events; None where it is not in the account."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[3]

    def live_by_category(self) -> dict[Category, int]:
        """Return the bytes live now by category, empty ones left out."""
        return {category: size for category, size in self._by_category.items() if size}

    def _open(self, name: str, block: int | None) -> None:
        self._name, self._begin, self._peak = (name, block), self.live_by_category(), Peak()
        self._seconds, self._small_begin = 0.0, self._small_now
        self._note_peak(name)

    def _close(self) -> None:
        name, block = self._name
        self.sections.append(
            Section(
                name=name,
                block=block,
                begin=self._begin,
                peak=self._peak,
                end=self.live_by_category(),
                events=tuple(self._events),
                seconds=self._section_seconds(),
            )
        )
        self._fullest, self._events = self.peak, []

    def _section_seconds(self) -> float:
        """Return the time of the open section: its operations, and the finding of memory for what stays of it.

        What a step leaves behind on its way is given back at its end, so it must be found in every step.
        """
        if self._clock is None:
            return 0.0
        return self._seconds + self._clock.seconds_to_find(max(0, self._small_now - self._small_begin))

    def _weigh(self, tensor: torch.Tensor, category: Category, operation: Any) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            self._resize(key, size, operation)
            return
        self._seen += 1

        def forget(_: object, key: int = key) -> None:
            gone, held, _ref, number = self._live.pop(key)
            self._go(gone, held, number)

        self._live[key] = (size, category, weakref.ref(storage, forget), self._seen)
        self._come(size, category, self._seen, operation)

    def _come(self, size: int, category: Category, number: int, operation: Any) -> None:
        self.now += size
        self._by_category[category] += size
        if size < self._large:
            self._small_now += size
        elif self._clock is not None and operation != _ADOPT:
            self._seconds += self._times * self._clock.seconds_to_find(size)
        if self.record:
            self._events.append(Event(storage=number, bytes=size, category=category, operation=str(operation)))

    def _go(self, size: int, category: Category, number: int) -> None:
        self.now -= size
        self._by_category[category] -= size
        if size < self._large:
            self._small_now -= size
        if self.record:
            self._events.append(Event(storage=number, bytes=-size, category=category, operation=""))

    def _resize(self, key: int, size: int, operation: Any) -> None:
        """Take the new size of a known storage, which an `out=` argument may have grown."""
        held, category, reference, number = self._live[key]
        if size != held:
            self._seen += 1
            self._live[key] = (size, category, reference, self._seen)
            self._go(held, category, number)
            self._come(size, category, self._seen, operation)

    def _recategorize(self, key: int, category: Category) -> None:
        size, held, reference, number = self._live[key]
        self._live[key] = (size, category, reference, number)
        self._by_category[held] -= size
        self._by_category[category] += size

    def _note_peak(self, operation: str) -> None:
        if self.now > self._peak.live_bytes:
            self._peak = Peak(live_bytes=self.now, operation=operation, by_category=self.live_by_category())


# The ledgers that count now, the innermost last. Not a context variable: on a card the backward pass runs on a thread
# of torch's own, which has none of ours.
_active: list[Ledger] = []


@contextlib.contextmanager
def booking(category: Category) -> Iterator[None]:
    """Book what is allocated inside under this category, where somebody counts; for code that knows no place."""
    if not _active:
        yield
        return
    with _active[-1].category(category):
        yield


def declare_work(work: Work) -> None:
    """Count the time of work that is left out here and done on a device, where somebody counts time."""
    if _active:
        _active[-1].spend(work)


@contextlib.contextmanager
def repeated(times: int) -> Iterator[None]:
    """Count the time of what is done inside `times` over, where somebody counts: one turn stands for so many."""
    if not _active:
        yield
        return
    with _active[-1].repeated(times):
        yield


def device_kind(device: torch.device) -> str:
    """Return cpu, cuda or mps; for `meta` the kind of device that it stands for just now (cpu where nobody counts)."""
    if device.type != "meta":
        return device.type
    return _active[-1].kind if _active else "cpu"
