"""Graphics cards that are known by name, so that a plan can be made for a card that is not here.

The facts stand in cards.toml, in the units of the makers' pages and each with its page; here they become bytes and
FLOP/s. GB of bandwidth and of the link are 10^9 bytes, memory is counted in MiB. Rates are peaks at the boost clock:
a training step reaches a share of them, which is for others to know.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from ajusta.base.errors import UserError
from ajusta.base.units import MIB
from ajusta.spec.device import Device

_BF16_SINCE = (8, 0)  # compute capability; https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
_TRANSFERS_PER_S = {"3.0": 8e9, "4.0": 16e9, "5.0": 32e9}  # PCI Express base specifications, a lane and a direction
_CODE = 128 / 130  # bits of data among the bits sent, the same for all three
_MOST_SUGGESTIONS = 3


@dataclass(frozen=True, kw_only=True)
class Card:
    """One graphics card with one size of memory."""

    name: str  # as on its box, always with the memory: "GeForce RTX 3060 12GB"
    aliases: tuple[str, ...] = ()
    memory_bytes: int  # what CUDA gives on Linux, or the size on the box where `nominal`
    nominal: bool  # CUDA will give less than memory_bytes
    memory_source: str  # who says so; empty where `nominal`
    bandwidth_bytes_per_s: float  # between the card and its memory
    compute_capability: tuple[int, int]
    rates: Mapping[str, float] = field(hash=False)  # dtype to FLOP/s, the fastest first: dense, summed in fp32
    host_link_bytes_per_s: float  # one way, in theory
    source: str  # URL
    rates_source: str  # URL
    note: str = ""  # what a person should be told when they name this card


@cache
def known_cards() -> tuple[Card, ...]:
    """Return every card of cards.toml, in the order of the file; read once."""
    table = tomllib.loads(files("ajusta.spec").joinpath("cards.toml").read_text(encoding="utf-8"))
    return tuple(_cards(table["card"], table["evidence"]))


def _cards(rows: list[dict[str, Any]], evidence: Mapping[str, str]) -> Iterator[Card]:
    """Turn rows into cards; where a fact comes from is a key of the evidence or an address."""
    for row in rows:
        major, minor = row["compute_capability"].split(".")
        capability = (int(major), int(minor))
        told, rated = row.get("memory_from", ""), row.get("rates_from", row["source"])
        yield Card(
            name=row["name"],
            aliases=tuple(row.get("aliases", ())),
            memory_bytes=row["memory_mib"] * MIB,
            nominal=row.get("nominal", False),
            memory_source=evidence.get(told, told),
            bandwidth_bytes_per_s=row["bandwidth_gb_s"] * 1e9,
            compute_capability=capability,
            rates=_rates(row["fp32_tflops"], row.get("tensor_tflops"), capability),
            host_link_bytes_per_s=_link(row["pcie"]),
            source=row["source"],
            rates_source=evidence.get(rated, rated),
            note=row.get("note", ""),
        )


def _rates(fp32: float, tensor: float | None, capability: tuple[int, int]) -> Mapping[str, float]:
    """Return FLOP/s a dtype, the fastest first; bf16 before fp16, which is as fast but needs its loss scaled."""
    tflops = {"fp32": fp32}
    if tensor is not None:
        narrow = ("bf16", "fp16") if capability >= _BF16_SINCE else ("fp16",)
        tflops = dict.fromkeys(narrow, tensor) | tflops
    return MappingProxyType({name: rate * 1e12 for name, rate in tflops.items()})


def _link(pcie: str) -> float:
    """Return bytes/s one way for `4.0 x16`: generation and lanes."""
    generation, lanes = pcie.split(" x")
    return _TRANSFERS_PER_S[generation] * int(lanes) * _CODE / 8


def cards_by_memory() -> tuple[Card, ...]:
    """Return every card, the one with the least memory first; of equal ones the slower memory first."""
    return tuple(sorted(known_cards(), key=lambda card: (card.memory_bytes, card.bandwidth_bytes_per_s, card.name)))


def find_card(text: str) -> Card:
    """Return the card that a person means.

    Args:
        text: `rtx3060`, `3060 12GB`, `NVIDIA GeForce RTX 3060`, `A100-SXM4-80GB`: a name as people, boxes or the driver
            write it. Without a size it is the commonest one; the card's note then says that there are others.

    Raises:
        UserError: no card has this name; the message has the nearest names.
    """
    card = _by_key().get(_key(text))
    if card is None:
        raise UserError(
            f"{text!r} is no card of the catalogue; expected one of {len(known_cards())} NVIDIA cards by its name, "
            f"with the size where there are several; {_advice(text)}"
        )
    return card


@cache
def _by_key() -> Mapping[str, Card]:
    return {_key(name): card for card in known_cards() for name in (card.name, *card.aliases)}


def _key(text: str) -> str:
    """Return what is left of a name without spelling: no maker, no family, no spaces, the size at the end."""
    words = re.sub(r"nvidia|geforce|tesla|generation|edition|graphics|card|gpu|\b(?:hbm|gddr)\w*", " ", text.lower())
    words = re.sub(r"mobile|notebook", "laptop", words)
    size = re.search(r"(?<![a-z0-9])(\d+)\s*g(?:i?b)?(?![a-z0-9])", words)
    if size is not None:
        words = words[: size.start()] + words[size.end() :] + size[1] + "gb"
    return re.sub(r"[rg]tx(?=a?\d|pro)", "", re.sub(r"[^a-z0-9]", "", words))


def _advice(text: str) -> str:
    """Return what to type instead: the nearest names, or how names look."""
    keys = difflib.get_close_matches(_key(text), list(_by_key()), n=4 * _MOST_SUGGESTIONS, cutoff=0.55)
    names = list(dict.fromkeys(_by_key()[key].name for key in keys))[:_MOST_SUGGESTIONS]
    if not names:
        return "write it as it is sold: 'RTX 3060 12GB' or 'A100 80GB'"
    return "did you mean " + " or ".join(repr(name) for name in names) + "?"


def as_device(card: Card) -> Device:
    """Return the card as the planner sees a device, all of its memory free.

    What a context, a screen or other programs take is not taken off; no host is known, so `cpu_threads` is 0.
    """
    return Device(
        kind="cuda",
        name=f"NVIDIA {card.name}",
        total_bytes=card.memory_bytes,
        free_bytes=card.memory_bytes,
        cpu_threads=0,
        dtypes=tuple(card.rates),
        compute_capability=card.compute_capability,
    )
