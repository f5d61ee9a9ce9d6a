"""A model as `prelude, [blocks], epilogue`, derived from any transformers model by watching it run once.

    prelude    input ids, positions          -> first hidden state, and what each block receives besides it
    blocks     hidden state                  -> hidden state, one decoder block at a time
    epilogue   last hidden state             -> what the head receives (usually one norm)
    head       that                          -> logits, with the model's own scale or soft cap

The engine owns the loop over blocks; that is what lets it recompute, offload, stream and sweep them. The derivation
runs the model's own forward on `meta`: no byte is computed and no architecture is named. The longest `ModuleList` whose
children are all called becomes the blocks; each must receive what the one before returned. Where the split cannot be
derived the whole base model is one block: fewer levers, the same result, and the reason is kept in `Chain.whole_because`.

The prelude is the model's own forward with each block replaced by a `Relay`, which notes what it is given and hands the
hidden state on, and which stops the forward at the last block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ajusta.base.errors import ModelError
from ajusta.blocks.dropout import DropoutContext, TokenIds
from ajusta.memory.place import Place
from ajusta.spec.data import MicroBatch

_HIDDEN = "hidden_states"


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one block received besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    hidden_by_name: bool = False

    def run(self, block: nn.Module, hidden: Tensor) -> Any:
        """Call the block as the model itself did."""
        if self.hidden_by_name:
            return block(**{**self.kwargs, _HIDDEN: hidden})
        return block(hidden, *self.args, **self.kwargs)


class _ReachedLastBlock(Exception):
    """Stops the model's own forward once the prelude is done."""


class Relay(nn.Module):
    """Stands where a block stood: passes calls through, or notes them while the prelude runs."""

    def __init__(self, block: nn.Module, notes: Notes, is_last: bool) -> None:
        super().__init__()
        self.block = block
        self._notes = [notes]  # in a list, so that it is no submodule
        self._is_last = is_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, or only note what it was given."""
        notes = self._notes[0]
        if not notes.recording:
            return self.block(*args, **kwargs)
        hidden, call = _split_call(args, kwargs)
        notes.calls.append(call)
        if len(notes.calls) == 1:
            notes.first_hidden = hidden
        if self._is_last:
            raise _ReachedLastBlock
        return (hidden,) if notes.in_tuple else hidden

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
    in_tuple: bool = False  # blocks of this family return (hidden, ...)
    first_hidden: Tensor | None = None
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Logits:
    """What the model does to the head's output: multiply, then soft-cap."""

    scale: float = 1.0
    softcap: float | None = None


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
    whole_because: str | None = None
    dropout: DropoutContext = field(default_factory=lambda: DropoutContext(seed=0))
    dropping: list[nn.Module] = field(default_factory=list)  # layers with LoRA dropout

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.model.dtype

    def submodule(self, path: str) -> nn.Module:
        """Return the module that had this path before the relays were put in."""
        if self.block_path is not None and path.startswith(self.block_path + "."):
            index, _, rest = path[len(self.block_path) + 1 :].partition(".")
            block = self.blocks[int(index)]
            return block.get_submodule(rest) if rest else block
        return self.model.get_submodule(path)

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

    def prelude(self, input_ids_T: Tensor, position_ids_T: Tensor, mask: Tensor | None = None) -> tuple[Tensor, list[Call]]:
        """Run the model up to its first block; return that block's hidden state [1, T, H] and each block's call."""
        inputs = self._inputs(input_ids_T, position_ids_T, mask)
        if self.block_path is None:
            return input_ids_T, [Call(args=(), kwargs=inputs)]
        self.notes.recording, self.notes.calls, self.notes.first_hidden = True, [], None
        try:
            self.model.base_model(**inputs)
        except _ReachedLastBlock:
            pass
        finally:
            self.notes.recording = False
        assert self.notes.first_hidden is not None and len(self.notes.calls) == len(self.blocks)
        calls, self.notes.calls = self.notes.calls, []
        hidden, self.notes.first_hidden = self.notes.first_hidden, None
        return hidden, calls

    def run_block(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        """Run one block; return its hidden state [1, T, H]."""
        if self.block_path is None:
            out = self.model.base_model(**call.kwargs)
            return first_tensor(getattr(out, "last_hidden_state", out))
        return first_tensor(call.run(self.blocks[index], hidden))

    def finish(self, hidden: Tensor) -> Tensor:
        """Run the epilogue on hidden states of any number of positions."""
        for module in self.epilogue:
            hidden = first_tensor(module(hidden))
        return hidden

    def _inputs(self, input_ids_T: Tensor, position_ids_T: Tensor, mask: Tensor | None) -> dict[str, Any]:
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


def _split_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Call]:
    if args:
        return args[0], Call(args=args[1:], kwargs=dict(kwargs))
    rest = dict(kwargs)
    hidden = rest.pop(_HIDDEN)
    return hidden, Call(args=(), kwargs=rest, hidden_by_name=True)


@dataclass(kw_only=True)
class _Watched:
    """One module call seen while the whole model ran on `meta`."""

    name: str
    module: nn.Module
    inputs: list[int]
    output: Any
    order: int


