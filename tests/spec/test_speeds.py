"""The speeds of what was never measured: a card stays under its data sheet, a processor is always the same."""

from __future__ import annotations

from ajusta.spec.cards import find_card, known_cards
from ajusta.spec.roofline import SHORT_SIDE, WIDE_ROWS, WIDE_SIDE
from ajusta.spec.speeds import tabulated, typical_processor


def test_a_card_is_never_faster_than_its_data_sheet() -> None:
    for card in known_cards():
        told = tabulated(card)
        assert not told.measured and "unmeasured" in told.source and card.name in told.source
        assert told.bandwidth_bytes_per_s < card.bandwidth_bytes_per_s
        assert set(told.matmul_flops) == set(card.rates)
        for name, peak in card.rates.items():
            wide = told.product_flops(name, WIDE_ROWS, WIDE_SIDE)
            assert told.product_flops(name, SHORT_SIDE, SHORT_SIDE) < wide < peak
            assert told.product_flops(name, 8192, 8192) < peak
            assert told.attention_rate(name, 2048, 128) < wide


def test_a_faster_card_has_the_faster_table() -> None:
    slow, fast = (tabulated(find_card(name)) for name in ("RTX 3060", "A100 80GB"))
    assert fast.matmul_flops["bf16"] > 2 * slow.matmul_flops["bf16"]
    assert fast.bandwidth_bytes_per_s > 2 * slow.bandwidth_bytes_per_s


def test_a_processor_is_as_fast_as_its_threads() -> None:
    one, four = typical_processor(1), typical_processor(4)
    for rows, side in ((WIDE_ROWS, WIDE_SIDE), (SHORT_SIDE, 8192), (1, 1)):
        for dtype in ("fp32", "bf16"):
            assert 3.9 < four.product_flops(dtype, rows, side) / one.product_flops(dtype, rows, side) < 4.1
    assert four.bandwidth_bytes_per_s == 4 * one.bandwidth_bytes_per_s
    assert four.per_operation_s == one.per_operation_s, "a call is made by one thread"
    assert four.kernels["nf4 fp32"].numbers_per_s == 4 * one.kernels["nf4 fp32"].numbers_per_s
