from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ajusta.base.errors import UserError
from ajusta.base.units import GIB, MIB
from ajusta.spec import cards as module
from ajusta.spec.cards import Card, as_device, cards_by_memory, find_card, known_cards

TABLE: dict[str, Any] = tomllib.loads(Path(module.__file__).with_name("cards.toml").read_text(encoding="utf-8"))
NEEDED = {"name", "memory_mib", "bandwidth_gb_s", "compute_capability", "fp32_tflops", "pcie", "source"}
OTHERS = {"aliases", "memory_from", "nominal", "tensor_tflops", "rates_from", "note"}
WITH_CODES = {"T4", "A10", "A10G", "A40", "L4", "L40", "L40S"}  # error codes are kept in the GDDR6 itself
GB = 1e9

each_card = pytest.mark.parametrize("card", known_cards(), ids=lambda card: card.name)


def size_of(card: Card) -> int:
    """GB as the name says."""
    found = re.search(r" (\d+)GB$", card.name)
    assert found is not None, "a card's name ends with its memory"
    return int(found[1])


@pytest.mark.parametrize("row", TABLE["card"], ids=lambda row: row["name"])
def test_a_row_says_everything_and_where_it_comes_from(row: dict[str, Any]) -> None:
    assert set(row) >= NEEDED
    assert set(row) <= NEEDED | OTHERS
    assert row.get("nominal", False) != ("memory_from" in row), "memory is either told by somebody or nominal"
    assert row["source"].startswith("https://")
    for key in ("memory_from", "rates_from"):
        assert row.get(key, "https://").startswith("https://") or row[key] in TABLE["evidence"]


def test_no_evidence_is_left_over() -> None:
    used = {row.get(key) for row in TABLE["card"] for key in ("memory_from", "rates_from")}
    assert set(TABLE["evidence"]) <= used


def test_many_cards_read_once() -> None:
    assert len(known_cards()) >= 60
    assert known_cards() is known_cards()
    with pytest.raises(dataclasses.FrozenInstanceError):
        known_cards()[0].name = "x"  # type: ignore[misc]
    with pytest.raises(TypeError):
        known_cards()[0].rates["fp32"] = 1.0  # type: ignore[index]


@each_card
def test_memory_is_in_bytes_and_a_little_less_than_on_the_box(card: Card) -> None:
    box = size_of(card) * GIB
    if card.nominal:
        assert card.memory_bytes == box
        assert not card.memory_source
    else:
        # The driver keeps 107 MiB (GTX 1080 Ti) to 664 MiB (A40), on large cards a hundredth. Error codes in GDDR6 take
        # a sixteenth more. A size taken for 10^9 bytes would miss a fifteenth: more than that from 10 GB on.
        codes = box // 16 if card.name.split()[-2] in WITH_CODES else 0
        assert 100 * MIB < box - codes - card.memory_bytes < max(670 * MIB, 0.012 * box)
        assert card.memory_source


def test_memory_of_the_same_cards_as_their_drivers_tell_it() -> None:
    assert find_card("RTX 3090").memory_bytes == 24123 * MIB
    assert find_card("T4").memory_bytes == 14912 * MIB
    assert find_card("H200").memory_bytes == 143156 * MIB


@each_card
def test_bandwidth_has_its_unit(card: Card) -> None:
    # GTX 1650 with 128 GB/s is the slowest here, B200 with 7.7 TB/s the fastest.
    assert 100 * GB < card.bandwidth_bytes_per_s < 10e12


