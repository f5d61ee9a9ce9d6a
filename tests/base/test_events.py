"""An event is plain values under its own name."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ajusta.base.events import Note, PhaseEnded


def test_an_event_is_written_as_json_under_its_name() -> None:
    written = json.loads(json.dumps(PhaseEnded(phase="train", seconds=1.5, peak_bytes=7).as_json()))
    assert written == {"event": "PhaseEnded", "phase": "train", "seconds": 1.5, "peak_bytes": 7, "planned_bytes": None}


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Note(text="x").text = "y"  # type: ignore[misc]
