"""The pairs of budget_truth: a seeded sample of small runs, each with a share of its least need. No torch in here."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cells import BITS, KINDS, SIZES, VOCABULARIES, Cell, Size

STEPS = 2  # of the optimizer, of each run
TOKENS = (128, 256, 384, 512, 768, 1024, 1536)
WISHES = ("auto", "auto", "auto", "none", "full", 1)  # of gradient checkpointing; mostly the planner's own choice
MOST_OPERATIONS = 40e9  # of one step: about a second on a slow core
LEAST_ROUGH, MOST_ROUGH = 24e6, 200e6  # bytes of tensors, roughly: clear of the noise of a heap, and still quick
NEAR = 0.1  # half of the budgets lie that close to the least need
NEARBY = ((1 - NEAR, 1.0), (1.0, 1 + NEAR))
FAR = ((0.4, 1 - NEAR), (1 + NEAR, 2.5))  # the others: below it or above it
_WEIGHT_BYTES = {"none": 4.0, "int8": 1.02, "nf4": 0.53}
_LARGER = (
    Size(hidden=512, blocks=8, heads=8, key_heads=4, head=64, inner=1408),
    Size(hidden=768, blocks=6, heads=12, key_heads=4, head=64, inner=2048),
    Size(hidden=256, blocks=12, heads=8, key_heads=4, head=32, inner=704),
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run to plan for and the budget it gets, as a share of what the leanest plan for it needs."""

    cell: Cell  # model, storage, dtype, longest example (`tokens`), rank, threads, seed
    share: float
    batch_size: int  # examples a step
    micro_batch: str | int
    recompute: str | int  # of gradient checkpointing, as the setting has it
    dropout: float

    @property
    def near(self) -> bool:
        """Whether the budget lies close to the least need."""
        return abs(self.share - 1) <= NEAR

    def rough_bytes(self) -> float:
        """Return about what the tensors of the leanest step take, to leave out what is too small or too large."""
        cell, size = self.cell, self.cell.size
        itemsize = 4 if cell.dtype == "fp32" else 2
        linears = size.blocks * (4 * size.hidden**2 + 3 * size.hidden * size.inner)
        linears *= 2 if cell.kind == "qwen3_moe" else 1
        stored = linears * (itemsize if cell.bits == "none" else _WEIGHT_BYTES[cell.bits])
        tied = cell.kind in ("gpt2", "bloom") or bool(cell.settings().get("tie_word_embeddings"))
        embedded = cell.vocabulary * size.hidden * itemsize * (1 if tied else 2)
        adapted = 16 * size.blocks * cell.rank * (10 * size.hidden + 4 * size.inner)
        window = itemsize * cell.tokens * (12 * size.hidden + 6 * size.inner + size.blocks * size.hidden)
        return stored + embedded + adapted + window + 4 * itemsize * cell.scores()

    def operations(self) -> float:
        """Return about how many operations one step takes."""
        return self.cell.operations() * self.batch_size * 0.7

    def settings(self) -> dict[str, Any]:
        """Return the settings that a person would have given; the budget comes later."""
        cell = self.cell
        return {
            "model": "drawn",
            "data": [Path("drawn")],
            "device": "cpu",
            "dtype": cell.dtype,
            "bits": cell.bits,
            "gradient_checkpointing": self.recompute,
            "max_length": cell.tokens,
            "batch_size": self.batch_size,
            "micro_batch": self.micro_batch,
            "steps": STEPS,
            "seed": cell.seed,
            "text.packing": cell.layout == "packed",
            "lora.r": cell.rank,
            "lora.alpha": 2.0 * cell.rank,
            "lora.dropout": self.dropout,
        }

    def line(self) -> str:
        """Return the pair as a person reads it."""
        cell = self.cell
        return (
            f"{cell.number:>3}  {cell.kind:<9} {cell.size.hidden:>3} x {cell.size.blocks:<2} {cell.bits:<4} "
            f"{cell.dtype} {cell.layout} {self.batch_size} x {cell.tokens:>4} tokens, micro {self.micro_batch!s:<4} "
            f"again {self.recompute!s:<4} {cell.vocabulary:>6} ids {cell.threads} threads, budget {self.share:.3f}"
        )

    def row(self) -> dict[str, Any]:
        """Return the pair as a flat row."""
        own = asdict(self)
        cell = own.pop("cell")
        del cell["policy"]  # the planner's own choice stands in its place
        return {**cell, **own, "near": self.near}


def sample(count: int, seed: int, cores: int, dtypes: tuple[str, ...]) -> list[Pair]:
    """Return `count` pairs: kinds, storages and dtypes equally often, half of the budgets near the least need.

    A smaller sample is the beginning of a larger one.
    """
    chance = random.Random(seed)
    grid = list(itertools.product(KINDS, BITS, dtypes))
    chance.shuffle(grid)
    pairs: list[Pair] = []
    while len(pairs) < count:
        ranges = [*NEARBY, *FAR]
        chance.shuffle(ranges)
        for low, high in ranges:
            number = len(pairs)
            pairs.append(_draw(number, grid[number % len(grid)], chance.uniform(low, high), chance, cores))
    return pairs[:count]


def _draw(number: int, choice: tuple[str, ...], share: float, chance: random.Random, cores: int) -> Pair:
    """Draw what the grid leaves open, again until the pair is neither too small nor too slow."""
    kind, bits, dtype = choice
    while True:
        batch = chance.choice((1, 2, 4))
        cell = Cell(
            number=number,
            kind=kind,
            size=chance.choice((*SIZES[1:], *_LARGER)),
            bits=bits,
            policy="mixed",  # not asked here: the planner decides
            dtype=dtype,
            stored=chance.choice(("fp32", "bf16")),
            layout=chance.choice(("packed", "padded")),
            tokens=chance.choice(TOKENS),
            vocabulary=chance.choice(VOCABULARIES),
            trained=chance.choice((0.25, 1.0)),
            rank=chance.choice((4, 16)),
            threads=chance.choice((1, cores)),
            seed=chance.randrange(1 << 30),
        )
        pair = Pair(
            cell=cell,
            share=share,
            batch_size=batch,
            micro_batch=chance.choice(("auto", "auto", 1)),
            recompute=chance.choice(WISHES),
            dropout=chance.choice((0.0, 0.0, 0.05)),
        )
        if pair.operations() <= MOST_OPERATIONS and LEAST_ROUGH <= pair.rough_bytes() <= MOST_ROUGH:
            return pair


def computes_bf16(cpu_flags: str) -> bool:
    """Say whether a processor with these flags (of /proc/cpuinfo) multiplies bf16 by itself."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpu_flags.split())