@each_card
def test_tensor_rates_are_dense_and_summed_in_fp32(card: Card) -> None:
    if "fp16" not in card.rates:
        assert "GTX" in card.name
        return
    ratio = card.rates["fp16"] / card.rates["fp32"]
    turing = card.compute_capability == (7, 5)
    if card.name.startswith("GeForce"):
        # Turing: 64 FLOP-pairs a tensor core and clock, 8 cores to 64 fp32 lanes, at half rate: 4. Since Ampere there
        # are twice the lanes: 2. Sparse matrices or sums in fp16 would show 4 and 8.
        expected = 4 if turing else 2
    elif card.name.startswith(("Quadro", "TITAN", "RTX")):
        expected = 8 if turing else 4  # the same, at full rate
    else:
        # Server cards differ by chip and clock: A10G and L40 at half rate 2, GDDR cards 4, V100 and T4 8, HBM cards of
        # Ampere 16, of Hopper 14 to 15 (their tensor cores have another boost clock), B200 30.
        assert any(abs(ratio / expected - 1) < 0.03 for expected in (2, 4, 8, 13.9, 14.8, 16, 30)), ratio
        return
    assert ratio == pytest.approx(expected, rel=0.005)  # pages round to four digits


@each_card
def test_arithmetic_and_bandwidth_fit_together(card: Card) -> None:
    # FLOP a byte at the ridge: 51 (a laptop at 60 W) to 453 (RTX 5000 Ada). A slip of bits or thousands would be seen.
    if "fp16" in card.rates:
        assert 40 < card.rates["fp16"] / card.bandwidth_bytes_per_s < 500
    assert 5 < card.rates["fp32"] / card.bandwidth_bytes_per_s < 130


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("RTX 2080 Ti", 53.8),
        ("Quadro RTX 6000", 130.5),
        ("RTX 3080", 59.5),
        ("RTX 3090", 71),
        ("RTX A6000", 154.8),
        ("RTX 4060 Laptop", 29.1),
        ("RTX 4090", 165.2),
        ("RTX 6000 Ada", 364.2),
        ("RTX 5090", 209.5),
        ("T4", 65),
        ("V100", 125),
        ("A10G", 70),
        ("A100", 312),
        ("L40S", 362.05),
        ("H100", 989.4),
        ("B200", 2250),
    ],
)
def test_rates_that_the_maker_prints(name: str, tflops: float) -> None:
    """16-bit, dense, summed in fp32: white papers and data sheets, rounded as printed there."""
    assert find_card(name).rates["fp16"] == pytest.approx(tflops * 1e12, rel=0.003)


@pytest.mark.parametrize(("name", "gb_s"), [("T4", 15.75), ("RTX 3060", 31.51), ("RTX 4060", 15.75), ("H100", 63.02)])
def test_the_link_to_the_host_is_one_way(name: str, gb_s: float) -> None:
    """PCIe 3.0 x16, 4.0 x16, 4.0 x8 and 5.0 x16: 8, 16, 16, 32 GT/s a lane, 128 bits of 130 are data."""
    assert find_card(name).host_link_bytes_per_s == pytest.approx(gb_s * GB, rel=0.001)


