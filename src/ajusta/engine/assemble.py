"""Fill a skeleton: tensor by tensor from the source, quantized on arrival, an adapter beside each chosen linear.

Buffers that are saved with a model (DeepSeek's bias of the choice of experts) are read like weights, and keep the dtype
that the model's class gives them. At no moment does the host hold more than what is final plus one tensor as it was
read. Over a counting place nothing is read: the same code books the same tensors on `meta`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ajusta.base.errors import ModelError
from ajusta.blocks.dropout import DropoutContext, LoraDropout
from ajusta.blocks.linear import FrozenLinear, is_conv1d
from ajusta.blocks.lora import LoraLinear
from ajusta.blocks.storage import Storage
from ajusta.blocks.targets import Targets, choose_targets, no_targets
from ajusta.engine.chain import Chain
from ajusta.engine.skeleton import BufferSlot, Skeleton
from ajusta.engine.weights import WeightSource
from ajusta.engine.weights_base import with_storages
from ajusta.engine.weights_names import Matching, match_names, renamer
from ajusta.memory.place import Category, Place


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """The adapters to put beside the linears; `alpha` is divided by sqrt(rank), or by rank if not rank-stabilised.

    `targets` and `exclude` are names as in blocks/targets.py; None is every linear of the blocks but the routers.
    """

    rank: int
    alpha: float
    rank_stabilized: bool = True
    dropout: float = 0.0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    targets: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """What belongs to which part of a model, settled before a byte is moved."""

    targets: Targets
    stored: Mapping[str, str]  # the model's tensor name -> its name in the source; empty without one
    computed: tuple[str, ...] = ()  # buffers that the source lacks and the model's class computes


@dataclass(kw_only=True)
class Assembled:
    """A model ready to be trained or asked; its parts are keyed by the model's own paths, in its order."""

    chain: Chain
    targets: Targets
    linears: dict[str, FrozenLinear]  # every linear of the blocks that is ours now, with or without an adapter
    adapters: dict[str, LoraLinear]
    module_paths: tuple[str, ...]  # of every module that holds a tensor, as the model itself names it
    loose: frozenset[str]  # names of tensors that belong to none of `linears`: embeddings, head, norms, routers

    def parameters(self) -> list[nn.Parameter]:
        """Return what is trained, in the model's order: A and B of each adapter."""
        return [p for adapter in self.adapters.values() for p in (adapter.lora_A, adapter.lora_B)]


def assemble(
    skeleton: Skeleton,
    source: WeightSource | None,
    place: Place,
    *,
    dtype: torch.dtype,
    bits: str,
    adapter: AdapterSpec | None,
    fitting: Fitting | None = None,
    loaded: Callable[[int, int], None] = lambda done, total: None,
) -> Assembled:
    """Fill a skeleton from `source` (None on a counting place) and adapt it; the skeleton is used up.

    Args:
        skeleton: the model on `meta`, taken apart.
        source: where weights come from; None leaves them on `meta`.
        place: where the model lives.
        dtype: what the model computes in, and what unquantized weights are stored in.
        bits: `none`, `int8` or `nf4`, for the linears of the decoder blocks; routers stay in `dtype`. Of a source with
            quantized weights the others stay too, and those that it stores so are taken as they are.
        adapter: which linears get an adapter, and its settings; None for a plain model.
        fitting: what `fit` said of the model, where it was asked before; an excerpt needs what it said of the whole.
        loaded: told (tensors done, tensors in all).

    Raises:
        ModelError: the source lacks a tensor, or holds one that the model has no place for.
        UserError: a wrong target name, or no linear is left to adapt.
    """
    fitting = fitting or fit(skeleton, source, adapter)
    targets = fitting.targets
    reader = _Reader(skeleton, source, place, dtype, fitting, loaded)
    linears: dict[str, FrozenLinear] = {}
    adapters: dict[str, LoraLinear] = {}
    beside = None if adapter is None else _Adapters(adapter, place)
    for number, (path, module) in enumerate(skeleton.linears.items()):
        place.mark("load", skeleton.chain.block_of(path))
        is_router, is_adapted = path in targets.routers, path in targets.adapted
        if is_router and not is_adapted:
            continue  # the model's own module stays, filled with all the rest
        kind = reader.kind(f"{path}.weight", "none" if is_router else bits)
        linears[path] = base = _frozen(path, module, reader, kind, place)
        if beside is not None and is_adapted:
            adapters[path] = beside.put(base, number)
        _replace(skeleton.chain, path, adapters.get(path, base))
    reader.fill_rest()
    _compute_buffers(skeleton, fitting.computed, place)
    if beside is not None:
        skeleton.chain.dropout = beside.context
        skeleton.chain.dropping = [layer for layer in adapters.values() if layer.dropout is not None]
    return Assembled(
        chain=skeleton.chain,
        targets=targets,
        linears=linears,
        adapters=adapters,
        module_paths=tuple(dict.fromkeys(name.rpartition(".")[0] for name in skeleton.slots)),
        loose=frozenset(name for name in skeleton.slots if name.rpartition(".")[0] not in linears),
    )


