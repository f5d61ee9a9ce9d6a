"""Our AdamW over flat buffers against torch's, number by number; what is not finite changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ajusta.blocks import optimizer as module
from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW, learning_rate_schedule
from ajusta.memory.ledger import Category
from ajusta.memory.place import CountingPlace, RealPlace

CPU = RealPlace("cpu")
SHAPES = [(4, 33), (7, 4), (1,), (129, 3)]
TOKENS = 37


def parameters(dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)) for shape in SHAPES
    ]


def summed_gradients(step: int) -> list[Tensor]:
    """Return gradients summed over `TOKENS` tokens; every third step has large ones, so that clipping sets in."""
    generator = torch.Generator().manual_seed(100 + step)
    size = TOKENS * (10.0 if step % 3 == 0 else 0.01)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * size for shape in SHAPES]


def put(ours: FlatAdamW, grads: Sequence[Tensor]) -> None:
    for parameter, grad in zip(ours.parameters, grads, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(grad)


@pytest.mark.parametrize("chunk", [1 << 18, 64, 50], ids=["one chunk", "chunks of 64", "chunks of 50"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_twenty_steps_are_torchs_adamw(
    weight_decay: float, max_grad_norm: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)  # 552 values: no multiple of 50 or 64
    settings = AdamWSettings(beta1=0.8, beta2=0.99, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    ours = FlatAdamW(parameters(), settings, CPU)
    assert ours.count % 50 and ours.count % 64
    theirs = parameters()
    stock = torch.optim.AdamW(theirs, lr=1.0, betas=(0.8, 0.99), eps=1e-8, weight_decay=weight_decay)
    rate = learning_rate_schedule("cosine", 0.01, 3, 20)
    for step in range(20):
        grads = summed_gradients(step)
        put(ours, grads)
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad / TOKENS
        before = torch.nn.utils.clip_grad_norm_(theirs, max_grad_norm or float("inf"))
        stock.param_groups[0]["lr"] = rate(step)
        stock.step()
        norm, finite = ours.step(rate(step), TOKENS)
        assert bool(finite) and abs(float(norm / before) - 1) < 1e-12
        assert not ours.grads.any()
    for mine, other in zip(ours.parameters, theirs, strict=True):
        assert float((mine - other).detach().abs().max() / other.detach().abs().max()) < 1e-12


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float, weight_decay: float) -> None:
    settings = AdamWSettings(weight_decay=weight_decay)
    clean, hit = (FlatAdamW(parameters(), settings, CPU) for _ in range(2))
    for step in range(6):
        put(hit, summed_gradients(step))
        if step in (0, 3):  # a poisoned step between the others, the very first one too
            hit.grads[5] = poison
            before = [t.clone() for t in (hit.weights, *hit.state().values())]
            _, finite = hit.step(0.01, TOKENS)
            assert not bool(finite) and not hit.grads.any()
            assert all(torch.equal(a, b) for a, b in zip(before, (hit.weights, *hit.state().values()), strict=True))
            continue
        assert bool(hit.step(0.01, TOKENS)[1])
        put(clean, summed_gradients(step))
        clean.step(0.01, TOKENS)
    assert torch.equal(clean.weights, hit.weights)  # the bias correction counts finite updates only
    assert float(hit.updates) == 4.0


def test_parameters_and_gradients_stay_views_of_the_flat_buffers() -> None:
    ours = FlatAdamW(parameters(), AdamWSettings(), CPU)
    start = 0
    put(ours, summed_gradients(1))
    ours.step(0.1, TOKENS)
    sum((p * 2).sum() for p in ours.parameters).backward()  # type: ignore[union-attr]
    for parameter, original in zip(ours.parameters, parameters(), strict=True):
        stop = start + parameter.numel()
        assert parameter.grad is not None
        assert parameter.data_ptr() == ours.weights[start:].data_ptr()
        assert parameter.grad.data_ptr() == ours.grads[start:].data_ptr()
        assert bool((ours.grads[start:stop] == 2).all()) and parameter.shape == original.shape
        start = stop
    assert start == ours.count


def test_a_saved_state_goes_on_bit_for_bit() -> None:
    whole = FlatAdamW(parameters(torch.float32), AdamWSettings(weight_decay=0.01), CPU)
    for step in range(4):
        put(whole, summed_gradients(step))
        whole.step(0.01, TOKENS)
    saved = {name: tensor.clone() for name, tensor in whole.state().items()}
    resumed_from = [nn.Parameter(p.detach().clone()) for p in whole.parameters]
    resumed = FlatAdamW(resumed_from, AdamWSettings(weight_decay=0.01), CPU)
    pointers = [t.data_ptr() for t in resumed.state().values()]
    resumed.load(saved)
    assert pointers == [t.data_ptr() for t in resumed.state().values()]  # in place: no second copy
    for step in range(4, 8):
        for each in (whole, resumed):
            put(each, summed_gradients(step))
            each.step(0.01, TOKENS)
    assert torch.equal(whole.weights, resumed.weights)


def test_sixteen_bits_are_trained_through_a_copy_of_thirty_two() -> None:
    """A hundred updates of 2^-10 of a weight: each alone would be rounded away in bf16."""
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    ours = FlatAdamW([weight], AdamWSettings(max_grad_norm=0.0), CPU)
    exact = FlatAdamW([nn.Parameter(torch.ones(8))], AdamWSettings(max_grad_norm=0.0), CPU)
    assert ours.first.dtype == ours.second.dtype == ours.master.dtype == torch.float32
    assert exact.master is exact.weights and set(exact.state()) == set(ours.state()) - {"master"}
    for _ in range(100):
        for each in (ours, exact):
            each.grads.fill_(0.5)
            each.step(2.0**-10, 1)
    assert torch.equal(ours.master, exact.weights) and torch.equal(weight.detach(), exact.weights.bfloat16())
    assert 0.89 < float(weight.detach()[0]) < 0.92


def test_no_trained_token_divides_by_nothing() -> None:
    ours = FlatAdamW(parameters(), AdamWSettings(), CPU)
    norm, finite = ours.step(0.1, 0)
    assert float(norm) == 0.0 and bool(finite)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters, parameters(), strict=True))


def test_the_norm_of_many_fp32_values_is_right() -> None:
    count = 3_000_000
    ours = FlatAdamW([nn.Parameter(torch.zeros(count))], AdamWSettings(), CPU)
    ours.grads.copy_(torch.linspace(1e-3, 2e-3, count))
    expected = torch.linalg.vector_norm(ours.grads.double())
    norm, _ = ours.step(0.0, 1)
    assert abs(float(norm) / float(expected) - 1) < 1e-5


def test_it_runs_on_meta_with_its_bytes_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 64)
    place = CountingPlace()
    with place.counting() as ledger:
        ours = FlatAdamW(parameters(torch.float32, "meta"), AdamWSettings(weight_decay=0.1), place)
        held = ledger.live_by_category()
        ledger.start_over()
        norm, finite = ours.step(0.1, 1)
    size = 4 * ours.count
    assert norm.is_meta and finite.is_meta
    assert held[Category.ADAPTERS] == size and held[Category.GRADIENTS] == size
    assert held[Category.OPTIMIZER] == 2 * size + 8
    assert ledger.peak.live_bytes <= 4 * size + 8 + 6 * 4 * 64 + 64  # temporaries: some chunks, never the whole


@given(st.sampled_from(["cosine", "linear", "constant"]), st.integers(0, 30), st.integers(1, 200), st.floats(1e-6, 1.0))
def test_a_rate_rises_falls_and_never_stops_learning(kind: str, warmup: int, total: int, peak: float) -> None:
    rate = learning_rate_schedule(kind, peak, warmup, total)
    rates = [rate(step) for step in range(total)]
    assert all(0 < r <= peak for r in rates)  # the first and the last step learn
    rise, fall = rates[: warmup + 1], rates[warmup:]
    assert all(a < b for a, b in itertools.pairwise(rise))
    assert all(a >= b for a, b in itertools.pairwise(fall))
    if warmup < total:
        assert rates[warmup] == peak
        assert abs(rate(total) - (peak if kind == "constant" else 0.0)) < 1e-12 * peak


def test_the_rates_are_the_formulas() -> None:
    cosine, linear = (learning_rate_schedule(kind, 2.0, 1, 5) for kind in ("cosine", "linear"))
    assert [round(cosine(step), 6) for step in range(6)] == [1.0, 2.0, 1.707107, 1.0, 0.292893, 0.0]
    assert [linear(step) for step in range(7)] == [1.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
