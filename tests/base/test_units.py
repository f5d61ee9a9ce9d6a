"""Sizes and durations: what is shown can be read back, and what is no size is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajusta.base.errors import UserError
from ajusta.base.units import GIB, KIB, MIB, TIB, parse_bytes, parse_seconds, show_bytes, show_seconds


@given(st.integers(0, 900 * TIB))
def test_a_shown_size_reads_back_to_three_digits(count: int) -> None:
    # Three digits that matter: rounded by at most half of the last one, which is 1/200 of the least first digit.
    assert abs(parse_bytes(show_bytes(count)) - count) <= max(count / 200 + 1, 0)


@given(st.integers(0, 10**18))
def test_a_plain_number_of_bytes_is_itself(count: int) -> None:
    assert parse_bytes(count) == count
    assert parse_bytes(str(min(count, 2**53))) == min(count, 2**53)  # read as a float, exact up to there


@given(
    st.integers(0, 4000),
    st.sampled_from([("K", KIB), ("MB", MIB), ("MiB", MIB), ("g", GIB), ("GiB", GIB), ("tib", TIB)]),
)
def test_every_spelling_is_a_power_of_two(number: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f" {number} {unit[0]} ") == number * unit[1]


SHOWN = {
    0: "0 B",
    1023: "1023 B",
    1024: "1.00 KiB",
    340 * MIB: "340 MiB",
    1.52 * GIB: "1.52 GiB",
    -2 * GIB: "-2.00 GiB",
}


@pytest.mark.parametrize(("count", "shown"), SHOWN.items())
def test_sizes_as_they_are_shown(count: float, shown: str) -> None:
    assert show_bytes(count) == shown


@given(st.integers(0, 200 * TIB))
def test_a_size_is_shown_in_at_most_four_figures_before_its_unit(count: int) -> None:
    number, unit = show_bytes(count).split()
    assert len(number.replace(".", "")) <= 4 and unit in ("B", "KiB", "MiB", "GiB", "TiB")


@pytest.mark.parametrize("text", ["", "a lot", "12 XB", "-3 GiB", "1,5 GiB", "1.2.3G", "GiB", "inf", "nan", "1e9"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match="expected a number with a unit"):
        parse_bytes(text)


@given(st.integers(0, 100), st.integers(0, 59), st.integers(0, 59))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int) -> None:
    expected = hours * 3600 + minutes * 60 + seconds
    assert parse_seconds(f"{hours}h{minutes}m{seconds}s") == expected
    assert parse_seconds(f"{hours}h {minutes}m {seconds}s") == expected
    assert parse_seconds(expected) == expected


@given(st.floats(0, 1e6))
def test_a_shown_duration_reads_back_to_its_last_part(seconds: float) -> None:
    shown = show_seconds(seconds).replace("min", "m")
    last = 60 if "h" in shown else 1
    assert abs(parse_seconds(shown) - seconds) <= last


@pytest.mark.parametrize("text", ["", "soon", "3", "3 hours", "h3", "1h-3m", "3h5"])
def test_what_is_no_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match="expected a number with a unit"):
        parse_seconds(text)
