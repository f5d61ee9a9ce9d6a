"""Take a transformers model apart into a `Chain` by watching it run on `meta`; no architecture is named here.

1. The whole model runs once; every module call is noted. The longest `ModuleList` whose children are all called
   becomes the blocks; each must receive what the one before returned.
2. It runs again, and now only the first block's input wants a gradient. So whatever else a later block receives and
   that wants one was made by an earlier block. What the block before returned is carried on from block to block;
   anything else (keys and values shared between layers, say) would lose its gradient, and the model stays whole.
3. From the last block to the head: modules that each take what the one before gave, or the model's own forward,
   and nothing from before the last block may be used there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ajusta.base.errors import ModelError
from ajusta.engine.chain import Carried, Chain, Logits, Notes, Relay, first_tensor, split_call

_TOKENS = 5  # in the rows that are watched; no usual number of heads


@dataclass(kw_only=True)
class _Watched:
    """One module call seen while the whole model ran on `meta`; storages stand for tensors."""

    name: str
    module: nn.Module
    hidden: int | None  # the first tensor that it was given
    output: Any
    order: int


def derive(model: PreTrainedModel, needs_mask: bool) -> Chain:
    """Take a frozen model on `meta` apart; its blocks are replaced by relays in place.

    Raises:
        ModelError: the model has no head that turns hidden states into logits, or does not run at all.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output head; expected a causal language model")
    takes_positions = "position_ids" in inspect.signature(type(model.base_model).forward).parameters
    chain = Chain(
        model=model, block_path=None, blocks=[model.base_model], epilogue=[], head=head, logits=Logits(),
        notes=Notes(), needs_mask=needs_mask, takes_positions=takes_positions,
    )  # fmt: skip
    calls, logits, matrices = _watch(chain)
    if matrices and not needs_mask and not model._supports_attention_backend:
        raise ModelError(f"{type(model).__name__} has an attention of its own, which would run without any mask")
    chain.exact_up_to = _window(model) if needs_mask else None
    chain.mixes_because = _mixes(model, takes_positions, calls)
    ends = [call for call in calls if call.module is head]
    if len(ends) != 1:
        raise ModelError(
            f"{type(model).__name__} calls its output head {len(ends)} times in one pass; expected one time"
        )
    if _storage(ends[0].output) != _storage(logits):
        chain.logits = _logits(model)
    path, reason = _find_blocks(model, calls)
    if path is None:
        return _whole(chain, calls, reason)
    blocks = list(model.get_submodule(path).children())
    carried, reason = _find_carried(chain, blocks)
    if carried is None:
        return _whole(chain, calls, f"the blocks of {path} {reason}")
    ending = first_tensor(next(call.output for call in calls if call.module is blocks[-1]))
    if ending.shape[:2] != (1, _TOKENS):
        return _whole(chain, calls, f"the blocks of {path} hand on tensors that are not [1, T, ...]")
    if not _ends_alone(chain, blocks[-1]):
        return _whole(chain, calls, f"the head receives more than what the last block of {path} returns")
    _link(chain, path, blocks, carried, calls)
    return chain


def _link(
    chain: Chain, path: str, blocks: list[nn.Module], carried: tuple[Carried, ...], calls: list[_Watched]
) -> None:
    """Put the relays in and settle how the chain ends."""
    holder = chain.model.get_submodule(path)
    assert isinstance(holder, nn.ModuleList)
    outputs = {id(call.module): call.output for call in calls}
    for index, block in enumerate(blocks):
        rest = _rest(outputs[id(block)], carried)
        holder[index] = Relay(block, chain.notes, index, is_last=index == len(blocks) - 1, returns=rest)
    chain.block_path, chain.blocks, chain.carried = path, blocks, carried
    chain.hidden_dims = first_tensor(outputs[id(blocks[-1])]).dim()
    epilogue = _find_epilogue(calls, blocks[-1], chain.head)
    if epilogue is None:
        chain.ends_by_forward = True
        chain.head.register_forward_pre_hook(chain.stop_before_head)
    else:
        chain.epilogue = epilogue


def _whole(chain: Chain, calls: list[_Watched], reason: str) -> Chain:
    """Keep the base model in one piece."""
    epilogue = _find_epilogue(calls, chain.model.base_model, chain.head)
    if epilogue is None:
        raise ModelError(
            f"{type(chain.model).__name__} cannot be taken apart: {reason}, and no chain of modules leads to its head; "
            f"choose another model"
        )
    chain.whole_because, chain.epilogue = reason, epilogue
    return chain


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _storage(values: Any) -> int | None:
    first = next(_tensors(values), None)
    return None if first is None else first.untyped_storage()._cdata


def _inputs(chain: Chain) -> dict[str, Any]:
    device = next(chain.model.parameters()).device
    mask = torch.zeros(1, 1, _TOKENS, _TOKENS, device=device, dtype=chain.dtype) if chain.needs_mask else None
    ids = torch.zeros(_TOKENS, dtype=torch.int64, device=device)
    return chain.inputs(ids, torch.arange(_TOKENS, device=device), mask)


