"""One optimizer step: any cut of the batch is the same step, and its loss is the one counted by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from architectures import stock_model
from tiny_models import tiny_config
from torch import Tensor
from transformers import PreTrainedModel
from tuned import examples, our_gradients, stock_and_config, tuned

from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW
from ajusta.blocks.recompute import Keep, Policy, Recompute
from ajusta.data.pack import lay_out, micro_batches
from ajusta.engine.assemble import Assembled
from ajusta.engine.phases import adopt_model, loss_only, make_optimizer, run_step, step_plan
from ajusta.engine.step import StepPlan, accumulate, optimizer_step
from ajusta.memory.ledger import Category
from ajusta.memory.place import CountingPlace, RealPlace
from ajusta.spec.data import Example, MicroBatch
from ajusta.spec.plan import Rung

CPU = RealPlace("cpu")
KINDS = ["llama", "gpt2", "bloom", "qwen3"]
LENGTHS = [7, 13, 5, 4, 9, 2, 16, 3]


def cut(made: Sequence[Example], parts: int) -> list[MicroBatch]:
    """Cut examples into so many micro-batches of unequal size: a tail group is smaller."""
    size = math.ceil(len(made) / parts)
    return [lay_out(made[start : start + size]) for start in range(0, len(made), size)]


def unlabelled(length: int, number: int = 99) -> Example:
    return Example(
        ids=np.arange(5, 5 + length), trained=np.zeros(length, dtype=np.bool_), source="made", example_id=number
    )


def rung(recompute: int = 0, chunk: int = 5) -> Rung:
    return Rung(recompute_blocks=recompute, micro_tokens=64, loss_chunk=chunk, peak_bytes=0)


def loss_by_hand(stock: PreTrainedModel, made: Sequence[Example]) -> tuple[float, int]:
    """Return the summed cross-entropy of the untouched model, in NumPy float64, one example at a time; token count."""
    total, count = 0.0, 0
    for example in made:
        with torch.no_grad():
            logits = stock(input_ids=torch.from_numpy(example.ids)[None], use_cache=False).logits[0].double().numpy()
        for place in np.flatnonzero(example.trained):
            row = logits[place - 1]
            total += float(row.max() + np.log(np.exp(row - row.max()).sum()) - row[example.ids[place]])
            count += 1
    return total, count


def untuned(stock: PreTrainedModel, dtype: torch.dtype = torch.float64) -> Assembled:
    """Return the model with adapters that change nothing yet."""
    assembled = tuned(stock, dtype=dtype)
    with torch.no_grad():
        for layer in assembled.adapters.values():
            layer.lora_B.zero_()
    return assembled


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_numpys_on_the_untouched_model(kind: str) -> None:
    stock, _ = stock_and_config(kind, torch.float64)
    made = examples(LENGTHS)
    expected, count = loss_by_hand(stock, made)
    assembled = untuned(stock)
    optimizer = make_optimizer(assembled, AdamWSettings(), CPU)
    result = run_step(assembled, CPU, tuple(cut(made, 3)), rung(), optimizer, 0.0, 0)
    assert result.trained_tokens == count and result.tokens == sum(LENGTHS)
    # Stock's eager attention takes its softmax in fp32 whatever the dtype; GPT-2's does not.
    tolerance = 1e-12 if kind == "gpt2" else 1e-8
    assert abs(result.mean_loss() / (expected / count) - 1) < tolerance
    alone = sum(float(loss_only(assembled.chain, CPU, micro, 4)) for micro in cut(made, 2))
    assert abs(alone / float(result.loss_sum) - 1) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_and_policy_is_the_same_step(kind: str) -> None:
    """SGD-like comparison on the gradient itself; the update from it is compared in tests/blocks/test_optimizer.py."""
    stock, _ = stock_and_config(kind, torch.float64)
    assembled, made = tuned(stock), examples(LENGTHS)
    expected = our_gradients(assembled, cut(made, 1), Keep())
    largest = max(float(value.abs().max()) for value in expected.values())
    ways: list[tuple[int, Policy, int]] = [
        (2, Keep(), 1000),
        (3, Keep(), 3),
        (3, Recompute(), 1),
        (8, Recompute(), 1000),
    ]
    for parts, policy, chunk in ways:
        found = our_gradients(assembled, cut(made, parts), policy, chunk)
        worst = max(float((found[name] - value).abs().max()) for name, value in expected.items())
        assert worst < 1e-10 * largest, (parts, policy.name, chunk)


def test_the_gradient_is_divided_once_by_all_trained_tokens() -> None:
    stock, _ = stock_and_config("llama", torch.float64)
    made = examples(LENGTHS)
    norms, losses = [], []
    for parts in (1, 2, 3):
        assembled = tuned(stock)
        optimizer = make_optimizer(assembled, AdamWSettings(max_grad_norm=0), CPU)
        result = run_step(assembled, CPU, tuple(cut(made, parts)), rung(), optimizer, 1e-3, 0)
        norms.append(float(result.grad_norm))
        losses.append(result.mean_loss())
    gradients = our_gradients(tuned(stock), cut(made, 1), Keep())
    trained = sum(example.num_trained for example in made)
    expected = math.sqrt(sum(float(g.square().sum()) for g in gradients.values())) / trained
    assert max(abs(norm / expected - 1) for norm in norms) < 1e-10
    assert max(losses) - min(losses) < 1e-10 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_loss_alone_is_the_same_for_any_batch(dtype: torch.dtype) -> None:
    stock, _ = stock_and_config("llama", dtype)
    assembled = tuned(stock, dtype=dtype)
    made = examples([3, 40, 7, 25, 16, 100, 12, 33, 5, 61, 9, 17, 8, 4, 21, 2, 50])
    totals = []
    for tokens in (1, 110, 200, 1000):
        for order in (made, made[::-1]):
            totals.append(sum(float(loss_only(assembled.chain, CPU, m, 16)) for m in micro_batches(order, tokens)))
    alone = sum(float(loss_only(assembled.chain, CPU, m, 3)) for m in micro_batches(made, 0, packing=False))
    assert max(abs(total / alone - 1) for total in totals) < (1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("policy", [Keep(), Recompute()], ids=lambda policy: policy.name)
def test_a_micro_batch_without_trained_tokens_is_nothing_to_learn(policy: Policy) -> None:
    stock, _ = stock_and_config("llama", torch.float64)
    assembled, made = tuned(stock), examples([7, 5])
    empty = lay_out([unlabelled(6)])
    optimizer = FlatAdamW(assembled.parameters(), AdamWSettings(), CPU)
    plan = StepPlan(policies=(policy,) * len(assembled.chain.blocks), loss_chunk=5)
    loss = accumulate(assembled.chain, CPU, empty, plan, 0)
    assert float(loss) == 0.0 and not optimizer.grads.any()
    assert float(loss_only(assembled.chain, CPU, empty, 5)) == 0.0
    weights = []
    for batches in ([lay_out(made)], [lay_out(made), empty], [empty, lay_out(made)]):
        again = tuned(stock)
        result = optimizer_step(again.chain, CPU, batches, plan, make_optimizer(again, AdamWSettings(), CPU), 1e-2, 0)
        assert result.trained_tokens == sum(e.num_trained for e in made)
        assert result.tokens == 12 + 6 * (len(batches) - 1)
        weights.append([p.detach() for p in again.parameters()])
    assert all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))


def test_an_unlabelled_example_in_a_row_changes_nothing() -> None:
    stock, _ = stock_and_config("llama", torch.float64)
    assembled, made = tuned(stock), examples([7, 5])
    expected = our_gradients(assembled, [lay_out(made)], Keep())
    found = our_gradients(assembled, [lay_out([made[0], unlabelled(6), made[1]])], Keep())
    largest = max(float(value.abs().max()) for value in expected.values())
    assert max(float((found[n] - v).abs().max()) for n, v in expected.items()) < 1e-10 * largest


def test_a_step_without_micro_batches_gives_zeros() -> None:
    """A small last step can leave a rank with nothing: its sums are zero."""
    stock, _ = stock_and_config("llama", torch.float32)
    assembled = tuned(stock, dtype=torch.float32)
    optimizer = make_optimizer(assembled, AdamWSettings(), CPU)
    before = optimizer.weights.clone()
    result = run_step(assembled, CPU, (), rung(), optimizer, 1e-2, 0)
    assert result.mean_loss() == 0.0 and result.trained_tokens == 0 and float(result.grad_norm) == 0.0
    assert torch.equal(before, optimizer.weights)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_every_adapter_learns_with_recompute_as_without(kind: str) -> None:
    """R08: frozen embeddings in front of recomputed blocks; no B stays at zero, and all ways end at the same bits."""
    stock, _ = stock_and_config(kind, torch.float32)
    made, ends = examples(LENGTHS), []
    for recompute in (0, 2, 4):
        assembled = untuned(stock, torch.float32)
        optimizer = make_optimizer(assembled, AdamWSettings(), CPU)
        for step in range(3):
            run_step(assembled, CPU, tuple(cut(made, 2)), rung(recompute), optimizer, 1e-2, step)
        assert all(bool(layer.lora_B.any()) for layer in assembled.adapters.values())
        ends.append(optimizer.weights.clone())
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_recompute_sees_the_dropout_that_the_forward_saw() -> None:
    """R09, through the whole step: loss and adapters equal bit for bit with LoRA dropout on."""
    stock, _ = stock_and_config("llama", torch.float32)
    made, found = examples(LENGTHS), []
    for recompute in (0, 4):
        assembled = tuned(stock, dtype=torch.float32, dropout=0.3)
        optimizer = make_optimizer(assembled, AdamWSettings(), CPU)
        micro, how = tuple(cut(made, 2)), rung(recompute)
        losses = [run_step(assembled, CPU, micro, how, optimizer, 1e-2, step).mean_loss() for step in range(3)]
        found.append((losses, optimizer.weights.clone()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_the_first_blocks_recompute() -> None:
    plan = step_plan(rung(recompute=2), 4)
    assert [policy.name for policy in plan.policies] == ["recompute", "recompute", "keep", "keep"]


def test_one_row_is_learnt_by_heart_and_not_shifted() -> None:
    """R39: labels shifted twice or not at all would still let the loss fall, but the continuation would be wrong."""
    stock = stock_model(tiny_config("llama", initializer_range=0.2), torch.float32)  # a head that can be sure of itself
    assembled = untuned(stock, torch.float32)
    ids = np.array([11, 12, 13, 14, 15, 16, 17])
    trained = np.arange(7) > 0
    row = lay_out([Example(ids=ids, trained=trained, source="made", example_id=0)])
    optimizer = make_optimizer(assembled, AdamWSettings(), CPU)
    for step in range(30):
        result = run_step(assembled, CPU, (row,), rung(), optimizer, 2e-2, step)
    assert result.mean_loss() < 0.05
    said = [11, 12]
    with torch.no_grad():
        for _ in range(5):
            logits: Tensor = assembled.chain.model(input_ids=torch.tensor([said]), use_cache=False).logits
            said.append(int(logits[0, -1].argmax()))
    assert said == ids.tolist()


def test_never_more_than_a_chunk_of_logits() -> None:
    """R06: vocabulary 152,000, 1,024 trained positions: all logits in fp32 would be 594 MiB, a chunk is 9.3 MiB."""
    vocabulary, tokens, chunk = 152_000, 1024, 16
    place = CountingPlace()
    assembled = tuned(tiny_config("llama", vocab_size=vocabulary, max_position_embeddings=2048), place, torch.float32)
    optimizer = make_optimizer(assembled, AdamWSettings(), place)
    example = dataclasses.replace(examples([tokens])[0], trained=np.arange(tokens) > 0)
    step = rung(recompute=4, chunk=chunk)
    with place.counting() as ledger:
        adopt_model(assembled, place)
        ledger.start_over()
        before = ledger.now
        run_step(assembled, place, (lay_out([example]),), step, optimizer, 0.0, 0)
        train = ledger.peak
        ledger.start_over()
        loss_only(assembled.chain, place, lay_out([example]), chunk)
        evaluate = ledger.peak
    one = chunk * vocabulary * 4
    hidden = tokens * 64 * 4
    assert one <= train.by_category[Category.LOGITS] <= one + 2 * hidden
    assert train.live_bytes - before <= one + 12 * hidden
    assert evaluate.live_bytes - before <= one + 12 * hidden
