from __future__ import annotations

import dataclasses

import pytest

from ajusta.spec.device import Device


def test_a_device_is_a_plain_fact() -> None:
    device = Device(kind="cpu", name="x", total_bytes=8, free_bytes=4, cpu_threads=2, dtypes=("fp32",))
    assert device.can("fp32")
    assert not device.can("bf16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.kind = "cuda"  # type: ignore[misc]
