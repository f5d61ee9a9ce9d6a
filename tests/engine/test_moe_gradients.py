"""The chain step through a mixture of experts against stock transformers + PEFT with transformers' eager experts."""

from __future__ import annotations

import pytest
import torch
from tuned import examples, our_gradients, stock_and_config, stock_gradients, tuned, with_peft
from widen import InFp64

from ajusta.blocks.recompute import Keep, Recompute
from ajusta.data.pack import lay_out

LENGTHS = [7, 13, 5]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks for it
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_the_adapters_gradients_are_stocks(kind: str) -> None:
    stock, _ = stock_and_config(kind, torch.float64)
    stock.set_experts_implementation("eager")
    assembled = tuned(stock)
    peft = with_peft(kind, assembled, stock)
    made = examples(LENGTHS)
    with InFp64():
        expected = stock_gradients(peft, made, assembled.adapters)
        kept = our_gradients(assembled, [lay_out(made)], Keep())
        again = our_gradients(assembled, [lay_out(made)], Recompute())
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        assert float((kept[name] - value).abs().max()) < 1e-10 * largest, name
        assert torch.equal(kept[name], again[name]), name
