"""A mixture of experts is planned to the byte, in fp32 and bf16, however the router shares its tokens out."""

from __future__ import annotations

import pytest
import torch
from architectures import stock_model
from planned import Real, StoredModel, batches, fullest, subject
from tiny_models import tiny_config

from ajusta.planning.trace import Traced
from ajusta.spec.plan import Rung

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_the_traced_peaks_are_the_real_ones_to_the_byte(kind: str, dtype: torch.dtype) -> None:
    what = subject(StoredModel(stock_model(tiny_config(kind), dtype)), dtype=dtype)
    traced, real = Traced(what), Real(what)
    assert traced.blocks == len(real.model.chain.blocks) == 4
    for recompute in (0, 2, traced.blocks):
        rung = Rung(recompute_blocks=recompute, micro_tokens=100, loss_chunk=16, peak_bytes=0)
        phase, peak = traced.step(batches(100), rung), real.step(batches(100), rung)
        assert (phase.peak_bytes, phase.operation) == (peak.live_bytes, peak.operation)
        assert phase.by_category == {str(category): size for category, size in peak.by_category.items()}
    measured = real.evaluate(fullest(100), rung)
    assert traced.evaluate(fullest(100), rung).peak_bytes == measured.live_bytes
