"""The cells of plan_accuracy: a seeded sample of models, storages, policies, lengths and layouts. No torch in here."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

KINDS = ("llama", "qwen3", "gpt2", "bloom", "gemma2", "qwen3_moe")
BITS, POLICIES, DTYPES = ("none", "int8", "nf4"), ("keep", "recompute", "mixed"), ("fp32", "bf16")
LAYOUTS = ("packed", "padded")  # several examples in a row, or each in a micro-batch of its own: nothing is filled up
TOKENS = (64, 96, 191, 256, 500, 768, 1024, 1500, 2048, 4096)
VOCABULARIES = (512, 4096, 32_000, 50_257, 151_936)
EXPERTS = 4
MATRIX_KINDS = ("gemma2",)  # their attention holds whole matrices of scores
MOST_OPERATIONS = 100e9  # of one step: a second or two on a slow core
MOST_SCORES = 9e6  # of one matrix for all heads


@dataclass(frozen=True, kw_only=True)
class Size:
    """Width, blocks and heads of a small model."""

    hidden: int
    blocks: int
    heads: int
    key_heads: int
    head: int
    inner: int


SIZES = (
    Size(hidden=64, blocks=4, heads=4, key_heads=2, head=16, inner=176),
    Size(hidden=256, blocks=4, heads=8, key_heads=2, head=32, inner=688),
    Size(hidden=384, blocks=6, heads=6, key_heads=1, head=64, inner=1024),
    Size(hidden=512, blocks=3, heads=4, key_heads=4, head=128, inner=1376),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One comparison of the planner's trace with the allocator."""

    number: int
    kind: str
    size: Size
    bits: str
    policy: str
    dtype: str
    stored: str  # dtype of the weights as they are read
    layout: str
    tokens: int  # of the longest micro-batch
    vocabulary: int
    trained: float  # share of tokens that meet the head
    rank: int
    threads: int
    seed: int

    def settings(self) -> dict[str, Any]:
        """Return the fields of transformers' configuration."""
        size = self.size
        common = {"vocab_size": self.vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if self.kind == "gpt2":
            own = {"n_embd": size.hidden, "n_layer": size.blocks, "n_head": size.heads, "n_positions": 4096}
            return common | own | {"n_inner": 4 * size.hidden}
        if self.kind == "bloom":
            return common | {"hidden_size": size.hidden, "n_layer": size.blocks, "n_head": size.heads}
        own = {
            "hidden_size": size.hidden,
            "intermediate_size": size.inner,
            "num_hidden_layers": size.blocks,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.key_heads,
            "head_dim": size.head,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": self.seed % 2 == 0,
        }
        if self.kind == "gemma2":
            own |= {"sliding_window": 256, "query_pre_attn_scalar": size.head}
        if self.kind == "qwen3_moe":
            own |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": size.inner // 4 * 2}
        return common | own

    def operations(self) -> float:
        """Return about how many multiplications and additions one step takes, to leave out what would take long."""
        size = self.size
        weights = size.blocks * (4 * size.hidden**2 + 3 * size.hidden * size.inner)
        head = self.trained * self.vocabulary * size.hidden
        return self.tokens * (8 * weights + 5 * head + 10 * size.blocks * size.hidden * self.tokens)

    def scores(self) -> int:
        """Return the values of a matrix of scores, where attention holds one."""
        return self.size.heads * self.tokens**2 if self.kind in MATRIX_KINDS else 0

    def line(self) -> str:
        """Return the cell as a person reads it."""
        return (
            f"{self.number:>3}  {self.kind:<9} {self.size.hidden:>3} x {self.size.blocks}  {self.bits:<4} {self.dtype} "
            f"{self.policy:<9} {self.layout}  {self.tokens:>4} tokens  {self.vocabulary:>6} ids  {self.threads} threads"
        )


def sample(count: int, seed: int, cores: int) -> list[Cell]:
    """Return `count` cells: each kind, storage, policy, dtype and layout as often as the others, all else drawn.

    In bf16 one thread computes: oneDNN's scratch in torch's other threads passes the profiler unseen.
    """
    chance = random.Random(seed)
    grid = list(itertools.product(KINDS, BITS, POLICIES, DTYPES, LAYOUTS))
    chance.shuffle(grid)
    return [_draw(number, choice, chance, cores) for number, choice in zip(range(count), itertools.cycle(grid))]


def _draw(number: int, choice: tuple[str, ...], chance: random.Random, cores: int) -> Cell:
    """Draw what the grid leaves open, again until the cell is quick enough."""
    kind, bits, policy, dtype, layout = choice
    while True:
        cell = Cell(
            number=number,
            kind=kind,
            size=chance.choice(SIZES),
            bits=bits,
            policy=policy,
            dtype=dtype,
            stored=chance.choice(DTYPES),
            layout=layout,
            tokens=chance.choice(TOKENS),
            vocabulary=chance.choice(VOCABULARIES),
            trained=chance.choice((0.25, 1.0)),
            rank=chance.choice((4, 16)),
            threads=1 if dtype == "bf16" else chance.choice((1, cores)),
            seed=chance.randrange(1 << 30),
        )
        if cell.operations() <= MOST_OPERATIONS and cell.scores() <= MOST_SCORES:
            return cell
