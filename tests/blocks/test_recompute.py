"""Recompute gives what keep gives, bit for bit, random numbers included, and holds the input only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ajusta.blocks.recompute import Keep, Policy, Recompute
from ajusta.memory.ledger import Category, Ledger

WIDTH, TOKENS = 32, 24
POLICIES = [Keep(), Recompute()]


def block(dropout: float = 0.0, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    )
    return made.to(device)


def chain(policy: Policy, blocks: list[nn.Sequential], wants_grad: bool) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Run three blocks forward and backward; return gradients, the input's gradient and the output."""
    hidden = torch.linspace(-1, 1, TOKENS * WIDTH).sin().view(1, TOKENS, WIDTH)
    for parameter in (p for b in blocks for p in b.parameters()):
        parameter.grad = None
    islands = []
    for index, each in enumerate(blocks):
        islands.append(policy.forward(each, hidden, wants_grad=wants_grad or index > 0))
        hidden = islands[-1].output
    grad: Tensor | None = hidden.cos()
    while islands:
        assert grad is not None
        grad = islands.pop().backward(grad)
    return [p.grad for b in blocks for p in b.parameters() if p.grad is not None], grad, hidden


@pytest.mark.parametrize("wants_grad", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_recompute_is_keep_bit_for_bit(dropout: float, wants_grad: bool) -> None:
    blocks = [block(dropout) for _ in range(3)]
    found = []
    for policy in POLICIES:
        torch.manual_seed(7)
        grads, first, output = chain(policy, blocks, wants_grad)
        found.append((grads, first, output, torch.get_rng_state()))
        assert len(grads) == 3 * 6  # the first block learns although its input wants no gradient
        assert (first is not None) == wants_grad
    (kept, first_kept, out_kept, state_kept), (again, first_again, out_again, state_again) = found
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert torch.equal(out_kept, out_again)
    assert not wants_grad or torch.equal(first_kept, first_again)
    assert torch.equal(state_kept, state_again)  # what is drawn afterwards is the same too


def test_islands_are_one_graph_cut_at_the_blocks() -> None:
    blocks = [block() for _ in range(3)]
    grads, first, output = chain(Keep(), blocks, wants_grad=True)
    start = torch.linspace(-1, 1, TOKENS * WIDTH).sin().view(1, TOKENS, WIDTH).requires_grad_(True)
    for parameter in (p for b in blocks for p in b.parameters()):
        parameter.grad = None
    whole = nn.Sequential(*blocks)(start)
    whole.backward(output.cos())
    assert torch.equal(whole, output) and start.grad is not None and first is not None
    assert torch.equal(start.grad, first)
    expected = [p.grad for b in blocks for p in b.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_the_input_is_not_written_to_and_the_output_has_no_graph() -> None:
    for policy in POLICIES:
        hidden = torch.ones(1, 4, WIDTH)
        island = policy.forward(block(), hidden, wants_grad=True)
        assert not island.output.requires_grad and not hidden.requires_grad
        island.backward(torch.ones_like(hidden))
        assert torch.equal(hidden, torch.ones_like(hidden)) and hidden.grad is None


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_block_without_anything_to_train_hands_the_gradient_on_or_ends(policy: Policy) -> None:
    frozen = block().requires_grad_(False)
    hidden = torch.linspace(0, 1, 4 * WIDTH).view(1, 4, WIDTH)
    wanted = policy.forward(frozen, hidden, wants_grad=True).backward(torch.ones_like(hidden))
    assert wanted is not None and wanted.shape == hidden.shape
    assert policy.forward(frozen, hidden, wants_grad=False).backward(torch.ones_like(hidden)) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_recompute_holds_input_and_output_and_little_else(device: str) -> None:
    held = []
    for policy in POLICIES:
        made = block(device=device)
        hidden = torch.ones(1, TOKENS, WIDTH, device=device)
        with Ledger() as ledger:
            ledger.adopt([*made.parameters(), hidden], Category.BASE)
            before = ledger.now
            island = policy.forward(made, hidden, wants_grad=True)
            held.append(ledger.now - before)
            assert island.output.nbytes == hidden.nbytes
    state = torch.get_rng_state().nbytes
    assert held[1] <= hidden.nbytes + state
    assert held[0] >= 10 * hidden.nbytes  # two inner tensors of four times the width, and more