class _Softmaxes(TorchDispatchMode):
    """Count the softmaxes over a T x T matrix: attention that is not ours, mostly."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at what it is."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._softmax.default and result.shape[-2:] == (_TOKENS, _TOKENS):
            self.count += 1
        return result


def _watch(chain: Chain) -> tuple[list[_Watched], Any, int]:
    """Run the whole model once; return every module call in the order of its end, the logits, and T x T softmaxes."""
    calls: list[_Watched] = []
    keep: list[Any] = []  # holds every tensor, so that no storage address is used twice

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            keep.append((args, kwargs, output))
            hidden = _storage(args or kwargs.get("hidden_states", kwargs))
            calls.append(_Watched(name=name, module=module, hidden=hidden, output=output, order=len(calls)))

        return note

    handles = [m.register_forward_hook(hook(n), with_kwargs=True) for n, m in chain.model.named_modules()]
    try:
        with torch.no_grad(), _Softmaxes() as softmaxes:
            result = chain.model(**_inputs(chain))
    finally:
        for handle in handles:
            handle.remove()
    keep.append(result)
    return calls, getattr(result, "logits", result), softmaxes.count


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
    previous: int | None = None
    for kid in kids:
        call = by_module[id(kid)]
        if previous is not None and call.hidden != previous:
            return None, f"the blocks of {name} do not hand their hidden state straight on"
        previous = _storage(call.output)
    return name, ""


def _find_carried(chain: Chain, blocks: list[nn.Module]) -> tuple[tuple[Carried, ...] | None, str]:
    """Return what each block hands to the next besides its hidden state, or None and why it cannot be carried."""
    outputs: list[Any] = []
    found: dict[int, Tensor] = {}
    foreign: list[str] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, call = split_call(args, kwargs)
        if not outputs:
            start = hidden.detach().requires_grad_(True)
            return ((start, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": start})
        behind = {id(value): i for i, value in enumerate(outputs[-1]) if i} if isinstance(outputs[-1], tuple) else {}
        direct = (*call.args, *call.kwargs.values())
        for tensor in _tensors(direct):
            if id(tensor) in behind and any(tensor is value for value in direct):
                found[behind[id(tensor)]] = tensor
            elif tensor.requires_grad and tensor is not hidden:
                foreign.append(f"of class {type(module).__name__} receive what an earlier one made inside itself")
        return None

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(output)

    handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(after) for block in blocks]
    try:
        with torch.enable_grad():
            chain.model(**_inputs(chain))
    finally:
        for handle in handles:
            handle.remove()
    if foreign:
        return None, foreign[0]
    return _carried(found, first_tensor(outputs[0]), outputs)


def _ends_alone(chain: Chain, last: nn.Module) -> bool:
    """Whether what the head receives is made of the last block's output only."""
    seen: list[bool] = []

    def cut(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output.detach() if isinstance(output, Tensor) else tuple(_detached(value) for value in output)

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0].requires_grad)

    weight = chain.model.get_input_embeddings().get_parameter("weight")
    handles = [last.register_forward_hook(cut), chain.head.register_forward_pre_hook(look)]
    try:
        with torch.enable_grad():
            weight.requires_grad_(True)
            chain.model(**_inputs(chain))
    finally:
        weight.requires_grad_(False)
        for handle in handles:
            handle.remove()
    return seen == [False]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _carried(found: dict[int, Tensor], hidden: Tensor, outputs: list[Any]) -> tuple[tuple[Carried, ...] | None, str]:
    carried = []
    for index, tensor in sorted(found.items()):
        flat = tensor.dim() == 2
        fits = tensor.shape[:-1] == (hidden.shape[1:2] if flat else hidden.shape[:2]) and tensor.dtype == hidden.dtype
        everywhere = all(len(output) > index and isinstance(output[index], Tensor) for output in outputs)
        if not fits or hidden.dim() != 3 or not everywhere:
            return None, "hand on a second tensor that cannot lie beside the hidden state"
        carried.append(Carried(index=index, width=tensor.shape[-1], flat=flat))
    return tuple(carried), ""


def _rest(output: Any, carried: tuple[Carried, ...]) -> tuple[Any, ...] | None:
    """Return what a relay says in the place of a block's further outputs: what is carried, and nothing else."""
    if not isinstance(output, tuple):
        return None
    by_index = {key.index: key for key in carried}
    return tuple(by_index.get(index) for index in range(1, len(output)))


def _find_epilogue(calls: list[_Watched], last: nn.Module, head: nn.Module) -> list[nn.Module] | None:
    """Return the modules that lead from `last` to the head, each taking what the one before gave; None if none do."""
    end = next(call.order for call in calls if call.module is last)
    head_call = next(call for call in calls if call.module is head)
    at = _storage(calls[end].output)
    found: list[nn.Module] = []
    rest = calls[end + 1 : head_call.order]
    while at != head_call.hidden:
        takers = [call for call in rest if call.hidden == at and _storage(call.output) not in (None, at)]
        if not takers:
            return None
        outermost = takers[-1]  # a module ends after those inside it
        found.append(outermost.module)
        at, rest = _storage(outermost.output), rest[rest.index(outermost) + 1 :]
    return found


def _mixes(model: PreTrainedModel, takes_positions: bool, calls: list[_Watched]) -> str | None:
    """Return why examples in one row would not be alone, as far as shapes tell; engine/probe.py tells by values."""
    tokens = model.get_input_embeddings()
    for call in calls:
        if isinstance(call.module, nn.Conv1d):
            return f"a convolution ({call.name}) mixes neighbouring tokens"
        if isinstance(call.module, nn.Embedding) and call.module is not tokens and not takes_positions:
            return f"positions ({call.name}) cannot restart in the middle of a row"
    return None


def _window(model: PreTrainedModel) -> int | None:
    """Return the smallest attention window: a ready mask knows nothing of it, so longer examples would see too much."""
    config = model.config.get_text_config()
    sizes = [value for name, value in vars(config).items() if "window" in name and isinstance(value, int) and value > 1]
    return min(sizes, default=None)


def _logits(model: PreTrainedModel) -> Logits:
    """Read what the family does to the head's output; each name is the one its configuration uses."""
    config = model.config.get_text_config()
    scale = 1.0
    for name, divides in (("logit_scale", False), ("lm_head_multiplier", False), ("logits_scaling", True)):
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value:
            scale = scale / value if divides else scale * value
    return Logits(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
