"""What a card reserves, told of a few blocks, is what the whole depth's own events replay to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planned import ShapedModel, batches, subject
from tiny_models import tiny_config

from ajusta.memory.allocator import replay
from ajusta.memory.outside import Taken, outside_terms
from ajusta.planning.reserved import _numbered, told_events
from ajusta.planning.trace import Subject, Traced
from ajusta.spec.plan import Rung

AMPERE = (8, 6)
DEPTHS = {"llama": 14, "gpt2": 13, "gemma2": 26}


def on_a_card(kind: str) -> Subject:
    config = tiny_config(kind, num_hidden_layers=DEPTHS[kind], hidden_size=256, intermediate_size=1024, n_embd=256)
    return replace(subject(ShapedModel(config, torch.bfloat16), "nf4", torch.bfloat16), kind="cuda")


def rung(recompute: int) -> Rung:
    return Rung(recompute_blocks=recompute, micro_tokens=100, loss_chunk=16, peak_bytes=0)


def events(traced: Traced, recompute: int) -> list[tuple[object, int]]:
    sections, short = traced._short_step(batches(100), rung(recompute))
    return list(told_events((*sections, *traced._update), short.stands, traced._resident()))


SLOWEST_LAST = ["llama", "gpt2", pytest.param("gemma2", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", SLOWEST_LAST)
def test_the_comings_and_goings_of_the_whole_depth_follow_from_a_few_blocks(kind: str) -> None:
    what = on_a_card(kind)
    short, whole = Traced(what, record=True), Traced(what, shortened=False, record=True)
    assert len(short.model.chain.blocks) < short.blocks
    for recompute in (0, 6, short.blocks):
        told, walked = events(short, recompute), events(whole, recompute)
        residents = sum(1 for key, _ in told if key[0] == -1)  # type: ignore[index]
        assert sorted(size for _, size in told[:residents]) == sorted(size for _, size in walked[:residents])
        assert told[residents:] == walked[residents:]
        reserved = short.reserve(batches(100), rung(recompute), AMPERE)
        assert reserved.reserved_bytes == whole.reserve(batches(100), rung(recompute), AMPERE).reserved_bytes


@pytest.mark.parametrize("kind", DEPTHS)
def test_what_is_allocated_in_the_replay_is_the_traced_peak(kind: str) -> None:
    traced = Traced(on_a_card(kind), record=True)
    replayed = replay(_numbered(events(traced, 6)), expandable=True)
    live = most = 0
    sizes: dict[object, int] = {}
    for key, size in events(traced, 6):
        live += size or -sizes[key]
        sizes[key] = size or sizes[key]
        most = max(most, live)
    assert most == traced.step(batches(100), rung(6)).peak_bytes
    storages = len(sizes)
    assert most <= replayed.peak_allocated_bytes <= most + 512 * storages


def test_what_is_held_beside_the_allocator_is_named() -> None:
    reserved = Traced(on_a_card("llama"), record=True).reserve(batches(100), rung(0), AMPERE)
    later = [(term.name, term.size_bytes) for term in outside_terms("cuda", AMPERE) if term.taken is Taken.LATER]
    assert list(reserved.beside) == later and later
    assert reserved.need_bytes == reserved.reserved_bytes + sum(size for _, size in later)
    assert reserved.reserved_bytes >= reserved.allocated_bytes
