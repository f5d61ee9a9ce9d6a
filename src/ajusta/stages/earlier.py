"""What a run folder remembers of how its run began, so that a resumed run makes its steps in the very same way.

The dtype that `auto` measured and the cut into micro-batches decide how sums are rounded. Measured anew, on a machine
that is busier today, they could come out differently, and the run would no longer be equal to an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from ajusta.spec.config import Config, load_config
from ajusta.spec.plan import Plan
from ajusta.stages.folder import RunFolder

_SHAPING = ("memory", "gradient_checkpointing", "micro_batch", "bits", "device")
_AS_IT_BEGAN = "the run began with it"


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The settings of the first start, everything filled in, and the rung that was taken."""

    config: Config
    recompute_blocks: int
    micro_tokens: int

    def shaped_alike(self, config: Config) -> bool:
        """Whether the person asks for the same memory and the same techniques as then."""
        return all(getattr(self.config, name) == getattr(config, name) for name in _SHAPING)


def read_earlier(folder: RunFolder) -> Earlier | None:
    """Return how the run of this folder began; None for a new folder, or one that was left before its plan.

    Raises:
        ConfigError: config.yaml was changed into something that is no settings file.
    """
    if not (folder.config.is_file() and folder.plan.is_file()):
        return None
    rung = json.loads(folder.plan.read_text(encoding="utf-8"))["rungs"][0]
    return Earlier(
        config=load_config(folder.config),
        recompute_blocks=rung["recompute_blocks"],
        micro_tokens=rung["micro_tokens"],
    )


def plan_as_before(earlier: Earlier | None, config: Config, search: Callable[[int | None, int | None], Plan]) -> Plan:
    """Return the plan with the rung of the first start if it still fits and is still wanted, else a new one.

    `search(recompute_blocks, micro_tokens)` plans with these given, or finds them where they are None.
    """
    if earlier is not None and earlier.shaped_alike(config):
        kept = search(earlier.recompute_blocks, earlier.micro_tokens)
        if kept.fits:
            shape = ("gradient_checkpointing", "micro_batch")
            named = [replace(each, because=_AS_IT_BEGAN) if each.name in shape else each for each in kept.choices]
            return replace(kept, choices=tuple(named))
    return search(None, None)


__all__ = ["Earlier", "plan_as_before", "read_earlier"]
