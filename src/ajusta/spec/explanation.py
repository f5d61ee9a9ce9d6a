"""What `ajusta explain` found: what one block keeps and for whom, and five ways to train one model, each traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class KeptTensor:
    """One tensor that a block's forward pass leaves for its backward pass; paths are those of modules in the block."""

    made_in: str
    operation: str
    read_by: tuple[str, ...]  # whose backward pass asks for it
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the parts of one kind keep: norm, attention, gated, activation, experts, adapter, frozen or other."""

    part: str
    modules: int
    tensors: tuple[KeptTensor, ...]

    @property
    def bytes(self) -> int:
        """All of them together."""
        return sum(tensor.bytes for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """One block between its two passes, for a micro-batch of `tokens`, with adapters and nothing recomputed."""

    block: str  # its class
    alike: int  # blocks of the model that are of this kind
    tokens: int
    kept: tuple[Kept, ...]
    rebuilt_bytes: int  # what would be kept too, and is made again of what is
    backward_bytes: int  # what its backward pass needs at most beside what is there as it begins

    @property
    def kept_bytes(self) -> int:
        """All that the block keeps."""
        return sum(kept.bytes for kept in self.kept)


@dataclass(frozen=True, kw_only=True)
class Level:
    """One way to train: the techniques up to `technique` together. Sizes in bytes, of one micro-batch's step."""

    technique: str
    trained: int  # weights that are trained
    bits: str
    recompute_blocks: int
    loss_rows: int  # positions that meet the head at a time
    peak_bytes: int
    operation: str
    by_category: Mapping[str, int] = field(hash=False)  # at the fullest moment
    saved_bytes: int  # kept for the backward pass as it begins
    recompute_bytes: int  # of what a block keeps while it is run again, the most at the fullest moment of any section
    logits_bytes: int  # of logits and loss, the same
    step_seconds: float  # of all the step's micro-batches and the update, by the roofline
    need_bytes: int | None  # the peak, and what must be free beside it; None: nothing was said about the memory
    fits: bool | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One model under five ways of training."""

    model: str
    model_type: str
    parameters: int
    blocks: int
    vocabulary: int
    dtype: str
    rank: int
    device: str
    budget_bytes: int | None  # None: nothing was said about the memory
    step_tokens: int
    micro_batches: int  # of the step
    micro_tokens: int  # of the fullest one, which is traced
    speeds: str  # whose figures the times are made of
    speeds_measured: bool
    block: BlockMemory
    levels: tuple[Level, ...]
