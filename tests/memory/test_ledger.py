"""The ledger: live bytes, their category, the fullest moment; the same on `meta` as on real tensors."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from ajusta.memory.ledger import Category, Ledger

DEVICES = ["cpu", "meta"]
KIB = 1024


def kib(device: str, count: int = 1) -> Tensor:
    """Return a tensor of `count` KiB."""
    return torch.empty(count * 256, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_dies_is_taken_off_at_once(device: str) -> None:
    with Ledger() as ledger:
        first = kib(device, 3)
        assert ledger.now == 3 * KIB
        second = kib(device, 2)
        del first
        assert ledger.now == 2 * KIB
        third = kib(device, 1)
        assert (ledger.now, ledger.peak.live_bytes) == (3 * KIB, 5 * KIB)
        del second, third
    assert ledger.now == 0 and ledger.live_by_category() == {}


@pytest.mark.parametrize("device", DEVICES)
def test_views_share_a_storage_and_keep_all_of_it(device: str) -> None:
    with Ledger() as ledger:
        whole = kib(device, 4)
        part = whole[:10].view(2, 5).t()
        detached = whole.detach()
        assert ledger.now == 4 * KIB
        del whole
        assert ledger.now == 4 * KIB
        del part
        assert ledger.now == 4 * KIB
        del detached
        assert ledger.now == 0


def test_a_tensor_has_the_number_of_its_storage_in_the_events() -> None:
    before = kib("meta")
    with Ledger(record=True) as ledger:
        first, second = kib("meta", 3), kib("meta", 2)
        numbers = [ledger.number_of(each) for each in (first, second, first[:10], before)]
        (section,) = ledger.cut()
    assert numbers == [*(event.storage for event in section.events), numbers[0], None]
    assert numbers[0] != numbers[1]


@pytest.mark.parametrize("device", DEVICES)
def test_work_in_place_weighs_nothing(device: str) -> None:
    with Ledger() as ledger:
        x = kib(device)
        x.mul_(2).add_(x).sigmoid_()
        x[:5].zero_()
        assert ledger.now == KIB == ledger.peak.live_bytes


@pytest.mark.parametrize("device", DEVICES)
def test_a_storage_that_grows_by_an_out_argument_is_weighed_again(device: str) -> None:
    with Ledger() as ledger:
        x, out = kib(device, 2), torch.empty(0, device=device)
        torch.add(x, x, out=out)
        assert ledger.now == 4 * KIB
        del out
        assert ledger.now == 2 * KIB


@pytest.mark.parametrize("device", DEVICES)
def test_categories_nest_and_return(device: str) -> None:
    with Ledger() as ledger:
        with ledger.category(Category.BASE):
            base = kib(device, 1)
            with ledger.category(Category.LOGITS):
                logits = kib(device, 2)
            more = kib(device, 4)
        other = kib(device, 8)
        expected = {Category.BASE: 5 * KIB, Category.LOGITS: 2 * KIB, Category.TEMPORARY: 8 * KIB}
        assert ledger.live_by_category() == expected
        assert ledger.peak.by_category == expected
        del base, logits
        assert ledger.live_by_category() == {Category.BASE: 4 * KIB, Category.TEMPORARY: 8 * KIB}
        del more, other


def test_a_category_returns_after_an_error() -> None:
    with Ledger() as ledger:
        with pytest.raises(ZeroDivisionError), ledger.category(Category.BASE):
            raise ZeroDivisionError
        x = kib("meta")
        assert ledger.live_by_category() == {Category.TEMPORARY: x.nbytes}


@pytest.mark.parametrize("device", DEVICES)
def test_adopted_tensors_count_once_and_take_the_category(device: str) -> None:
    before = kib(device, 3)
    tied = before.view(-1)
    ledger = Ledger()
    ledger.adopt([before, tied], Category.BASE)
    assert ledger.now == 3 * KIB and ledger.peak.operation == "adopt"
    with ledger:
        made = kib(device, 1)
    ledger.adopt([made, before], Category.ADAPTERS)
    assert ledger.live_by_category() == {Category.ADAPTERS: 4 * KIB}
    del before, tied
    assert ledger.now == KIB


def test_a_workspace_counts_only_for_the_peak() -> None:
    with Ledger() as ledger:
        x = kib("meta", 2)
        with ledger.category(Category.RECOMPUTE):
            ledger.declare_workspace(5 * KIB, "kernel")
        assert ledger.now == x.nbytes
        assert ledger.peak.live_bytes == 7 * KIB and ledger.peak.operation == "kernel"
        assert ledger.peak.by_category == {Category.TEMPORARY: 2 * KIB, Category.RECOMPUTE: 5 * KIB}
        ledger.declare_workspace(KIB, "small")
        assert ledger.peak.operation == "kernel"


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_names_its_operation_and_can_start_over(device: str) -> None:
    with Ledger() as ledger:
        x = torch.ones(16, 16, device=device)
        y = x @ x
        assert "mm" in ledger.peak.operation and ledger.peak.live_bytes == 2 * KIB
        del y
        ledger.start_over()
        assert ledger.peak.live_bytes == KIB and ledger.peak.operation == "start"


def test_a_tuple_of_outputs_is_weighed_leaf_by_leaf() -> None:
    with Ledger() as ledger:
        values, indices = torch.topk(torch.empty(8, 256, device="meta"), 16)
        assert ledger.now == values.nbytes + indices.nbytes


def small_net(device: str) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32), nn.LayerNorm(32))
    return net.to(device)


def small_step(net: nn.Module, x: Tensor) -> None:
    """Drop the old gradients, then run forward and backward."""
    for parameter in net.parameters():
        parameter.grad = None
    net(x).square().sum().backward()


def counted(device: str) -> Ledger:
    """Return the ledger of one small step; the weights, which exist already, are adopted."""
    net, x = small_net(device), torch.ones(16, 64, device=device)
    with Ledger() as ledger:
        ledger.adopt([*net.parameters(), x], Category.BASE)
        small_step(net, x)
        gc.collect()
        assert ledger.now == 2 * sum(p.nbytes for p in net.parameters()) + x.nbytes  # weights, gradients, input
    return ledger


def test_a_step_is_counted_alike_on_meta_and_on_real_tensors() -> None:
    real, meta = counted("cpu"), counted("meta")
    assert real.operations == meta.operations
    assert real.peak == meta.peak


def test_the_peak_is_the_allocators_own_to_the_byte() -> None:
    net, x = small_net("cpu"), torch.ones(16, 64)
    small_step(net, x)  # kernels set themselves up
    for parameter in net.parameters():
        parameter.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        small_step(net, x)
    live = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):  # each allocation and each release
        live += event.nbytes()
        peak = max(peak, live)
    held = sum(p.nbytes for p in net.parameters())
    assert live == held  # the gradients stay
    assert counted("cpu").peak.live_bytes - held - x.nbytes == peak
