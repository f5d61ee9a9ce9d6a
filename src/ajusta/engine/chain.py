"""A model as `prelude, [blocks], epilogue`, the form in which the engine holds every transformers model.

    prelude    input ids, positions          -> first hidden state, and what each block receives besides it
    blocks     hidden state                  -> hidden state, one decoder block at a time
    epilogue   last hidden state             -> what the head receives (usually one norm)
    head       that                          -> logits, with the model's own scale or soft cap

The engine owns the loop over blocks; that is what lets it recompute, offload, stream and sweep them. Where the split
cannot be derived (engine/derive.py) the whole base model is one block: fewer levers, the same result, and the reason is
kept in `Chain.whole_because`.

The prelude is the model's own forward with each block replaced by a `Relay`, which notes what it is given and hands the
hidden state on, and which stops the forward at the last block. The epilogue is a list of modules, or, where a bare
operation stands among them, the model's own forward once more: now the relays hand on the last hidden state, and the
head's turn stops it.

A few families hand a second tensor from block to block (`Carried`): it travels beside the hidden state, joined to it
along the last dimension, so that recompute policies see one tensor and its gradient is not forgotten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ajusta.blocks.dropout import DropoutContext, TokenIds
from ajusta.memory.place import Place
from ajusta.spec.data import MicroBatch

_HIDDEN = "hidden_states"


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Output number `index` of one block, which the next one receives; `width` values a token, `flat` without batch."""

    index: int
    width: int
    flat: bool


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one block received besides the hidden state; a `Carried` stands for what the block before will return."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    hidden_by_name: bool = False

    def run(self, block: nn.Module, hidden: Tensor, carried: Mapping[Carried, Tensor]) -> Any:
        """Call the block as the model itself did."""
        args = [carried[value] if isinstance(value, Carried) else value for value in self.args]
        kwargs = {name: carried[v] if isinstance(v, Carried) else v for name, v in self.kwargs.items()}
        if self.hidden_by_name:
            return block(**kwargs, **{_HIDDEN: hidden})
        return block(hidden, *args, **kwargs)


class _ReachedLastBlock(Exception):
    """Stops the model's own forward once the prelude is done."""


class _ReachedHead(Exception):
    """Stops the model's own forward before the head; carries what the head would have received."""


class Relay(nn.Module):
    """Stands where a block stood: passes calls through, or notes them while the prelude runs."""

    def __init__(
        self, block: nn.Module, notes: Notes, number: int, is_last: bool, returns: tuple[Any, ...] | None
    ) -> None:
        super().__init__()
        self.block = block
        self._notes = [notes]  # in a list, so that it is no submodule
        self.number, self.is_last = number, is_last
        self._returns = returns  # what stands behind the hidden state in this block's output; None: it comes alone

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, or only note what it was given."""
        notes = self._notes[0]
        if not notes.recording and notes.last_hidden is None:
            if notes.entered is not None:
                notes.entered(self.number)
            return self.block(*args, **kwargs)
        hidden, call = split_call(args, kwargs)
        if notes.last_hidden is not None:
            return self._as_returned(notes.last_hidden if self.is_last else hidden)
        notes.calls.append(call)
        if len(notes.calls) == 1:
            notes.first_hidden = hidden
        if self.is_last:
            raise _ReachedLastBlock
        return self._as_returned(hidden)

    def _as_returned(self, hidden: Tensor) -> Any:
        return hidden if self._returns is None else (hidden, *self._returns)

    def __getattr__(self, name: str) -> Any:
        """Answer for the block, since models read attributes such as `attention_type` off their layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


@dataclass(kw_only=True)
class Notes:
    """What the relays of one model write down while a prelude runs."""

    recording: bool = False
    entered: Callable[[int], None] | None = None  # told which block the model's own forward comes to
    first_hidden: Tensor | None = None
    last_hidden: Tensor | None = None  # set while the epilogue runs by the model's own forward
    calls: list[Call] = field(default_factory=list)

    def take(self, blocks: int) -> tuple[Tensor, list[Call]]:
        """Return what was written down, and forget it."""
        hidden, calls = self.first_hidden, self.calls
        self.first_hidden, self.calls = None, []
        assert hidden is not None and len(calls) == blocks
        return hidden, calls


@dataclass(frozen=True, kw_only=True)
class Logits:
    """What the model does to the head's output: multiply, then soft-cap."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, output: Tensor) -> Tensor:
        """Return the logits made of the head's output, a new tensor unless there is nothing to do."""
        logits = output if self.scale == 1.0 else output * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass(kw_only=True)
