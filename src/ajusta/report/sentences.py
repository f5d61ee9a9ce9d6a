"""The words of an explanation: why a block keeps what it keeps, and how each technique works, in a model's figures."""

from __future__ import annotations

from collections.abc import Callable

from ajusta.base.units import show_bytes
from ajusta.spec.explanation import Explanation, Kept, Level

Three = tuple[str, str, str]

_WHY = {
    "norm": "its derivative is made of input and scale",
    "gated": "gate and up, the factors of the product",
    "activation": "its input, where the derivative is taken",
    "experts": "gate and up, shares and order of the rows",
}
_FUSED = "q, k, v, output, log-sum-exp; no scores"
_WHOLE = "q, k, v and the whole matrix of scores"
_ADAPTED = "x A for B's gradient; for A's, x is there"
_ADAPTED_WITH_INPUT = "x A for B's gradient, and some x for A's"
_STORED = {
    "nf4": "in NF4: 4 bits a weight, the nearest of 16 levels that lie as normally distributed weights do, and an "
    "8-bit scale for each 64 weights",
    "int8": "in int8: a byte a weight, and a scale for each row of a matrix",
}


def why_kept(kept: Kept) -> str:
    """Say why a part of a block keeps what it keeps."""
    if kept.part == "attention":
        return _FUSED if any("attention" in tensor.operation for tensor in kept.tensors) else _WHOLE
    if kept.part == "adapter":
        own = all(tensor.made_in in tensor.read_by for tensor in kept.tensors)
        return _ADAPTED if own else _ADAPTED_WITH_INPUT
    if kept.part in _WHY:
        return _WHY[kept.part]
    readers = dict.fromkeys(reader for tensor in kept.tensors for reader in tensor.read_by if reader)
    return f"asked for by {', '.join(readers)}" if readers else "held by the block itself"


def how_it_works(explanation: Explanation) -> tuple[Three, ...]:
    """Return three sentences a level."""
    levels = explanation.levels
    pairs = zip(levels, (levels[0], *levels[:-1]), strict=True)
    return tuple(_WORDS[level.technique](explanation, level, before) for level, before in pairs)


def count_text(number: int) -> str:
    """Write a number of weights as `8.03 billion` or `134.5 million`."""
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if number >= size:
            value = number / size
            return f"{value:.2f} {unit}" if value < 100 else f"{value:.1f} {unit}"
    return f"{number:,}"


def _full(explanation: Explanation, level: Level, _: Level) -> Three:
    each = (_state(level) + level.by_category.get("trained weights", 0)) / level.trained
    narrow = explanation.dtype != "fp32"
    copy = f", and in {explanation.dtype} an fp32 copy, or small updates would round to nothing" if narrow else ""
    return (
        f"Each of {count_text(level.trained)} weights is trained, so beside it lie its gradient and AdamW's two "
        f"moments{copy}: {each:.0f} bytes a weight.",
        f"The forward pass saves what the derivatives are made of, {show_bytes(level.saved_bytes)}: of a product "
        "y = x W the input x, since the gradient of W is x^T dy.",
        f"All {level.loss_rows:,} positions meet the head at once, so {level.loss_rows:,} x "
        f"{explanation.vocabulary:,} logits exist, and their gradient.",
    )


def _lora(explanation: Explanation, level: Level, before: Level) -> Three:
    now, then = show_bytes(level.saved_bytes), show_bytes(before.saved_bytes)
    alike = abs(level.saved_bytes - before.saved_bytes) < 0.1 * before.saved_bytes
    saved = f"hardly change ({now}, before {then})" if alike else f"go from {then} to {now}"
    return (
        f"W stays frozen, and a product of two thin matrices of rank {explanation.rank} is trained beside it, "
        f"y = x W + s x A B: {count_text(level.trained)} adapter weights instead of {count_text(before.trained)}.",
        f"Gradients and optimizer state exist for these alone: {show_bytes(_state(level))} instead of "
        f"{show_bytes(_state(before))}.",
        f"The saved activations {saved}: for W's gradient x is no longer needed, but for A's it is.",
    )


def _quantization(explanation: Explanation, level: Level, before: Level) -> Three:
    experts = ", experts" if any(kept.part == "experts" for kept in explanation.block.kept) else ""
    return (
        f"The blocks' frozen matrices are stored {_STORED[level.bits]}.",
        f"Base weights and constants shrink from {show_bytes(_base(before))} to {show_bytes(_base(level))}; "
        f"embeddings, head, norms{experts} stay in {explanation.dtype}.",
        f"A matrix is expanded to {explanation.dtype} for each product and dropped again, so a step takes "
        f"{_times(level, before)} the time; it is the one technique that rounds the model.",
    )


def _checkpointing(explanation: Explanation, level: Level, before: Level) -> Three:
    return (
        f"Each of {explanation.blocks} blocks keeps its input and forgets the rest: {show_bytes(level.saved_bytes)} "
        f"saved instead of {show_bytes(before.saved_bytes)}.",
        "On the way back a block is run forward once more and then differentiated, so that one block's activations "
        f"exist at a time, a window of {show_bytes(level.recompute_bytes)}.",
        f"The gradient is the same bit for bit, and a step takes {_times(level, before)} the time, for about one more "
        "forward pass.",
    )


def _chunked(explanation: Explanation, level: Level, before: Level) -> Three:
    if level.loss_rows == before.loss_rows:
        gain = f"Head and softmax would take the positions in chunks, but all {level.loss_rows:,} of them are one"
    else:
        gain = (
            f"Head and softmax take {level.loss_rows:,} positions at a time instead of {before.loss_rows:,}, so logits "
            f"and loss take {show_bytes(level.logits_bytes)} instead of {show_bytes(before.logits_bytes)}"
        )
    return (
        f"{gain}.",
        "The gradient is written over the logits in place, and carried to the hidden states before the next chunk.",
        f"The loss is a sum, divided once at the end, so cutting it changes nothing but rounding, and a step takes "
        f"{_times(level, before)} the time.",
    )


def _state(level: Level) -> int:
    """Return the bytes of gradients and optimizer state."""
    return level.by_category.get("gradients", 0) + level.by_category.get("optimizer state", 0)


def _base(level: Level) -> int:
    return level.by_category.get("base weights", 0) + level.by_category.get("quantization constants", 0)


def _times(level: Level, before: Level) -> str:
    return f"{level.step_seconds / before.step_seconds:.2f} times"


_WORDS: dict[str, Callable[[Explanation, Level, Level], Three]] = {
    "full fine-tuning": _full,
    "LoRA": _lora,
    "quantization": _quantization,
    "gradient checkpointing": _checkpointing,
    "chunked loss": _chunked,
}
