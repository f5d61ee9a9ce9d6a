"""The data as plain values and lines for a terminal or a report to draw; nothing is drawn here."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from ajusta.data.prepare import Prepared
from ajusta.spec.data import DataSummary, Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def describe(prepared: Prepared) -> list[str]:
    """Return the account in lines: counts, then notes, then every dropped item with its reason."""
    account = prepared.summary
    share = account.trained_tokens / account.train_tokens
    lines = [
        f"{account.files} files, {account.rows_read} rows read, {len(account.dropped)} items dropped",
        f"train: {account.train_examples} examples, {account.train_tokens} tokens, "
        f"{account.trained_tokens} of them trained ({share:.0%}), longest {account.longest}",
        f"held out: {account.heldout_examples} examples, {account.heldout_tokens} tokens",
    ]
    lines += [f"note: {note}" for note in account.notes]
    return lines + [f"dropped: {item.source}: {item.reason}" for item in account.dropped]


def token_histogram(summary: DataSummary) -> list[tuple[int, int, int]]:
    """Return rows (from, to, examples) in powers of two: 65 to 128 tokens, 129 to 256, ... up to the longest."""
    if not summary.lengths:
        return []
    classes = [max(1, (length - 1).bit_length()) for length in summary.lengths]
    rows: list[tuple[int, int, int]] = []
    for power in range(min(classes), max(classes) + 1):
        rows.append((1 if power == 1 else (1 << (power - 1)) + 1, 1 << power, classes.count(power)))
    return rows


def colour_segments(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Return the example's text in runs (text, trained); joined, they are the whole text with its special tokens."""
    segments: list[tuple[str, bool]] = []
    shown, end = "", 0
    for trained, run in groupby(example.trained.tolist()):
        start, end = end, end + len(list(run))
        so_far = _decode(tokenizer, example.ids[:end].tolist())
        # Decoded alone, a run would lose its leading space in some tokenizers.
        text = so_far[len(shown) :] if so_far.startswith(shown) else _decode(tokenizer, example.ids[start:end].tolist())
        shown = so_far
        segments.append((text, bool(trained)))
    return segments


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
