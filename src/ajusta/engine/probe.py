"""Ask the loaded model itself, on its real weights, if the chain is the model and if examples may share a row.

    replay     one example through prelude, blocks, epilogue and head  =  through the model's own forward
    causal     the first tokens of an example  =  the same tokens with others behind them
    isolation  two examples in one row                                 =  each of them alone

Shapes cannot tell everything (engine/derive.py): a recurrent family may mix the examples of a row, a family may count
its positions from 2, a state may outlive a forward pass. Seven tokens tell, in a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ajusta.blocks.attention import Segments, using
from ajusta.engine.chain import Chain
from ajusta.engine.masks import block_diagonal_mask
from ajusta.memory.place import Place
from ajusta.spec.data import IntArray

_SEGMENTS = (3, 4)
_PREFIXES = (3, 5)  # tokens; both must tell of later ones, so that no single choice of experts at a tie does
# Largest difference allowed, in units of the largest logit; a wrong split is off by 1e-2 and more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the probe found; `message` says it in one sentence, for a note or a refusal."""

    replay_equal: bool
    isolates: bool
    message: str
    finite: bool = True  # False: the weights are damaged, or too large for the dtype
    causal: bool = True  # False: tokens see those behind them


def probe(chain: Chain, place: Place, vocabulary: int) -> Probe:
    """Compare chain and model on 7 tokens, and set `chain.takes_positions` and `chain.mixes_because` by what is found.

    A family whose own positions do not start at 0 is run without ours, if that mends it: its examples then lie alone.
    """
    ids = np.arange(1, 1 + sum(_SEGMENTS), dtype=np.int64) * max(vocabulary // 11, 1) % vocabulary
    tolerance = _TOLERANCE[chain.dtype]
    for layer in chain.dropping:
        layer.eval()
    with torch.no_grad():
        own = _own_logits(chain, place, ids)
        if not bool(torch.isfinite(own).all()):
            message = f"{type(chain.model).__name__} gives logits that are no finite numbers"
            return Probe(replay_equal=False, isolates=False, message=message, finite=False)
        error = _difference(_logits(chain, place, ids, (len(ids),)), own)
        if error > tolerance and chain.takes_positions:
            chain.takes_positions = False  # such a family counts from 2, say
            error = _difference(_logits(chain, place, ids, (len(ids),)), own)
            chain.mixes_because = "this family counts positions in a way of its own"
        if not error <= tolerance:
            return Probe(replay_equal=False, isolates=False, message=(
                f"taken apart, {type(chain.model).__name__} gives other logits than in one piece (they differ by "
                f"{error:.1e} of the largest; expected at most {tolerance:.0e})"
            ))  # fmt: skip
        seen = min(_difference(_own_logits(chain, place, ids[:length]), own[:length]) for length in _PREFIXES)
        if not seen <= tolerance:
            message = f"a token sees those behind it (they change its logits by {seen:.1e} of the largest)"
            return Probe(replay_equal=True, isolates=False, message=message, causal=False)
        if chain.mixes_because is None:
            _probe_isolation(chain, place, ids, tolerance)
    name = type(chain.model).__name__
    if chain.isolates:
        return Probe(replay_equal=True, isolates=True, message=f"{name} replayed; examples in one row stay alone")
    message = f"{name} cannot keep examples in one row apart ({chain.mixes_because}); each micro-batch is one example"
    return Probe(replay_equal=True, isolates=False, message=message)


def _probe_isolation(chain: Chain, place: Place, ids: IntArray, tolerance: float) -> None:
    first, second = np.split(ids, [_SEGMENTS[0]])
    alone = torch.cat([_logits(chain, place, part, (len(part),)) for part in (first, second)])
    error = _difference(_logits(chain, place, ids, _SEGMENTS), alone)
    if not error <= tolerance:
        chain.mixes_because = f"two examples in one row change each other's logits by {error:.1e} of the largest"


def _own_logits(chain: Chain, place: Place, ids: IntArray) -> Tensor:
    """Return the logits [T, V] of the model's own forward, given nothing but the ids."""
    inputs = {"input_ids": place.take(ids)[None], "use_cache": False}
    with using(Segments(ends=(len(ids),))):
        logits: Tensor = chain.model(**inputs).logits[0]
    return logits


def _logits(chain: Chain, place: Place, ids: IntArray, lengths: tuple[int, ...]) -> Tensor:
    """Return the logits [T, V] of the chain for examples of these lengths laid end to end."""
    ends = tuple(int(end) for end in np.cumsum(lengths))
    positions = place.take(np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]))
    mask = block_diagonal_mask(ends, chain.dtype, place) if chain.needs_mask else None
    with using(Segments(ends=ends)):
        hidden, calls = chain.prelude(place.take(ids), positions, mask)
        for index, call in enumerate(calls):
            hidden = chain.run_block(index, hidden, call)
    return chain.logits.apply(chain.head(chain.finish(hidden[0])))


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference in units of the largest value; infinite where shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.double(), expected.double()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
