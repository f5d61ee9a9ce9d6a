"""Figures of a device are kept, found again, and passed over with a note where they cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ajusta.base.errors import UserError
from ajusta.spec.cards import as_device, find_card
from ajusta.spec.device import Device
from ajusta.spec.roofline import Kernel, Roofline
from ajusta.spec.speeds import tabulated, typical_processor
from ajusta.stages import known as module
from ajusta.stages.known import Known, keep, known_file, recall, roofline_for

KNOWN = Known(
    roofline=Roofline(
        matmul_flops={"fp32": 1e11, "bf16": 3e11}, thin_flops={"fp32": 5e10}, few_flops={}, short_flops={},
        attention_flops={"fp32": 4e10}, bandwidth_bytes_per_s=2e10, narrow_bytes_per_s=1e10, per_operation_s=5e-6,
        fresh_bytes_per_s=2e9, fresh_from_bytes=4 << 20,
        kernels={"nf4 fp32": Kernel(call_s=1e-5, numbers_per_s=7e9)}, source="measured on this device", measured=True,
    ),
    outside={"CUDA context": 400 << 20},
)  # fmt: skip


def device(name: str = "a processor", kind: str = "cpu") -> Device:
    return Device(kind=kind, name=name, total_bytes=8, free_bytes=8, cpu_threads=2, dtypes=("fp32",))


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ajusta" / "devices.json"


def refuse(text: str) -> None:
    raise AssertionError(text)


def test_what_is_kept_is_found_again(file: Path) -> None:
    assert recall(device(), refuse) is None
    assert keep(device(), KNOWN) == file == known_file()
    assert recall(device(), refuse) == KNOWN
    assert roofline_for(device(), refuse) == KNOWN.roofline
    assert [path.name for path in file.parent.iterdir()] == ["devices.json"], "nothing is left beside it"


def test_each_device_has_its_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(device(), KNOWN)
    other = Known(roofline=tabulated(find_card("A100 80GB")), outside={})
    keep(device("another"), Known(roofline=KNOWN.roofline))
    keep(device("NVIDIA A100-SXM4-80GB", "cuda"), KNOWN)
    assert recall(device("another"), refuse) == Known(roofline=KNOWN.roofline)
    assert recall(device(), refuse) == KNOWN != other
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert recall(device(), refuse) is None, "more threads are another device"
    assert recall(device("NVIDIA A100-SXM4-80GB", "cuda"), refuse) == KNOWN, "but not to a card"
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert recall(device("NVIDIA A100-SXM4-80GB", "cuda"), refuse) is None, "another torch may be faster"


def damage(row: dict[str, Any], name: str, value: Any) -> None:
    (row if name == "outside" else row["roofline"])[name] = value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bandwidth_bytes_per_s", 0), ("bandwidth_bytes_per_s", "fast"), ("per_operation_s", -1.0),
        ("per_operation_s", True), ("narrow_bytes_per_s", None), ("matmul_flops", 5), ("matmul_flops", {}),
        ("matmul_flops", {"fp32": 0}), ("thin_flops", {"fp32": "many"}), ("kernels", {"nf4 fp32": 7e9}),
        ("kernels", {"nf4 fp32": {"call_s": 1e-5}}), ("outside", []), ("outside", {"CUDA context": -1}),
        ("attention_flops", {"fp32": float("inf")}),
    ],
)  # fmt: skip
def test_a_damaged_figure_is_named_and_passed_over(file: Path, name: str, value: Any) -> None:
    keep(device(), KNOWN)
    whole = json.loads(file.read_text(encoding="utf-8"))
    (row,) = whole["devices"].values()
    damage(row, name, value)
    file.write_text(json.dumps(whole), encoding="utf-8")
    notes: list[str] = []
    assert recall(device(), notes.append) is None
    (note,) = notes
    assert str(file) in note and name in note and "ajusta doctor --measure" in note
    keep(device(), KNOWN)
    assert recall(device(), refuse) == KNOWN


@pytest.mark.parametrize("missing", ["roofline", "outside"])
def test_a_missing_part_is_named_and_passed_over(file: Path, missing: str) -> None:
    keep(device(), KNOWN)
    whole = json.loads(file.read_text(encoding="utf-8"))
    (row,) = whole["devices"].values()
    del row[missing]
    file.write_text(json.dumps(whole), encoding="utf-8")
    notes: list[str] = []
    assert recall(device(), notes.append) is None and missing in notes[0]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"form": 0, "devices": {}}', '{"form": 1}', "\xff\x00"])
def test_a_damaged_or_old_file_is_passed_over_and_replaced(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode("latin-1"))
    notes: list[str] = []
    assert recall(device(), notes.append) is None and len(notes) == 1
    keep(device(), KNOWN)
    assert recall(device(), refuse) == KNOWN


def test_where_nothing_can_be_written_a_person_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be", encoding="utf-8")
    with pytest.raises(UserError, match=r"devices\.json cannot be written .*XDG_CACHE_HOME"):
        keep(device(), KNOWN)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert known_file() == tmp_path / "home" / ".cache" / "ajusta" / "devices.json"
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(module.os.path, "expanduser", lambda text: text)
    assert known_file() is None and recall(device(), refuse) is None
    with pytest.raises(UserError, match="no home folder here"):
        keep(device(), KNOWN)


def test_an_unmeasured_card_goes_by_its_data_sheet() -> None:
    card = find_card("RTX 3060")
    assert roofline_for(as_device(card), refuse) == tabulated(card)


def test_an_unmeasured_processor_is_the_same_every_time() -> None:
    told = roofline_for(device(), refuse)
    assert told == typical_processor(2) == roofline_for(device("another"), refuse) and not told.measured
    assert "ajusta doctor --measure" in told.source


def test_a_card_in_no_table_is_told_so() -> None:
    notes: list[str] = []
    told = roofline_for(device("Imaginary 9000", "cuda"), notes.append)
    assert "Imaginary 9000 is in no table" in notes[0] and "ajusta doctor --measure" in notes[0]
    assert told == tabulated(find_card("RTX 3060"))
