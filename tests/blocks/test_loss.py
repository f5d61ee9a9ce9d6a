"""The summed cross-entropy and its gradient against NumPy in float64 and against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ajusta.blocks.loss import cross_entropy_sum
from ajusta.memory.ledger import Category, Ledger

# What is lost is the rounding of the logits' dtype, on numbers of at most 1 (gradients) or on the loss as a whole.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 5e-3}


def by_numpy(logits: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Return the summed cross-entropy."""
    highest = logits.max(axis=1)
    sums = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
    return float((sums - logits[np.arange(len(labels)), labels]).sum())


def made(rows: int, vocabulary: int, dtype: torch.dtype, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * spread).to(dtype)
    return logits, torch.randint(0, vocabulary, (rows,), generator=generator)


def twin(logits: Tensor, labels: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return the loss in fp64 and the gradient of the head's output, by autograd."""
    raw = logits.double().clone().requires_grad_(True)
    used = raw * scale
    if softcap is not None:
        used = softcap * torch.tanh(used / softcap)
    loss = torch.nn.functional.cross_entropy(used, labels, reduction="sum")
    loss.backward()
    assert raw.grad is not None
    return loss.detach(), raw.grad


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("scale", [1.0, 0.25, -2.0])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_loss_and_gradient_are_autograds(rows: int, dtype: torch.dtype, scale: float, softcap: float | None) -> None:
    logits, labels = made(rows, 97, dtype)
    expected, expected_gradient = twin(logits, labels, scale, softcap)
    alone, none = cross_entropy_sum(logits.clone(), labels, scale=scale, softcap=softcap, gradient=False)
    loss, gradient = cross_entropy_sum(logits.clone(), labels, scale=scale, softcap=softcap)
    assert none is None and gradient is not None
    assert torch.equal(alone, loss) and loss.dim() == 0
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype and gradient.shape == logits.shape
    # bf16 logits are widened before anything is summed: the loss is as good as fp32 makes it
    assert abs(float(loss) - float(expected)) / float(expected) < min(TOLERANCE[dtype], 2e-6)
    assert float((gradient.double() - expected_gradient).abs().max()) < TOLERANCE[dtype] * max(abs(scale), 1)


@pytest.mark.parametrize("vocabulary", [1, 2, 512])
def test_the_loss_is_numpys(vocabulary: int) -> None:
    logits, labels = made(9, vocabulary, torch.float64)
    expected = by_numpy(logits.numpy(), labels.numpy())
    loss, _ = cross_entropy_sum(logits.clone(), labels)
    assert abs(float(loss) - expected) <= 1e-12 * max(expected, 1.0)


def test_a_vocabulary_of_one_has_nothing_to_learn() -> None:
    loss, gradient = cross_entropy_sum(torch.tensor([[3.0], [-7.0]]), torch.tensor([0, 0]))
    assert float(loss) == 0.0 and gradient is not None and not gradient.any()


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 17, 100])
def test_any_chunk_gives_the_same(chunk: int) -> None:
    logits, labels = made(17, 64, torch.float64)
    whole, gradient = cross_entropy_sum(logits.clone(), labels)
    parts = [
        cross_entropy_sum(rows.clone(), y) for rows, y in zip(logits.split(chunk), labels.split(chunk), strict=True)
    ]
    assert abs(float(sum(loss for loss, _ in parts)) - float(whole)) < 1e-12 * float(whole)
    assert gradient is not None
    assert torch.equal(torch.cat([part for _, part in parts if part is not None]), gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_very_confident_logits_stay_finite(dtype: torch.dtype) -> None:
    right, wrong = torch.full((1, 8), -3e4), torch.full((1, 8), -3e4)
    right[0, 2], wrong[0, 3] = 3e4, 3e4
    loss, gradient = cross_entropy_sum(torch.cat((right, wrong)).to(dtype), torch.tensor([2, 2]))
    assert float(loss) == float(
        torch.tensor(3e4).to(dtype) * 2
    )  # nothing for the first, all the distance for the second
    expected = torch.zeros(2, 8)
    expected[1, 3], expected[1, 2] = 1.0, -1.0
    assert gradient is not None and torch.equal(gradient.float(), expected)


def test_gradients_of_a_row_add_up_to_nothing() -> None:
    logits, labels = made(5, 33, torch.float64)
    _, gradient = cross_entropy_sum(logits, labels)
    assert gradient is not None and float(gradient.sum(dim=1).abs().max()) < 1e-14


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.0), (torch.bfloat16, 4.0)], ids=str)
def test_the_logits_are_written_over(dtype: torch.dtype, factor: float) -> None:
    """fp32: the gradient takes the logits' own place; bf16: the fp32 copy and the narrow gradient come on top."""
    logits, labels = (
        torch.empty(64, 1000, dtype=dtype, device="meta"),
        torch.zeros(64, dtype=torch.int64, device="meta"),
    )
    with Ledger() as ledger:
        ledger.adopt([logits, labels], Category.LOGITS)
        cross_entropy_sum(logits, labels)
    assert ledger.peak.live_bytes <= factor * logits.nbytes + 64 * 64  # and some columns
