"""Five ways to train, each traced: their bytes are those of independent traces, of plans, and of real tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from architectures import stock_model
from planned import GIB, LENGTHS, Real, StoredModel, fullest, request, subject
from tiny_models import numel, tiny_config
from transformers import PretrainedConfig

from ajusta.blocks.optimizer import AdamWSettings
from ajusta.engine.full import FullTraining
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.place import RealPlace
from ajusta.planning import search as search_module
from ajusta.planning.explain import TECHNIQUES, explanation
from ajusta.planning.kept import block_memory
from ajusta.planning.search import loss_chunk, margin, search
from ajusta.planning.trace import Traced
from ajusta.spec.cards import as_device, find_card
from ajusta.spec.explanation import Explanation, Level
from ajusta.spec.plan import Rung
from ajusta.spec.speeds import tabulated, typical_processor

DEEP = 6
LONGEST = max(LENGTHS)
LABELS = {"trained weights": "adapters", "other": "temporary"}
SETTINGS = AdamWSettings()
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("bloom", "gemma2", "gpt_oss")]


def told(kind: str, bits: str = "none", *, limited: bool = True) -> Explanation:
    return explanation(request(subject(StoredModel(stock_model(config(kind))), bits), GIB), kind, limited=limited)


def config(kind: str) -> PretrainedConfig:
    return tiny_config(kind, num_hidden_layers=DEEP)


@pytest.fixture(scope="module")
def llama() -> Explanation:
    return told("llama")


def categories(level: Level) -> dict[str, int]:
    return {LABELS.get(name, name): size for name, size in level.by_category.items()}


def rungs(blocks: int) -> dict[str, tuple[str, Rung]]:
    """Return bits and rung of the four levels that the engine trains by."""
    whole = Rung(recompute_blocks=0, micro_tokens=LONGEST, loss_chunk=10_000, peak_bytes=0)
    again = replace(whole, recompute_blocks=blocks)
    chunked = replace(again, loss_chunk=loss_chunk(512))
    return dict(zip(TECHNIQUES[1:], [("none", whole), ("nf4", whole), ("nf4", again), ("nf4", chunked)], strict=True))


@pytest.mark.parametrize("kind", ["llama", SLOW[0]])
def test_four_levels_weigh_what_real_tensors_do(kind: str, llama: Explanation) -> None:
    explained = llama if kind == "llama" else told(kind)
    source = StoredModel(stock_model(config(kind)))
    real = {bits: Real(subject(source, bits)) for bits in ("none", "nf4")}
    for level in explained.levels[1:]:
        bits, rung = rungs(DEEP)[level.technique]
        peak = real[bits].step((fullest(LONGEST),), rung)
        assert (level.bits, level.recompute_blocks) == (bits, rung.recompute_blocks)
        assert (level.peak_bytes, level.operation) == (peak.live_bytes, peak.operation)
        assert categories(level) == {str(category): size for category, size in peak.by_category.items() if size}


def test_full_fine_tuning_weighs_what_real_tensors_do(llama: Explanation) -> None:
    level = llama.levels[0]
    place = RealPlace("cpu")
    with place.counting() as ledger:
        training = FullTraining(build_skeleton(config("llama"), torch.float32, "cpu").chain, SETTINGS, place)
        ledger.start_over()
        training.step(fullest(LONGEST), 0.0)
        peak = ledger.peak
    assert (level.peak_bytes, level.operation) == (peak.live_bytes, peak.operation)
    assert categories(level) == {str(category): size for category, size in peak.by_category.items() if size}
    count = numel(stock_model(config("llama")))
    assert level.trained == llama.parameters == count
    sizes = level.by_category
    assert sizes["trained weights"] == sizes["gradients"] == 4 * count
    assert sizes["optimizer state"] == 8 * count + 8


def test_the_last_level_is_the_planner_s_own_smallest_plan(llama: Explanation) -> None:
    what = subject(StoredModel(stock_model(config("llama"))), "nf4")
    plan = search(request(what, GIB, recompute="full", micro_tokens=1))
    step = next(phase for phase in plan.phases if phase.phase == "train")
    last = llama.levels[-1]
    assert (last.peak_bytes, last.operation) == (step.peak_bytes, step.operation)
    assert last.step_seconds == plan.rung.step_seconds > 0
    assert last.need_bytes == last.peak_bytes + margin(last.peak_bytes, "cpu")


def test_each_lever_lowers_the_peak_and_the_last_three_cost_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough that activations and logits outweigh the optimizer's temporaries of some MiB.
    monkeypatch.setattr(search_module, "LOSS_BYTES", 1 << 20)
    wide = tiny_config("llama", num_hidden_layers=DEEP, vocab_size=4096)
    what = subject(StoredModel(stock_model(wide)))
    explained = explanation(request(what, GIB, lengths=[1000, 1000]), "llama", limited=True)
    peaks = [level.peak_bytes for level in explained.levels]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 5
    _, lora, quantized, again, chunked = explained.levels
    assert lora.step_seconds < quantized.step_seconds < again.step_seconds < chunked.step_seconds
    assert again.saved_bytes < quantized.saved_bytes / 2
    assert chunked.logits_bytes < again.logits_bytes / 2 and chunked.loss_rows < again.loss_rows


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", *SLOW])
def test_what_a_block_keeps_is_what_the_step_sees_it_keep(kind: str, llama: Explanation) -> None:
    what = subject(StoredModel(stock_model(config(kind))))
    _, whole = rungs(DEEP)["LoRA"]
    block = llama.block if kind == "llama" else block_memory(Traced(what), fullest(LONGEST), whole)
    sections = Traced(what, shortened=False).step_sections((fullest(LONGEST),), whole)
    (forward,) = (s for s in sections if (s.name, s.block) == ("forward", 4))
    assert sum(forward.end.values()) - sum(forward.begin.values()) == block.kept_bytes
    alike = DEEP // 2 if kind in ("gemma2", "gpt_oss") else DEEP  # there every second block has a window
    assert block.alike == alike and block.tokens == LONGEST
    parts = [kept.part for kept in block.kept]
    assert {"norm", "attention", "adapter"} <= set(parts) and "frozen" not in parts
    assert all(tensor.bytes > 0 for kept in block.kept for tensor in kept.tensors)
    assert ("experts" in parts) == (kind in ("qwen3_moe", "gpt_oss")) and block.rebuilt_bytes > 0


def test_a_llama_block_keeps_what_can_be_counted_by_hand(llama: Explanation) -> None:
    hidden, inner, heads, groups, width, rank, norms = 64, 96, 4, 2, 16, 4, 2
    kept = {part.part: part.bytes / llama.block.tokens / 4 for part in llama.block.kept}
    assert kept == {
        "norm": norms * (hidden + 1),  # input and scale
        "attention": 2 * heads * width + 2 * groups * width + heads,  # q, output, k, v, log-sum-exp
        "gated": 2 * inner,
        "adapter": 7 * rank,  # x A
    }
    readers = {tensor.read_by for part in llama.block.kept for tensor in part.tensors}
    assert ("self_attn", "self_attn.o_proj") in readers, "the output of attention is what o_proj's adapter reads"
    made_again = 2 * hidden + inner  # both norms' outputs, act(gate) x up
    assert llama.block.rebuilt_bytes == 4 * llama.block.tokens * made_again


def test_a_layer_without_an_adapter_keeps_nothing(llama: Explanation) -> None:
    what = subject(StoredModel(stock_model(config("llama"))))
    assert what.adapter is not None
    few = replace(what, adapter=replace(what.adapter, targets=("q_proj",)))
    block = block_memory(Traced(few), fullest(LONGEST), rungs(DEEP)["LoRA"][1])
    gone = {kept.part: kept.bytes for kept in llama.block.kept}
    for kept in block.kept:
        assert kept.bytes == (gone["adapter"] // 7 if kept.part == "adapter" else gone[kept.part])
    assert "frozen" not in [kept.part for kept in block.kept]


def test_bits_are_kept_and_without_a_memory_nothing_is_compared(llama: Explanation) -> None:
    assert [level.bits for level in llama.levels] == ["none", "none", "nf4", "nf4", "nf4"]
    assert llama.budget_bytes == GIB and all(level.fits for level in llama.levels)
    free = told("llama", "int8", limited=False)
    assert [level.bits for level in free.levels] == ["none", "none", "int8", "int8", "int8"]
    assert free.budget_bytes is None and all(level.fits is level.need_bytes is None for level in free.levels)
    assert [level.peak_bytes for level in free.levels[:2]] == [level.peak_bytes for level in llama.levels[:2]]


def test_a_card_needs_what_its_allocator_reserves() -> None:
    card = find_card("RTX 3060")
    what = replace(subject(StoredModel(stock_model(config("llama")))), kind="cuda")
    asked = request(what, 40 << 20)
    machine = replace(asked.machine, device=as_device(card), roofline=tabulated(card))
    explained = explanation(replace(asked, machine=machine), "llama", limited=True)
    whole = rungs(DEEP)["LoRA"][1]
    reserved = Traced(what, record=True).reserve((fullest(LONGEST),), whole, (8, 6))
    assert explained.levels[1].need_bytes == reserved.need_bytes
    needs = [level.need_bytes or 0 for level in explained.levels]
    assert all(need >= level.peak_bytes for need, level in zip(needs, explained.levels, strict=True))
    assert [level.fits for level in explained.levels] == [need <= 40 << 20 for need in needs]
    assert not explained.speeds_measured and card.name in explained.speeds


def test_a_step_of_uneven_micro_batches_takes_a_time_between(llama: Explanation) -> None:
    assert llama.micro_batches > 1 and llama.step_tokens == sum(LENGTHS) and llama.micro_tokens == LONGEST
    what = subject(StoredModel(stock_model(tiny_config("llama", num_hidden_layers=1))))

    def seconds(lengths: list[int]) -> list[float]:
        asked = request(what, GIB, lengths=lengths)
        return [level.step_seconds for level in explanation(asked, "llama", limited=False).levels]

    one, both = seconds([40]), seconds([40, 20])
    assert all(alone < uneven < 2 * alone for alone, uneven in zip(one, both, strict=True))
    assert llama.speeds == typical_processor(1).source and not llama.speeds_measured