class Chain:
    """A model taken apart for the engine. `model` itself still works, for generation and as the yardstick."""

    model: PreTrainedModel
    block_path: str | None  # "model.layers"; None where the whole base model is the one block
    blocks: list[nn.Module]
    epilogue: list[nn.Module]
    head: nn.Module
    logits: Logits
    notes: Notes
    needs_mask: bool  # attention without an interface: a ready mask [1, 1, T, T] is handed in
    takes_positions: bool
    ends_by_forward: bool = False  # the epilogue is the model's own forward from the last block to the head
    hidden_dims: int = 3  # [1, T, H], and more where a family keeps several streams
    carried: tuple[Carried, ...] = ()
    exact_up_to: int | None = None  # tokens of an example: a ready mask knows nothing of a family's sliding window
    whole_because: str | None = None
    mixes_because: str | None = None  # why examples in one row would not be alone; None: they are
    numbers: tuple[int, ...] = ()  # of an excerpt: the number that each block has in the whole model
    dropout: DropoutContext = field(default_factory=lambda: DropoutContext(seed=0))
    dropping: list[nn.Module] = field(default_factory=list)  # layers with LoRA dropout

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def isolates(self) -> bool:
        """Whether several examples may lie in one row; where not, a micro-batch is one example."""
        return self.mixes_because is None

    def submodule(self, path: str) -> nn.Module:
        """Return the module that had this path before the relays were put in."""
        index = self.block_of(path)
        if index is None:
            module: nn.Module = self.model.get_submodule(path)
            return module
        _, _, rest = path[len(str(self.block_path)) + 1 :].partition(".")
        return self.blocks[index].get_submodule(rest) if rest else self.blocks[index]

    def block_of(self, path: str) -> int | None:
        """Return which of the blocks a module or tensor of this path belongs to; None: to the rest of the model."""
        if self.block_path is None:
            return None
        if not path.startswith(self.block_path + "."):
            return None
        number = int(path[len(self.block_path) + 1 :].partition(".")[0])
        return self.numbers.index(number) if self.numbers else number

    def at_micro_batch(self, place: Place, micro: MicroBatch, step: int | None) -> None:
        """Tell LoRA dropout which tokens pass through now and in which step; None is evaluation, without dropout."""
        if not self.dropping:
            return
        for layer in self.dropping:
            layer.train(step is not None)
        if step is not None:
            self.dropout.tokens = TokenIds(
                step=step,
                example_ids_T=place.take(micro.example_ids_T),
                position_ids_T=place.take(micro.position_ids_T),
            )

    def runner(self, index: int, call: Call) -> Callable[[Tensor], Tensor]:
        """Return the block as a function of its hidden state, for a recompute policy to call."""
        return lambda hidden: self.run_block(index, hidden, call)

    def prelude(
        self, input_ids_T: Tensor, position_ids_T: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Call]]:
        """Run the model up to its first block; return that block's hidden state [1, T, H] and each block's call."""
        inputs = self.inputs(input_ids_T, position_ids_T, mask)
        if self.block_path is None:
            return input_ids_T, [Call(args=(), kwargs=inputs)]
        self.notes.recording = True
        try:
            with contextlib.suppress(_ReachedLastBlock):
                self.model(**inputs)
        finally:
            self.notes.recording = False
        return self.notes.take(len(self.blocks))

    def run_block(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        """Run one block; return its hidden state [1, T, H], with what is carried joined on."""
        if self.block_path is None:
            out = self.model.base_model(**call.kwargs)
            return first_tensor(getattr(out, "last_hidden_state", out))
        carried: dict[Carried, Tensor] = {}
        if self.carried and index > 0:
            widths = [key.width for key in self.carried]
            hidden, *rest = hidden.split([hidden.shape[-1] - sum(widths), *widths], dim=-1)
            carried = {key: value[0] if key.flat else value for key, value in zip(self.carried, rest, strict=True)}
        out = call.run(self.blocks[index], hidden, carried)
        if not self.carried or index == len(self.blocks) - 1:
            return first_tensor(out)
        return torch.cat(
            [out[0], *(out[key.index][None] if key.flat else out[key.index] for key in self.carried)], dim=-1
        )

    def finish(self, hidden: Tensor) -> Tensor:
        """Run the epilogue on the hidden states of any positions, [C, H] or [1, C, H]."""
        if hidden.dim() < self.hidden_dims:
            return self.finish(hidden[None])[0]
        if self.ends_by_forward:
            return self._finish_by_forward(hidden)
        for module in self.epilogue:
            hidden = first_tensor(module(hidden))
        return hidden

    def _finish_by_forward(self, hidden: Tensor) -> Tensor:
        ids = torch.zeros(hidden.shape[1], dtype=torch.int64, device=hidden.device)
        mask = torch.zeros(1, 1, len(ids), len(ids), dtype=self.dtype, device=ids.device) if self.needs_mask else None
        self.notes.last_hidden = hidden
        try:
            self.model(**self.inputs(ids, ids, mask))
        except _ReachedHead as reached:
            return first_tensor(reached.args)
        finally:
            self.notes.last_hidden = None
        raise AssertionError("the model's own forward did not come to its head")

    def stop_before_head(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Be the head's pre-hook where the epilogue runs by the model's own forward."""
        if self.notes.last_hidden is not None:
            raise _ReachedHead(*args)

    def inputs(self, input_ids_T: Tensor, position_ids_T: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Return what the model itself is called with."""
        inputs: dict[str, Any] = {"input_ids": input_ids_T[None], "use_cache": False}
        if self.takes_positions:
            inputs["position_ids"] = position_ids_T[None]
        if self.needs_mask:
            assert mask is not None
            inputs["attention_mask"] = mask
        return inputs


def first_tensor(result: Any) -> Tensor:
    """Return a block's hidden state, whether it came alone or first in a tuple."""
    out = result[0] if isinstance(result, tuple | list) else result
    assert isinstance(out, Tensor)
    return out


def split_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Call]:
    """Part a block's hidden state from the rest of what it was given."""
    if args:
        return args[0], Call(args=args[1:], kwargs=dict(kwargs))
    rest = dict(kwargs)
    hidden = rest.pop(_HIDDEN)
    return hidden, Call(args=(), kwargs=rest, hidden_by_name=True)
