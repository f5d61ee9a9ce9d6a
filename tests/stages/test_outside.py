"""What a card holds beside tensors, by arithmetic on its free memory; the card itself is made up here."""

from __future__ import annotations

import pytest
import torch

from ajusta.memory.outside import Taken, outside_terms
from ajusta.stages.outside import measure_outside, outside_bytes

MIB = 1 << 20


class Card:
    """A card of 1,000 MiB on which another process takes some."""

    def __init__(self, others: int = 0) -> None:
        self.free, self.others = 1000 * MIB, others

    def make_context(self) -> None:
        self.free -= 420 * MIB - self.others

    def work(self) -> tuple[int, int]:
        self.free -= 64 * MIB + 130 * MIB  # what torch reserves, and kernels
        return 32 * MIB, 64 * MIB


def test_each_term_is_what_free_memory_lost_by_it() -> None:
    card = Card()
    found = outside_bytes(card, lambda: card.free)
    assert found == {
        "CUDA context": 420 * MIB,
        "cuBLAS workspace of the forward pass": 32 * MIB,
        "cuBLAS workspace of the backward pass": 32 * MIB,
        "kernels": 130 * MIB,
    }
    terms = {term.name: term for term in outside_terms("cuda", (9, 0), measured=found)}
    assert all(terms[name].measured and terms[name].size_bytes == size for name, size in found.items())
    assert not terms["other programs"].measured
    assert terms["kernels"].taken is Taken.LATER


def test_a_term_that_another_program_hides_is_left_out() -> None:
    card = Card(others=500 * MIB)  # which ended while the context was made
    assert "CUDA context" not in outside_bytes(card, lambda: card.free)


def test_a_processor_holds_nothing_outside() -> None:
    assert measure_outside(torch.device("cpu")) == {}


@pytest.mark.parametrize("capability", [(7, 5), (9, 0), None])
def test_every_name_that_is_measured_is_a_term(capability: tuple[int, int] | None) -> None:
    card = Card()
    assert set(outside_bytes(card, lambda: card.free)) <= {term.name for term in outside_terms("cuda", capability)}
