"""What a card holds beside tensors: every row with its source, and what was measured in the table's place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajusta.base.errors import UserError
from ajusta.memory.outside import MEASURED_HERE, Taken, cublas_workspace_bytes, outside_terms, pinned_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
AMPERE, ADA, HOPPER, BLACKWELL = (8, 6), (8, 9), (9, 0), (12, 0)


def test_the_cpu_holds_nothing_beside_tensors() -> None:
    assert outside_terms("cpu", None) == ()


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, None])
def test_every_row_has_a_size_and_says_where_it_is_from(capability: tuple[int, int] | None) -> None:
    terms = outside_terms("cuda", capability)
    assert len({term.name for term in terms}) == len(terms) == 5
    for term in terms:
        assert term.size_bytes > 0 and not term.measured
        from_somewhere = "https://github.com/" in term.source or "pytorch " in term.source
        assert from_somewhere or term.source.startswith("unmeasured"), term


def test_each_row_says_when_it_is_taken() -> None:
    taken = {term.name: term.taken for term in outside_terms("cuda", AMPERE)}
    assert taken == {
        "CUDA context": Taken.BEFORE,
        "other programs": Taken.BEFORE,
        "cuBLAS workspace of the forward pass": Taken.INSIDE,
        "cuBLAS workspace of the backward pass": Taken.INSIDE,
        "kernels": Taken.LATER,
    }


@pytest.mark.parametrize(
    ("capability", "size"),
    [
        ((7, 5), 8519680),  # 8.125 MiB, which a snapshot of torch shows to the byte: discuss.pytorch.org/t/178671
        (AMPERE, 8519680),
        (ADA, 8519680),
        (HOPPER, 32 * MIB),
        ((10, 0), 32 * MIB),
        ((11, 0), 32 * MIB),
        (BLACKWELL, 32 * MIB),
        ((13, 0), 32 * MIB),
        (None, 32 * MIB),
    ],
)
def test_a_cublas_workspace_has_the_size_of_its_architecture(capability: tuple[int, int] | None, size: int) -> None:
    assert cublas_workspace_bytes(capability) == size
    workspaces = [term.size_bytes for term in outside_terms("cuda", capability) if term.taken is Taken.INSIDE]
    assert workspaces == [size, size]  # two threads, so two handles: forward, and backward on autograd's own


def test_what_was_measured_takes_the_place_of_the_table() -> None:
    table = outside_terms("cuda", ADA)
    terms = outside_terms("cuda", ADA, measured={"CUDA context": 391 * MIB, "kernels": 0})
    assert [term.name for term in terms] == [term.name for term in table]
    found = {term.name: term for term in terms}
    for name, size in (("CUDA context", 391 * MIB), ("kernels", 0)):
        assert (found[name].size_bytes, found[name].measured, found[name].source) == (size, True, MEASURED_HERE)
    kept = [term for term in terms if not term.measured]
    assert kept == [term for term in table if term.name not in ("CUDA context", "kernels")]


def test_a_measured_name_that_is_no_term_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'CUDA kontext'; did you mean 'CUDA context'.*ajusta doctor --measure"):
        outside_terms("cuda", ADA, measured={"CUDA kontext": 1})
    with pytest.raises(UserError, match="expected bytes of nothing for the device cpu"):
        outside_terms("cpu", None, measured={"CUDA context": 1})


def test_a_negative_measurement_is_refused() -> None:
    with pytest.raises(UserError, match="-5 bytes; expected bytes of CUDA context"):
        outside_terms("cuda", ADA, measured={"kernels": -5})


def test_a_device_of_another_kind_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        outside_terms("mps", None)


@pytest.mark.parametrize(
    ("size", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (MIB, MIB), (MIB + 1, 2 * MIB), (9 * GIB // 4, 4 * GIB)]
)
def test_pinned_memory_takes_the_next_power_of_two(size: int, taken: int) -> None:
    assert pinned_bytes(size) == taken


@given(size=st.integers(1, 1 << 50))
def test_pinned_memory_takes_less_than_twice_its_size(size: int) -> None:
    taken = pinned_bytes(size)
    assert size <= taken < 2 * size
    assert taken.bit_count() == 1
