"""Questions without a run: a plan for a model and a card that are not here, and the limits of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_runs

from ajusta import look
from ajusta.base.errors import ModelError, UserError
from ajusta.base.events import Event, Note
from ajusta.spec.config import Config, load_config

SMALL = "smollm2-135m"


def settings(model: str = SMALL, **over: Any) -> Config:
    return load_config(overrides={"model": model, "bits": "nf4", "device": "cpu", **over}, required=("model",))


def test_a_known_name_is_planned_for_a_card_without_any_file() -> None:
    heard: list[Event] = []
    plan = look.plan(settings(max_length=256), heard.append, gpu="RTX 3060")
    assert plan.fits and plan.device == "NVIDIA GeForce RTX 3060 12GB" and plan.dtype == "bf16" and plan.blocks == 30
    assert plan.reserved_bytes is not None and plan.reserved_bytes >= plan.phases[2].peak_bytes
    assert plan.need_bytes >= plan.reserved_bytes + sum(size for _, size in plan.beside)
    said = [event.text for event in heard if isinstance(event, Note)]
    assert any("HuggingFaceTB/SmolLM2-135M" in text for text in said)
    assert any("8 examples of 256 tokens" in text for text in said)


def test_a_config_json_alone_is_planned(tmp_path: Path) -> None:
    facts = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 9, "vocab_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    by_folder = look.plan(settings(str(tmp_path)), gpu="T4")
    by_file = look.plan(settings(str(tmp_path / "config.json")), gpu="T4")
    assert by_folder == by_file and by_folder.fits and by_folder.blocks == 9
    assert by_folder.dtype == "fp32", "a T4 has no bf16"


def test_a_config_json_and_a_folder_with_weights_are_explained_for_a_card(tmp_path: Path) -> None:
    model = tiny_runs.write_model(tmp_path / "tiny")
    heard: list[Event] = []
    explained = look.explain(settings(str(model), max_length=64), heard.append, gpu="RTX 3060")
    assert explained.dtype == "bf16" and "3060" in explained.device and explained.blocks == 2
    assert (explained.step_tokens, explained.micro_batches, explained.micro_tokens) == (8 * 64, 8, 64)
    assert all(level.fits for level in explained.levels)
    (model / "model.safetensors").unlink()
    by_shape = look.explain(settings(str(model / "config.json"), max_length=64), gpu="RTX 3060")
    assert by_shape.levels == explained.levels and by_shape.block == explained.block
    plan = look.plan(settings(str(model), max_length=64, micro_batch=1, gradient_checkpointing="full"), gpu="RTX 3060")
    step = next(phase for phase in plan.phases if phase.phase == "train")
    assert (explained.levels[-1].peak_bytes, explained.levels[-1].step_seconds) == (
        step.peak_bytes,
        plan.rung.step_seconds,
    )
    with pytest.raises(UserError, match="no card"):
        look.explain(settings(str(model)), gpu="")


def test_a_model_is_not_planned_beyond_its_positions_in_silence() -> None:
    heard: list[Event] = []
    plan = look.plan(settings("gpt2", max_length=4096), heard.append, gpu="RTX 3060")
    assert plan.rung.micro_tokens <= 8 * 1024
    warned = [event.text for event in heard if isinstance(event, Note) and event.warning]
    assert any("4096" in text and "1024 positions" in text for text in warned)


@pytest.mark.parametrize(
    ("model", "gpu", "said"),
    [
        ("llama-3.1-8", "RTX 3060", "llama-3.1-8b"),
        ("no-such-thing-at-all", "RTX 3060", "no name of the catalogue"),
        (SMALL, "RTX 3061", "RTX 3060"),
        (SMALL, "", "no card"),
    ],
)
def test_a_wrong_name_gets_the_nearest_right_one(model: str, gpu: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        look.plan(settings(model), gpu=gpu)


def test_a_damaged_config_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not readable as JSON"):
        look.plan(settings(str(tmp_path)), gpu="T4")


def test_what_does_not_fit_says_what_is_missing_and_three_ways_out() -> None:
    plan = look.plan(settings("smollm2-1.7b", bits="none", max_length=512, memory="1GiB"), gpu="RTX 3060")
    assert not plan.fits and "missing" in plan.sentence() and plan.need_bytes > plan.budget_bytes
    assert len(plan.ways_out) == 3 and any("--bits nf4" in way for way in plan.ways_out)


def test_more_memory_never_fits_less() -> None:
    cards = look.plan_on_cards(settings("smollm2-1.7b", bits="none", max_length=512, gradient_checkpointing="full"))
    assert len(cards) > 100
    for dtype in {card.plan.dtype for card in cards}:
        rows = sorted((c.plan.budget_bytes, c.plan.fits) for c in cards if c.plan.dtype == dtype)
        assert [fits for _, fits in rows] == sorted(fits for _, fits in rows)
    assert any(card.plan.fits for card in cards)
    assert all((card.plan.need_bytes <= card.plan.budget_bytes) == card.plan.fits for card in cards)


def test_the_longest_text_fits_and_a_longer_one_does_not() -> None:
    longest = look.longest_context(settings("bloom-560m", memory="2GiB"), gpu="RTX 3060")
    assert longest.limit is None, "ALiBi has no table of positions"

    def fits(tokens: int) -> bool:
        over = {"max_length": tokens, "batch_size": 1, "gradient_checkpointing": "full", "memory": "2GiB"}
        return look.plan(settings("bloom-560m", **over), gpu="RTX 3060").fits

    assert fits(longest.tokens) and not fits(longest.tokens + longest.tokens // 16)


def test_beyond_the_positions_of_the_model_it_is_engine_capacity() -> None:
    longest = look.longest_context(settings("gpt2", memory="2GiB"), gpu="RTX 3060")
    assert longest.limit == 1024 < longest.tokens
    assert longest.plan.fits and longest.plan.rung.micro_tokens <= longest.limit


def test_no_length_at_all_is_said_so() -> None:
    with pytest.raises(UserError, match="does not fit into this memory at any length"):
        look.longest_context(settings("smollm2-1.7b", memory="300MiB"), gpu="RTX 3060")
