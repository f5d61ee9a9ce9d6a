"""A model with fewer blocks, that stands for the whole: blocks of one kind do the same work.

A plan needs each kind of block a few times only, since what is traced of one holds for all of its kind
(planning/depth.py proves it where it is used). The kind is read off the block itself, not off the family's name.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from ajusta.engine.chain import Chain, Relay
from ajusta.engine.skeleton import Skeleton

_PLAIN = (int, float, bool, str, type(None))


def block_kinds(chain: Chain, marked: Collection[str], noted: Mapping[str, Hashable]) -> tuple[int, ...]:
    """Return for each block the number of its kind: equal numbers mean equal classes, shapes, settings and notes.

    Args:
        chain: a model taken apart, its blocks on any device.
        marked: paths of modules in blocks that are treated apart from others (those that get an adapter).
        noted: what is known of a tensor besides its shape, by its name in the model (the dtype in which it is stored).
    """
    if chain.block_path is None:
        return (0,)
    facts = [_facts(block) for block in chain.blocks]
    for where in {key for own in facts for key in own}:
        if _is_number_of_block([own.get(where) for own in facts]):
            for own in facts:
                own.pop(where, None)
    apart = _by_block(chain.block_path, {path: True for path in marked})
    notes = _by_block(chain.block_path, noted)
    kinds: dict[Hashable, int] = {}
    return tuple(
        kinds.setdefault((frozenset(own.items()), apart[number], notes[number]), len(kinds))
        for number, own in enumerate(facts)
    )


def excerpt(skeleton: Skeleton, keep: Sequence[int]) -> Skeleton:
    """Return the skeleton with only these of its blocks, in their order; the one given is used up.

    Paths keep their numbers: what was `layers.27` is found under that name.
    """
    chain = skeleton.chain
    if chain.block_path is None or len(keep) == len(chain.blocks):
        return skeleton
    prefix, kept = chain.block_path + ".", {str(number) for number in keep}

    def stays(name: str) -> bool:
        return not name.startswith(prefix) or name[len(prefix) :].partition(".")[0] in kept

    gone = {id(m) for i, block in enumerate(chain.blocks) if i not in keep for m in block.modules()}
    _hold(chain, [_relays(chain)[number] for number in keep])
    chain.numbers = tuple(keep)
    return replace(
        skeleton,
        slots={name: slot for name, slot in skeleton.slots.items() if stays(name)},
        buffers={name: slot for name, slot in skeleton.buffers.items() if stays(name)},
        linears={path: module for path, module in skeleton.linears.items() if stays(path)},
        routers=tuple(filter(stays, skeleton.routers)),
        stacked=tuple(filter(stays, skeleton.stacked)),
        tied=tuple(pair for pair in skeleton.tied if stays(pair[0])),
        loose_buffers=tuple(pair for pair in skeleton.loose_buffers if id(pair[0]) not in gone),
    )


@contextlib.contextmanager
def narrowed(chain: Chain, positions: Sequence[int]) -> Iterator[None]:
    """Let the model be only these of its blocks inside; afterwards it is whole again."""
    if len(positions) == len(chain.blocks):
        yield
        return
    relays, numbers = _relays(chain), chain.numbers
    _hold(chain, [relays[position] for position in positions])
    chain.numbers = tuple((numbers or tuple(range(len(relays))))[position] for position in positions)
    try:
        yield
    finally:
        _hold(chain, relays)
        chain.numbers = numbers


def _relays(chain: Chain) -> list[Relay]:
    holder = chain.model.get_submodule(str(chain.block_path))
    return [child for child in holder.children() if isinstance(child, Relay)]


def _hold(chain: Chain, relays: list[Relay]) -> None:
    """Make these the blocks of the model."""
    holder = chain.model.get_submodule(str(chain.block_path))
    assert isinstance(holder, nn.ModuleList)
    del holder[:]
    for number, relay in enumerate(relays):
        relay.number, relay.is_last = number, number == len(relays) - 1
        holder.append(relay)
    chain.blocks = [relay.block for relay in relays]


def _facts(block: nn.Module) -> dict[Hashable, Hashable]:
    """Return class, tensors and plain settings of every module of a block, by its path in the block."""
    facts: dict[Hashable, Hashable] = {}
    for path, module in block.named_modules():
        facts[path, "class"] = f"{type(module).__module__}.{type(module).__qualname__}"
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            facts[path, name] = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        for name, value in vars(module).items():
            if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)):
                facts[path, name] = value
    return facts


def _is_number_of_block(values: list[Hashable]) -> bool:
    """Say whether a setting is only the block's number, from 0 or from 1."""
    return len(values) > 1 and any(values == list(range(first, first + len(values))) for first in (0, 1))


def _by_block(prefix: str, named: Mapping[str, Hashable]) -> dict[int, Hashable]:
    found: dict[int, set[Hashable]] = defaultdict(set)
    for name, value in named.items():
        if name.startswith(prefix + "."):
            number, _, rest = name[len(prefix) + 1 :].partition(".")
            found[int(number)].add((rest, value))
    frozen: dict[int, Hashable] = defaultdict(frozenset)
    frozen.update({number: frozenset(own) for number, own in found.items()})
    return frozen