def fit(skeleton: Skeleton, source: WeightSource | None, adapter: AdapterSpec | None) -> Fitting:
    """Say which linears get an adapter, and which stored tensor fills which of the model's.

    Raises:
        ModelError: the source lacks a tensor, or holds one that the model has no place for.
        UserError: a wrong target name, or no linear is left to adapt.
    """
    stored: Mapping[str, str] = {}
    computed: tuple[str, ...] = ()
    if source is not None:
        matching = match_stored(skeleton, source)
        stored, computed = matching.found, skeleton.may_lack(matching.missing)
        _refuse_transposed(skeleton, source)
    return Fitting(targets=_targets(skeleton, adapter), stored=stored, computed=computed)


def _refuse_transposed(skeleton: Skeleton, source: WeightSource) -> None:
    """Refuse quantized weights that the model itself holds the other way round (`Conv1D`).

    Raises:
        ModelError: there are some.
    """
    if with_storages(source) is not None and any(is_conv1d(module) for module in skeleton.linears.values()):
        raise ModelError(
            f"{source.reference} is already quantized, and {type(skeleton.chain.model).__name__} holds its weights as "
            f"[in, out]; expected [out, in], the only way in which quantized ones are read; choose its plain version"
        )


def match_stored(skeleton: Skeleton, source: WeightSource) -> Matching:
    """Say which stored tensor is which of the model's weights and persistent buffers.

    Raises:
        ModelError: the source lacks a tensor, or holds one that the model has no place for.
    """
    model = skeleton.chain.model
    matching = match_names(source.infos, skeleton.stored, model.base_model_prefix, renamer(model))
    tied = [name for name, _ in skeleton.tied]
    matching.require_complete(tied=(*tied, *skeleton.may_lack(matching.missing)), reference=source.reference)
    return matching


def _targets(skeleton: Skeleton, adapter: AdapterSpec | None) -> Targets:
    if adapter is None:
        return no_targets(skeleton.linears, routers=skeleton.routers)
    return choose_targets(
        skeleton.linears,
        names=adapter.targets,
        exclude=adapter.exclude,
        routers=skeleton.routers,
        stacked=skeleton.stacked,
    )


class _Adapters:
    """Makes one adapter after the other: their starts are drawn in the model's order from one generator."""

    def __init__(self, spec: AdapterSpec, place: Place) -> None:
        self._spec, self._place = spec, place
        self._generator = torch.Generator().manual_seed(spec.seed)
        self.context = DropoutContext(seed=spec.seed)

    def put(self, base: FrozenLinear, number: int) -> LoraLinear:
        """Return linear `number` of the model with an adapter beside it; by the number it has a dropout of its own."""
        spec, dropout = self._spec, None
        if spec.dropout > 0:
            dropout = LoraDropout(probability=spec.dropout, layer=number, context=self.context)
        with self._place.category(Category.ADAPTERS):
            layer = LoraLinear.from_base(
                base,
                rank=spec.rank,
                alpha=spec.alpha,
                generator=self._generator,
                rank_stabilized=spec.rank_stabilized,
                dropout=dropout,
                dtype=spec.dtype,
            )
        return layer.train()