@each_card
def test_a_card_is_found_by_each_of_its_names_and_no_other_has_them(card: Card) -> None:
    for name in (card.name, *card.aliases):
        for spelled in (name, f"NVIDIA {name}", name.lower().replace(" ", ""), name.upper().replace(" ", "-")):
            assert find_card(spelled) is card, spelled
    assert card.name.removesuffix("GB") not in card.aliases


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx3060", "GeForce RTX 3060 12GB"),
        ("RTX 3060", "GeForce RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 3060", "GeForce RTX 3060 12GB"),
        ("3060-12g", "GeForce RTX 3060 12GB"),
        ("rtx 3060 8 GB", "GeForce RTX 3060 8GB"),
        ("3060 ti", "GeForce RTX 3060 Ti 8GB"),
        ("4090", "GeForce RTX 4090 24GB"),
        ("GeForce RTX 4090 24GB GDDR6X", "GeForce RTX 4090 24GB"),
        ("RTX 4090 (24 GiB)", "GeForce RTX 4090 24GB"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "GeForce RTX 4060 Laptop 8GB"),
        ("rtx 4060 mobile", "GeForce RTX 4060 Laptop 8GB"),
        ("3080 16GB laptop", "GeForce RTX 3080 Laptop 16GB"),
        ("A100", "A100 SXM4 80GB"),
        ("A100 80GB", "A100 SXM4 80GB"),
        ("a100-80gb", "A100 SXM4 80GB"),
        ("a100 40gb", "A100 SXM4 40GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM4 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("Tesla V100-SXM2-32GB", "Tesla V100 SXM2 32GB"),
        ("Tesla T4", "Tesla T4 16GB"),
        ("H100", "H100 SXM5 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5 80GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
        ("h100nvl", "H100 NVL 94GB"),
        ("NVIDIA A10G", "A10G 24GB"),
        ("NVIDIA L4", "L4 24GB"),
        ("Quadro RTX 8000", "Quadro RTX 8000 48GB"),
        ("NVIDIA RTX A2000 12GB", "RTX A2000 12GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            "RTX PRO 6000 Blackwell Max-Q 96GB",
        ),
    ],
)
def test_many_spellings(text: str, name: str) -> None:
    assert find_card(text).name == name


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("RTX 3060 16GB", ["GeForce RTX 3060 12GB", "GeForce RTX 3060 8GB"]),
        ("RTX 5099", ["GeForce RTX 5090 32GB"]),
        ("RTX 6000", ["RTX A6000 48GB", "RTX 6000 Ada 48GB"]),  # three generations share that number
        ("A100 60GB", ["A100 SXM4 80GB", "A100 SXM4 40GB"]),
        ("rtx 4070 tie super", ["GeForce RTX 4070 Ti SUPER 16GB"]),
    ],
)
def test_a_wrong_name_is_told_the_right_ones(text: str, nearest: list[str]) -> None:
    with pytest.raises(UserError) as told:
        find_card(text)
    message = str(told.value)
    assert message.startswith(f"{text!r} is no card")
    assert f"expected one of {len(known_cards())}" in message
    assert all(repr(name) in message.split("did you mean")[1] for name in nearest), message


@pytest.mark.parametrize("text", ["RX 7900 XTX", "", "NVIDIA", "a toaster"])
def test_what_resembles_no_card_is_told_how_names_look(text: str) -> None:
    with pytest.raises(UserError, match="write it as it is sold: 'RTX 3060 12GB'"):
        find_card(text)


@each_card
def test_a_name_without_a_size_says_that_there_are_others(card: Card) -> None:
    bare = card.name.removesuffix(f" {size_of(card)}GB")
    namesakes = [other for other in known_cards() if other.name.removesuffix(f" {size_of(other)}GB") == bare]
    meant = [other for other in namesakes if bare in other.aliases]
    if len(namesakes) > 1 and meant:
        sizes = [size_of(other) for other in namesakes if other is not meant[0]]
        assert all(f"{size} GB" in meant[0].note for size in sizes)
    elif len(namesakes) == 1:
        assert find_card(bare) is card


def test_cards_by_memory_are_all_there_in_order() -> None:
    ordered = cards_by_memory()
    assert sorted(card.name for card in ordered) == sorted(card.name for card in known_cards())
    sizes = [card.memory_bytes for card in ordered]
    assert sizes == sorted(sizes)
    assert (ordered[0].name, ordered[-1].name) == ("GeForce GTX 1650 4GB", "B200 SXM 180GB")


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("GTX 1660", ("fp32",)),  # no tensor cores
        ("T4", ("fp16", "fp32")),  # compute capability 7.5: no bf16
        ("V100", ("fp16", "fp32")),
        ("RTX 3060", ("bf16", "fp16", "fp32")),
        ("B200", ("bf16", "fp16", "fp32")),
    ],
)
def test_a_card_is_a_device_with_its_dtypes_by_speed(name: str, dtypes: tuple[str, ...]) -> None:
    card = find_card(name)
    device = as_device(card)
    assert device.dtypes == dtypes
    assert (device.kind, device.cpu_threads) == ("cuda", 0)
    assert device.total_bytes == device.free_bytes == card.memory_bytes
    assert find_card(device.name) is card


@each_card
def test_bf16_comes_with_its_compute_capability(card: Card) -> None:
    assert ("bf16" in card.rates) == (card.compute_capability >= (8, 0))
    assert list(card.rates.values()) == sorted(card.rates.values(), reverse=True)


def test_the_catalogue_is_shipped() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "**/*.toml" in project["tool"]["setuptools"]["package-data"]["ajusta"]
