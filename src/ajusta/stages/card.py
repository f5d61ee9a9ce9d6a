"""A card that is not here as a machine to plan for: what of its memory is left, and what it computes in."""

from __future__ import annotations

from ajusta.base.units import show_bytes
from ajusta.memory.outside import Taken, outside_terms
from ajusta.spec.cards import Card, as_device, find_card
from ajusta.spec.config import Config
from ajusta.spec.device import Machine
from ajusta.spec.speeds import tabulated

NOMINAL_SHARE = (
    0.02  # of the size on the box: CUDA gave 1 to 3 % less wherever both figures are known (spec/cards.toml)
)
_DESKTOP = "GeForce"  # these drive a screen more often than not


def machine_of(gpu: str | Card, config: Config) -> Machine:
    """Return the machine that a person has with this card.

    Raises:
        UserError: no card has this name.
    """
    card = find_card(gpu) if isinstance(gpu, str) else gpu
    device = as_device(card)
    dtype, why = config.dtype, "you asked for it"
    if dtype == "auto":
        dtype = "bf16" if device.can("bf16") else "fp32"
        why = "the card multiplies it fastest" if dtype == "bf16" else "this card has no bf16, and fp16 overflows"
    if config.memory_bytes is not None:
        budget, because = config.memory_bytes, "you asked for it"
    else:
        budget, because = _left(card)
    return Machine(
        device=device,
        dtype=dtype,
        dtype_because=why,
        budget_bytes=budget,
        budget_because=because,
        roofline=tabulated(card),
    )


def _left(card: Card) -> tuple[int, str]:
    """Return what of the card is left for a run, and what is taken off."""
    left, off = card.memory_bytes, []
    if card.nominal:
        off.append((f"{NOMINAL_SHARE:.0%} that CUDA does not give", int(left * NOMINAL_SHARE)))
    for term in outside_terms("cuda", card.compute_capability):
        if term.taken is Taken.BEFORE and (term.name != "other programs" or _DESKTOP in card.name):
            off.append((term.name, term.size_bytes))
    shown = ", ".join(f"{show_bytes(size)} {name}" for name, size in off)
    return left - sum(size for _, size in off), f"{show_bytes(left)} on the card less {shown}"
