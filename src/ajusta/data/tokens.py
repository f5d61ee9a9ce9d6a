"""Text becomes ids, always without the tokenizer's own extras; the opening (BOS) is put in front by us, exactly once.

`encode_turns` keeps the promise of the chat: the ids before an answer are the ids that the model gets at chat time.
Where a token of the whole text would straddle the place where an answer starts (a prompt that ends with a space, an
answer that starts with a line break), the text is cut there and the pieces are encoded one by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Offsets = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Ids of a text with the characters that each stands for, and the ids' index where each given boundary lies."""

    ids: list[int]
    offsets: Offsets
    starts: tuple[int, ...] = field(default=())


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of `text` alone: no BOS, no eos, no warning about its length."""
    out = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return list(out["input_ids"])


def _encode_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    out = tokenizer(
        text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
    )
    return Encoded(ids=list(out["input_ids"]), offsets=[(int(a), int(b)) for a, b in out["offset_mapping"]])


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return what the tokenizer puts before a text by itself: (bos,), nothing, or more (GLM: [gMASK]<sop>)."""
    plain = encode(tokenizer, "a")
    full = list(tokenizer("a", return_attention_mask=False)["input_ids"])
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()


def missing_opening(ids: Sequence[int], opening: tuple[int, ...]) -> tuple[int, ...]:
    """Return the opening if `ids` do not start with it already (a template printed it), else nothing."""
    if not opening or tuple(ids[: len(opening)]) == opening:
        return ()
    return opening


def encode_turns(tokenizer: PreTrainedTokenizerBase, text: str, boundaries: Sequence[int]) -> Encoded:
    """Encode `text` so that at each boundary (a character index, ascending) the ids before it are those of a prompt."""
    whole = _encode_offsets(tokenizer, text)
    starts: list[int] = []
    cut, settled = 0, 0  # the last place where the text was cut, as a character and as a token
    for boundary in boundaries:
        start = _clean_start(tokenizer, text, whole, (cut, settled), boundary)
        if start is None:
            head = _piece(tokenizer, text, cut, boundary)
            tail = _piece(tokenizer, text, boundary, len(text))
            whole = Encoded(
                ids=whole.ids[:settled] + head.ids + tail.ids,
                offsets=whole.offsets[:settled] + head.offsets + tail.offsets,
            )
            start = settled + len(head.ids)
            cut, settled = boundary, start
        starts.append(start)
    return Encoded(ids=whole.ids, offsets=whole.offsets, starts=tuple(starts))


def _clean_start(
    tokenizer: PreTrainedTokenizerBase, text: str, whole: Encoded, settled: tuple[int, int], boundary: int
) -> int | None:
    """Index of the token at the boundary if the ids before it are those of the prompt alone; None if they differ.

    Offsets cannot decide it (byte-level tokenizers trim spaces from them, and a pre-tokenizer looks ahead), so the
    prompt is encoded; but only from the last added token on (`<|im_start|>`), because text is split there before all
    else.
    """
    cut, first = settled
    end = bisect_left(whole.offsets, (boundary,))
    added = tokenizer.added_tokens_decoder
    anchor = next((index for index in range(end - 1, first, -1) if whole.ids[index] in added), None)
    if anchor is None:
        start, local = first, _piece(tokenizer, text, cut, boundary).ids
    else:
        start, local = anchor, encode(tokenizer, text[whole.offsets[anchor][0] : boundary])
    end = start + len(local)
    return end if whole.ids[start:end] == local and _covers(whole, end, boundary) else None


def _covers(whole: Encoded, start: int, boundary: int) -> bool:
    """The token before `start` ends by the boundary and the one at `start` ends after it: none straddles."""
    ends_before = start == 0 or whole.offsets[start - 1][1] <= boundary
    return ends_before and (start >= len(whole.ids) or whole.offsets[start][1] >= boundary)


def _piece(tokenizer: PreTrainedTokenizerBase, text: str, start: int, end: int) -> Encoded:
    """Encode text[start:end] as it stands inside the text: without the space that some tokenizers put before a text."""
    piece = _encode_offsets(tokenizer, text[start:end])
    if start and piece.ids and text[start] != " " and _adds_space(tokenizer):
        lead = encode(tokenizer, "\n")
        behind = _encode_offsets(tokenizer, "\n" + text[start:end])
        if behind.ids[: len(lead)] == lead:
            offsets = [(max(a - 1, 0), max(b - 1, 0)) for a, b in behind.offsets[len(lead) :]]
            piece = Encoded(ids=behind.ids[len(lead) :], offsets=offsets)
    return Encoded(ids=piece.ids, offsets=[(a + start, b + start) for a, b in piece.offsets])


def _adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    first = tokenizer.convert_ids_to_tokens(encode(tokenizer, "a"))[:1]
    return bool(first) and str(first[0]).startswith(("\u2581", "\u0120"))
