"""The order: each example once an epoch on exactly one rank, and the worst step found is the worst."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ajusta.data.order import Order, worst_step
from ajusta.data.pack import bins


@given(count=st.integers(1, 40), batch=st.integers(1, 9), world=st.integers(1, 3), seed=st.integers(0, 5))
def test_each_example_once_an_epoch(count: int, batch: int, world: int, seed: int) -> None:
    orders = [
        Order(lengths=tuple(range(1, count + 1)), batch_size=batch, seed=seed, rank=rank, world=world)
        for rank in range(world)
    ]
    steps = orders[0].steps_per_epoch
    for epoch in range(2):
        taken = [
            index
            for step in range(epoch * steps, (epoch + 1) * steps)
            for order in orders
            for index in order.examples_of_step(step)
        ]
        assert sorted(taken) == list(range(count))
    assert len(orders[0].all_of_step(0)) == min(batch, count)
    total = sum(orders[0].step_tokens(step) for step in range(steps + 1))
    assert orders[0].total_tokens(steps + 1) == total
    assert orders[0].total_tokens(2 * steps) == count * (count + 1)


def test_order_is_a_pure_function_and_epochs_differ() -> None:
    one, two = (Order(lengths=(1,) * 50, batch_size=50, seed=3) for _ in range(2))
    assert one.examples_of_step(4) == two.examples_of_step(4)
    assert one.examples_of_step(0) != one.examples_of_step(1)
    assert one.examples_of_step(0) != Order(lengths=(1,) * 50, batch_size=50, seed=4).examples_of_step(0)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=25),
    batch=st.integers(1, 6),
    max_tokens=st.integers(5, 40),
    steps=st.integers(1, 12),
    packing=st.booleans(),
)
def test_worst_step_is_the_worst(lengths: list[int], batch: int, max_tokens: int, steps: int, packing: bool) -> None:
    order = Order(lengths=tuple(lengths), batch_size=batch, seed=1)
    worst = worst_step(order, max_tokens, steps, packing=packing)
    sizes = []
    for step in range(steps):
        chosen = [lengths[index] for index in order.examples_of_step(step)]
        assert sum(chosen) <= worst.step_tokens
        for group in bins(chosen, max_tokens, packing=packing):
            sizes.append((sum(chosen[place] for place in group), max(chosen[place] for place in group)))
    assert order.step_tokens(worst.step) == worst.step_tokens
    assert max(sizes) == (worst.fullest_tokens, worst.longest_segment)
    assert sum(lengths[index] for index in worst.fullest) == worst.fullest_tokens
    assert set(worst.fullest) <= set(order.examples_of_step(worst.fullest_step))
