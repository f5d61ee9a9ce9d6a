"""An explanation as text and as facts: every figure is there, one scale for all bars, three sentences a technique."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from explained import GIB, MIB, kept, make_explanation

from ajusta.base.units import show_bytes, show_time
from ajusta.report.explain import CELLS, LETTERS, WIDTH, explanation_facts, explanation_text
from ajusta.report.sentences import how_it_works, why_kept
from ajusta.spec.explanation import Explanation

NEXT = "ajusta plan --model some/llama-1b --bits nf4"


def bars(explanation: Explanation) -> list[str]:
    """Return the cells of the five bars."""
    lines = [line for line in explanation_text(explanation, NEXT).splitlines() if re.match(r"  \d (\+|full)", line)]
    assert len(lines) == 5
    return [line[29 : 29 + CELLS] for line in lines]


def test_the_text_has_every_figure_of_the_facts() -> None:
    explanation = make_explanation()
    text = explanation_text(explanation, NEXT)
    assert text.isascii() and max(map(len, text.splitlines())) <= 110
    assert text.endswith(f"next: {NEXT}")
    words = " ".join(text.split())
    for level in explanation.levels:
        assert show_bytes(level.peak_bytes) in words and show_bytes(level.need_bytes or 0) in words
        assert show_time(level.step_seconds) in words
        assert f"{level.step_seconds / 8.0:.2f}" in words
        for name, size in level.by_category.items():
            row = next(line for line in text.splitlines() if line.startswith(f"  {LETTERS[name]} {name} "))
            assert show_bytes(size) in row
    for part in explanation.block.kept:
        assert f"{part.bytes / 100:,.0f}" in words and why_kept(part) in words
    for figure in ("7,777", "8,888", "2 x 2,304 + 2 x 4", "x 100 tokens x 12 blocks", "50,000", "1.23 billion", "bf16"):
        assert figure in words
    assert "800 tokens in 8 micro-batches" in words and "data sheet of a card" in words and "not measured" in words


def test_it_fits_one_screen() -> None:
    assert len(explanation_text(make_explanation(), NEXT).splitlines()) <= 60
    how = explanation_text(make_explanation(), NEXT).split("\n\n")[3]
    assert max(map(len, how.splitlines())) <= WIDTH


def test_each_technique_has_three_sentences_with_the_models_own_figures() -> None:
    told = dict(zip(("full", "lora", "bits", "again", "chunk"), how_it_works(make_explanation()), strict=True))
    for three in told.values():
        assert len(three) == 3
        # A sentence ends with a full stop, and has no other one that ends a sentence.
        assert all(sentence.endswith(".") and not re.search(r"\. [A-Z]", sentence) for sentence in three)
    joined = {name: " ".join(three) for name, three in told.items()}
    assert "1.23 billion" in joined["full"] and "99 x 50,000" in joined["full"] and "fp32 copy" in joined["full"]
    assert "2.50 million adapter weights instead of 1.23 billion" in joined["lora"] and "rank 16" in joined["lora"]
    assert "120 MiB instead of 6.84 GiB" in joined["lora"]
    assert "from 1000 MiB to 258 MiB" in joined["bits"] and "1.25 times" in joined["bits"]
    assert "30.0 MiB saved instead of 300 MiB" in joined["again"] and "1.30 times" in joined["again"]
    assert "16 positions at a time instead of 99" in joined["chunk"]
    assert "11.0 MiB instead of 200 MiB" in joined["chunk"]


def test_words_follow_what_was_traced() -> None:
    explanation = make_explanation()
    full, lora, coarse, again, chunked = explanation.levels
    fp32 = replace(explanation, dtype="fp32")
    assert "copy" not in how_it_works(fp32)[0][0]
    lean = replace(explanation, levels=(full, replace(lora, saved_bytes=100 * MIB), coarse, again, chunked))
    assert "go from 300 MiB to 100 MiB" in how_it_works(lean)[1][2]
    assert "hardly change" in how_it_works(explanation)[1][2]
    eight = replace(explanation, levels=(full, lora, replace(coarse, bits="int8"), again, chunked))
    assert "in int8" in how_it_works(eight)[2][0] and "(int8)" in explanation_text(eight, NEXT)
    short = replace(explanation, levels=(full, lora, coarse, again, replace(chunked, loss_rows=99)))
    assert "all 99 of them are one" in how_it_works(short)[4][0]
    experts = replace(explanation.block, kept=(*explanation.block.kept, kept("experts", 64)))
    assert "experts" in how_it_works(replace(explanation, block=experts))[2][1]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (kept("attention", 8, operation="aten._softmax.default"), "the whole matrix"),
        (kept("adapter", 8), "x A for B's gradient; for A's"),
        (kept("adapter", 8, read_by=("o_proj",)), "some x for A's"),
        (kept("other", 8, read_by=("mlp.gate", "mlp.gate")), "asked for by mlp.gate"),
        (kept("other", 8, read_by=()), "held by the block itself"),
    ],
)
def test_why_something_is_kept(part: object, said: str) -> None:
    assert said in why_kept(part)  # type: ignore[arg-type]


def test_bars_are_in_one_scale_and_the_card_ends_at_one_place() -> None:
    explanation = replace(make_explanation(), budget_bytes=600 * MIB)
    cells = bars(explanation)
    top = explanation.levels[1].peak_bytes  # the first is more than twice as long, and is broken off
    assert cells[0].endswith(">") and not cells[1].endswith(">")
    at = 600 * MIB * CELLS // top
    assert {line[at] for line in cells} == {"|"}
    for line, level in zip(cells[1:], explanation.levels[1:], strict=True):
        drawn = len(line.rstrip().rstrip("|").rstrip())
        assert abs(drawn - level.peak_bytes * CELLS / top) <= 1
    whole = cells[1]
    assert abs(whole.count("W") + 1 - 1000 * MIB * CELLS / top) <= 1, "one of them is hidden by the mark"
    text = explanation_text(explanation, NEXT)
    assert text.count("does not fit") == 2 and text.count("  fits") == 3


def test_without_a_memory_no_bar_is_marked() -> None:
    explanation = make_explanation()
    levels = tuple(replace(level, fits=None, need_bytes=None) for level in explanation.levels)
    free = replace(explanation, budget_bytes=None, levels=levels)
    text = explanation_text(free, NEXT)
    assert "|" not in text and "fit" not in text and "lies beside" not in text


def test_a_memory_far_beyond_the_bars_is_said_to_be_there() -> None:
    text = explanation_text(replace(make_explanation(), budget_bytes=100 * GIB), NEXT)
    assert "100 GiB end beyond the edge" in text and "|" not in text and ">" not in text


def test_the_facts_are_plain_and_hold_the_sentences() -> None:
    explanation = make_explanation()
    facts = json.loads(json.dumps(explanation_facts(explanation, NEXT)))
    assert facts["next"] == NEXT and facts["model"] == "some/llama-1b" and facts["budget_bytes"] == GIB
    assert [level["technique"] for level in facts["levels"]][:2] == ["full fine-tuning", "LoRA"]
    assert [tuple(level["how"]) for level in facts["levels"]] == list(how_it_works(explanation))
    assert facts["levels"][2]["by_category"]["quantization constants"] == 8 * MIB
    block = facts["block"]
    assert block["kept_bytes"] == sum(part["bytes"] for part in block["kept"]) == explanation.block.kept_bytes
    assert block["kept"][0]["tensors"][0]["bytes"] == 230_400 and block["kept"][2]["why"].startswith("gate and up")
