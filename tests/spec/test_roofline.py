"""The speeds of a device: exact at the sizes that were measured, between them for others; what a data sheet gives."""

from __future__ import annotations

import pytest

from ajusta.spec.roofline import (
    LONG,
    SHORT,
    SHORT_SIDE,
    WIDE_ROWS,
    WIDE_SIDE,
    WIDTH,
    Kernel,
    Roofline,
)  # fmt: skip


def roofline(**more: dict[str, float]) -> Roofline:
    return Roofline(
        matmul_flops={"fp32": 100.0, "bf16": 400.0}, bandwidth_bytes_per_s=10.0, per_operation_s=0.0, source="made up",
        measured=False, **more,
    )  # type: ignore[arg-type]  # fmt: skip


def test_products_have_their_rates_at_the_sizes_that_were_measured() -> None:
    known = roofline(thin_flops={"fp32": 60.0}, few_flops={"fp32": 40.0})
    assert known.product_flops("fp32", WIDE_ROWS, WIDE_SIDE) == pytest.approx(100.0)
    assert known.product_flops("fp32", WIDE_ROWS, SHORT_SIDE) == pytest.approx(60.0)
    assert known.product_flops("fp32", SHORT_SIDE, WIDE_SIDE) == pytest.approx(40.0)
    assert known.product_flops("fp32", SHORT_SIDE, SHORT_SIDE) < 40.0
    assert 100.0 < known.product_flops("fp32", 10**6, 10**6) < 120.0


def test_a_product_gets_faster_with_every_row_and_column() -> None:
    known = roofline(thin_flops={"fp32": 60.0}, few_flops={"fp32": 40.0})
    sizes = (1, 4, 16, 100, 256, 1000)
    for fixed in sizes:
        by_rows = [known.product_flops("fp32", rows, fixed) for rows in sizes]
        by_side = [known.product_flops("fp32", fixed, side) for side in sizes]
        assert by_rows == sorted(by_rows) and by_side == sorted(by_side)
        assert len(set(by_rows)) == len(set(by_side)) == len(sizes)


def test_without_figures_of_short_sides_all_products_are_alike() -> None:
    assert {roofline().product_flops("bf16", rows, side) for rows in (1, 999) for side in (1, 999)} == {400.0}
    odd = roofline(thin_flops={"fp32": 300.0})  # thin ones faster than wide ones: a disturbed measurement
    assert odd.product_flops("fp32", 1, 1) == pytest.approx(100.0)


def test_a_dtype_without_a_rate_is_as_slow_as_the_slowest() -> None:
    assert roofline().product_flops("fp16", 8, 8) == pytest.approx(100.0)
    assert roofline().attention_rate("fp16", 8, WIDTH) == pytest.approx(100.0)


def test_attention_has_its_rates_at_the_sizes_that_were_measured() -> None:
    known = roofline(attention_flops={"fp32": 50.0}, short_flops={"fp32": 20.0})
    assert known.attention_rate("fp32", LONG, WIDTH) == pytest.approx(50.0)
    assert known.attention_rate("fp32", SHORT, WIDTH) == pytest.approx(20.0)
    assert known.attention_rate("fp32", 1, WIDTH) < 20.0 < known.attention_rate("fp32", 128, WIDTH) < 50.0
    assert known.attention_rate("bf16", 7, WIDTH) == pytest.approx(400.0)  # unknown: as a product
    assert known.attention_rate("fp32", LONG, 32) == pytest.approx(50.0 * (1 + 17 / 64) / (1 + 17 / 32))


def test_a_kernel_takes_its_call_and_its_numbers() -> None:
    assert Kernel(call_s=2.0, numbers_per_s=10.0).seconds(50) == pytest.approx(7.0)


def test_narrow_numbers_have_their_own_bandwidth_where_there_is_one() -> None:
    assert (roofline().bytes_per_s(True), roofline().bytes_per_s(False)) == (10.0, 10.0)
    known = Roofline(
        matmul_flops={"fp32": 1.0}, bandwidth_bytes_per_s=10.0, narrow_bytes_per_s=4.0, per_operation_s=0.0, source="x",
        measured=True,
    )  # fmt: skip
    assert (known.bytes_per_s(True), known.bytes_per_s(False)) == (4.0, 10.0)
