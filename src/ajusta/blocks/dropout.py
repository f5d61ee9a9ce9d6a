"""LoRA dropout without a random stream: whether a number is kept is a pure function of where it stands.

    keep(seed, step, layer, example, position, feature) = hash32(...) >= p * 2^32

A random stream depends on the order of draws, so another split of the batch, another packing, a tile or a recompute
would train another model. A counter-based hash depends on none of them, and nothing has to be saved for the backward
pass but one 64-bit key a token. (The idea is that of counter-based generators, Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3".)

The mixing is a 32-bit multiply-xorshift permutation (Wellons, "Prospecting for hash functions", 2018; constants of its
2-round winner, which are below 2^31, so that a product with a 32-bit value never leaves int64). Token keys and feature
keys are mixed apart before they meet: were the raw feature numbers xor-ed in, two tokens could have permuted copies of
one mask. tests/blocks/test_dropout.py holds the keep rate, the balance of single bits, and the independence between
neighbouring layers, steps, positions, examples and features to within 5 standard errors.

Shape letters: T tokens, I features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_FEATURE_SALT = 0x5BD1E995
MASK_BYTES = 32  # held for each number of a mask while it is made: callers go tile by tile
Word = TypeVar("Word", int, Tensor)


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """Which tokens a micro-batch holds: example and position of each [T], and the optimizer step they belong to."""

    step: int
    example_ids_T: Tensor
    position_ids_T: Tensor


@dataclass(kw_only=True)
class DropoutContext:
    """The one object that the engine and every layer share: the run's seed and the micro-batch now passing through.

    The engine sets `tokens` before each forward pass, and again before a recompute (a policy that remembers its inputs
    remembers this frozen `TokenIds` beside them). A shared object, not a thread-local: autograd runs backward passes,
    and so recomputes, on a thread of its own.
    """

    seed: int
    tokens: TokenIds | None = field(default=None)


@dataclass(frozen=True, kw_only=True)
class LoraDropout:
    """The dropout of one layer; `layer` is its number in the model's order, `probability` in (0, 1)."""

    probability: float
    layer: int
    context: DropoutContext

    def __post_init__(self) -> None:
        assert 0 < self.probability < 1, "no dropout is dropout=None"

    def row_keys(self) -> Tensor:
        """Return one 32-bit key a token, as int64 [T]."""
        tokens = self.context.tokens
        assert tokens is not None, "the engine sets DropoutContext.tokens before the forward pass"
        key = _mix(self.context.seed & _WORD)
        for word in (self.context.seed >> 32 & _WORD, tokens.step & _WORD, self.layer):
            key = _mix(key ^ word)
        keys_T = _mix((tokens.example_ids_T & _WORD) ^ key)
        keys_T = _mix((tokens.example_ids_T >> 32 & _WORD) ^ keys_T)
        return _mix((tokens.position_ids_T & _WORD) ^ keys_T)


def keep_mask(keys_T: Tensor, num_features: int, probability: float, dtype: torch.dtype) -> Tensor:
    """Return [T, I] of ones (kept) and zeros (dropped with `probability`); the caller scales by 1 / (1 - probability).

    `MASK_BYTES` an element are held while it is made.
    """
    features_I = _mix(torch.arange(num_features, device=keys_T.device, dtype=torch.int64) ^ _FEATURE_SALT)
    words_TI = _mix(keys_T[:, None] ^ features_I)
    return (words_TI >= round(probability * 2**32)).to(dtype)


def _mix(word: Word) -> Word:
    """Permute 32-bit words (held in int64): every input bit flips each output bit with probability near 1/2."""
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & _WORD
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & _WORD
    return word ^ (word >> 15)