class _Reader:
    """Hands out each of the model's tensors once, on the place and in the right dtype."""

    def __init__(
        self,
        skeleton: Skeleton,
        source: WeightSource | None,
        place: Place,
        dtype: torch.dtype,
        fitting: Fitting,
        loaded: Callable[[int, int], None],
    ) -> None:
        self._skeleton, self._source, self._place, self._dtype, self._loaded = skeleton, source, place, dtype, loaded
        self._stored, self._quantized = fitting.stored, with_storages(source)
        self._slots = {name: slot for name, slot in skeleton.stored.items() if name not in fitting.computed}
        self._left = dict.fromkeys(self._slots)
        self._total = len(self._slots)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor as it will be kept; on a counting place a `meta` tensor of its size."""
        raw = self.raw(name)
        return raw.to(device=self._place.device, dtype=self._kept_as(name))

    def raw(self, name: str) -> Tensor:
        """Return the tensor as the source reads it (fp32 for a block-quantized file), still on the host."""
        self._count(name)
        shape = self._slots[name].tensor
        if self._source is None:
            return torch.empty_like(shape, dtype=self._kept_as(name), device=self._place.device)
        read = self._source.read(self._stored[name])
        assert read.shape == shape.shape, f"{name}: {tuple(read.shape)} is not {tuple(shape.shape)}"
        return read

    def kind(self, name: str, bits: str) -> str:
        """Return how a linear's weight is to be kept where `bits` is asked for all."""
        return bits if self._quantized is None or self._stored[name] in self._quantized.kinds else "none"

    def storage(self, name: str, kind: str) -> Storage | None:
        """Return a weight that the source stores as `kind`, as it lies there; None where it does not."""
        if self._quantized is None or self._quantized.kinds.get(self._stored[name]) != kind:
            return None
        self._count(name)
        return self._quantized.storage(self._stored[name])

    def fill_rest(self) -> None:
        """Fill every tensor that no linear took: embeddings, head, norms, buffers; then tie what is tied."""
        tied = {name for name, _ in self._skeleton.tied}
        for name in list(self._left):
            if name not in tied:
                self._place.mark("fill", self._skeleton.chain.block_of(name))
                with self._place.category(Category.BASE):
                    self._slots[name].put(self.tensor(name))
        for name, other in self._skeleton.tied:
            self._slots[name].put(self._slots[other].tensor)

    def _count(self, name: str) -> None:
        self._left.pop(name)
        self._loaded(self._total - len(self._left), self._total)

    def _kept_as(self, name: str) -> torch.dtype:
        slot = self._slots[name]
        return slot.dtype if isinstance(slot, BufferSlot) else self._dtype


def _frozen(path: str, module: nn.Module, reader: _Reader, bits: str, place: Place) -> FrozenLinear:
    """Read one linear's weight and store it as asked; the tensor that was read is free when this returns."""
    name, transposed = f"{path}.weight", is_conv1d(module)
    with place.category(Category.BASE):
        storage = reader.storage(name, bits)
        if storage is None:
            weight = reader.tensor(name) if bits == "none" else reader.raw(name)
        bias = reader.tensor(f"{path}.bias") if module._parameters.get("bias") is not None else None
        if storage is None:
            layer = FrozenLinear.store(weight, bias, bits, transposed=transposed)
        else:
            layer = FrozenLinear(storage, bias, transposed=transposed)
        layer.storage.to(place.device)  # quantized on the host, moved afterwards: the device never sees the float
        return layer


def _replace(chain: Chain, path: str, layer: nn.Module) -> None:
    """Put `layer` where the model has the linear of this path; the path is the one from before the relays."""
    parent, _, leaf = path.rpartition(".")
    setattr(chain.submodule(parent), leaf, layer)


def _compute_buffers(skeleton: Skeleton, also: Sequence[str], place: Place) -> None:
    """Give the buffers that no file holds (rotary frequencies) their bytes, and let the model compute their values.

    `also`: names of buffers that a file may hold, and that this one does not.
    """
    model = skeleton.chain.model
    homes = {id(m): number for number, block in enumerate(skeleton.chain.blocks) for m in block.modules()}
    left = (skeleton.buffers[name] for name in also if name in skeleton.buffers)
    loose = (*skeleton.loose_buffers, *((slot.holder, slot.leaf) for slot in left))
    for module, name in loose:
        shape = module._buffers[name]
        assert shape is not None
        place.mark("buffers", homes.get(id(module)))
        with place.category(Category.BASE):
            module._buffers[name] = torch.empty_like(shape, device=place.device)
    if place.device.type == "meta":
        return
    computed = {(id(module), name) for module, name in loose}
    for module in {id(module): module for module, _ in loose}.values():
        filled = [b for name, b in module._buffers.items() if b is not None and (id(module), name) not in computed]
        for tensor in (*module.parameters(recurse=False), *filled):
            # transformers' own mark: or an embedding with a scale in a buffer would get random weights again (Gemma)
            vars(tensor)["_is_hf_initialized"] = True
        with torch.no_grad():
            model._init_weights(module)