def derive(model: PreTrainedModel, needs_mask: bool) -> Chain:
    """Take a model on `meta` apart; its blocks are replaced by relays in place.

    Raises:
        ModelError: the model has no head that turns hidden states into logits, or does not run at all.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output head; expected a causal language model")
    takes_positions = "position_ids" in inspect.signature(type(model.base_model).forward).parameters
    notes = Notes()
    chain = Chain(
        model=model, block_path=None, blocks=[model.base_model], epilogue=[], head=head, logits=_logits(model),
        notes=notes, needs_mask=needs_mask, takes_positions=takes_positions,
    )  # fmt: skip
    calls = _watch(chain)
    path, reason = _find_blocks(model, calls)
    if path is None:
        return _whole(chain, reason)
    blocks = list(model.get_submodule(path).children())
    epilogue, reason = _find_epilogue(calls, blocks[-1], head)
    if epilogue is None:
        return _whole(chain, reason)
    notes.in_tuple = isinstance(next(c.output for c in calls if c.module is blocks[0]), tuple)
    holder = model.get_submodule(path)
    assert isinstance(holder, nn.ModuleList)
    for index, block in enumerate(blocks):
        holder[index] = Relay(block, notes, is_last=index == len(blocks) - 1)
    chain.block_path, chain.blocks, chain.epilogue = path, blocks, epilogue
    return chain


def _whole(chain: Chain, reason: str) -> Chain:
    chain.whole_because = reason
    return chain


def _storages(values: Any) -> list[int]:
    if isinstance(values, Tensor):
        return [values.untyped_storage()._cdata]
    if isinstance(values, Mapping):
        return [key for value in values.values() for key in _storages(value)]
    if isinstance(values, tuple | list):
        return [key for value in values for key in _storages(value)]
    return []


def _watch(chain: Chain) -> list[_Watched]:
    """Run the whole model once and return every module call in the order of its end."""
    calls: list[_Watched] = []
    keep: list[Any] = []  # holds every tensor, so that no storage address is used twice

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            keep.append((args, kwargs, output))
            inputs = _storages(args) + _storages(kwargs)
            calls.append(_Watched(name=name, module=module, inputs=inputs, output=output, order=len(calls)))

        return note

    model = chain.model
    handles = [m.register_forward_hook(hook(n), with_kwargs=True) for n, m in model.named_modules()]
    device = next(model.parameters()).device
    try:
        ids = torch.zeros(4, dtype=torch.int64, device=device)
        positions = torch.arange(4, device=device)
        mask = torch.zeros(1, 1, 4, 4, device=device, dtype=model.dtype) if chain.needs_mask else None
        with torch.no_grad():
            model(**chain._inputs(ids, positions, mask))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _find_blocks(model: PreTrainedModel, calls: list[_Watched]) -> tuple[str | None, str]:
    """Return the path of the block list, or None and the reason why there is none."""
    times: dict[int, int] = {}
    for call in calls:
        times[id(call.module)] = times.get(id(call.module), 0) + 1
    lists = [
        (name, list(module.children()))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0
    ]
    called = [(name, kids) for name, kids in lists if all(times.get(id(kid), 0) >= 1 for kid in kids)]
    if not called:
        return None, "no list of modules is called child by child"
    name, kids = max(called, key=lambda pair: len(pair[1]))
    if any(times[id(kid)] > 1 for kid in kids):
        return None, f"the blocks of {name} are called several times (looped depth)"
    by_module = {id(call.module): call for call in calls}
    previous: list[int] | None = None
    for kid in kids:
        call = by_module[id(kid)]
        if previous is not None and (not call.inputs or call.inputs[0] not in previous):
            return None, f"the blocks of {name} do not hand their hidden state straight on"
        previous = _storages(call.output)
    return name, ""


def _find_epilogue(calls: list[_Watched], last: nn.Module, head: nn.Module) -> tuple[list[nn.Module] | None, str]:
    """Return the modules that lead from the last block to the head, each taking what the one before gave."""
    end = next(call.order for call in calls if call.module is last)
    ends = [call for call in calls if call.module is head]
    if not ends:
        return None, "the head is not called as a module"
    target = ends[0].inputs[0]
    at = _storages(first_tensor(calls[end].output))[0]
    found: list[nn.Module] = []
    for call in calls[end + 1 : ends[0].order]:
        if at == target:
            break
        if call.inputs and call.inputs[0] == at and isinstance(call.output, Tensor | tuple):
            found.append(call.module)
            at = _storages(first_tensor(call.output))[0]
    if at != target:
        return None, "something that is no module stands between the last block and the head"
    return found, ""


def _logits(model: PreTrainedModel) -> Logits:
    """Read what the family does to the head's output; each name is the one its configuration uses."""
    config = model.config.get_text_config()
    scale = 1.0
    for name, divides in (("logit_scale", False), ("lm_head_multiplier", False), ("logits_scaling", True)):
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value:
            scale = scale / value if divides else scale * value
    return Logits(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
