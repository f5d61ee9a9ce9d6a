"""How fast a device may be that was never measured: a card by its data sheet, a processor by its cores."""

from __future__ import annotations

from ajusta.spec.cards import Card
from ajusta.spec.roofline import Kernel, Roofline

# What a data sheet's peak is worth. Unmeasured, all of them, until `ajusta doctor --measure` has run on the card.
TENSOR_SHARE = 0.6  # of the peak; published figures of large products lie between about 0.5 and 0.9 of it
THIN_SHARE = 1 / 4  # of that: a tile of 64 is worked out whole, though SHORT_SIDE of it are wanted
ATTENTION_SHARE = 0.4  # of that: memory-efficient attention has an exponential between its two products
BANDWIDTH_SHARE = 0.8  # of the peak: what a copy of a large tensor is known to reach
LAUNCH_S = 8e-6  # Python, autograd and the launch of a kernel

# A thread of a processor, rounded from what doctor --measure gave on two threads of a Zen 3 and a Zen 4 (LAB.md).
THREAD_FLOPS = 80e9
THREAD_BYTES_PER_S = 18e9
CALL_S = 5e-5


def tabulated(card: Card) -> Roofline:
    """Return what may be expected of a card by its data sheet."""
    wide = {name: TENSOR_SHARE * rate for name, rate in card.rates.items()}
    short = {name: THIN_SHARE * rate for name, rate in wide.items()}
    return Roofline(
        matmul_flops=wide,
        thin_flops=short,
        few_flops=short,
        attention_flops={name: ATTENTION_SHARE * rate for name, rate in wide.items()},
        bandwidth_bytes_per_s=BANDWIDTH_SHARE * card.bandwidth_bytes_per_s,
        per_operation_s=LAUNCH_S,
        source=f"data sheet of {card.name}: {TENSOR_SHARE:.0%} of its rate, {BANDWIDTH_SHARE:.0%} of its bandwidth; "
        "these shares are unmeasured",
        measured=False,
    )


def typical_processor(threads: int) -> Roofline:
    """Return what may be expected of a processor: the same for every one, so that a plan does not change with its mood.

    Two runs of one command must make the same choices, or their sums would be rounded differently. A measurement gives
    other figures each time; one that is kept (`ajusta doctor --measure`) does not.
    """
    flops = THREAD_FLOPS * threads
    return Roofline(
        matmul_flops={"fp32": flops},
        thin_flops={"fp32": flops / 2},
        few_flops={"fp32": flops / 2.5},
        attention_flops={"fp32": flops / 3},
        short_flops={"fp32": flops / 6},
        bandwidth_bytes_per_s=THREAD_BYTES_PER_S * threads,
        per_operation_s=CALL_S,
        kernels={
            **{f"nf4 {name}": Kernel(call_s=3e-5, numbers_per_s=2e9 * threads) for name in ("fp32", "bf16")},
            **{f"int8 {name}": Kernel(call_s=5e-5, numbers_per_s=4e9 * threads) for name in ("fp32", "bf16")},
        },
        source=f"typical speed of {threads} threads of a processor; ajusta doctor --measure takes this one's own",
        measured=False,
    )
