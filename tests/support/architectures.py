"""What is to be shown of one architecture: how it is taken apart, and that the chain is the model itself."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import tiny_models
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ajusta.base.errors import ModelError
from ajusta.blocks.recompute import Keep
from ajusta.engine.chain import Chain
from ajusta.engine.masks import block_diagonal_mask
from ajusta.engine.probe import probe
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.place import CountingPlace, Place, RealPlace

TOKENS = 11  # longer than the tiny models' attention windows of 8
TOO_BIG = 100_000_000  # parameters


@dataclass(kw_only=True)
class Verdict:
    """The findings on one type; differences are relative to the largest value."""

    kind: str
    path: str | None = None
    blocks: int = 0
    classes: list[str] = field(default_factory=list)
    epilogue: list[str] = field(default_factory=list)
    needs_mask: bool = False
    mixes: str | None = None
    replayed: bool = False  # logits equal to the model's own, bit for bit
    subset: float = float("inf")  # epilogue on some positions against the same positions of all
    gradient: float = float("inf")  # d loss / d first hidden state, islands against one graph
    stock: float = float("inf")  # logits against the untouched model with its eager attention and its own mask
    probed: bool = False  # engine/probe.py lets it through
    meta: bool = False
    why: str = ""

    @property
    def straight(self) -> bool:
        """A chain of several blocks, replayed bit-equal."""
        return self.path is not None and self.replayed and self.subset < 1e-5

    def line(self) -> str:
        """One line for the log."""
        state = "chain" if self.straight else "whole" if self.replayed else "none "
        shape = f"{self.path} x {self.blocks} {'/'.join(self.classes)} -> {'+'.join(self.epilogue)}"
        notes = [
            self.why,
            "" if self.probed else "refused by the probe",
            "ready mask" if self.needs_mask else "",
            f"mixes: {self.mixes}" if self.mixes else "",
        ]
        figures = f"subset {self.subset:.0e} gradient {self.gradient:.0e} stock {self.stock:.0e}"
        meta, said = "meta" if self.meta else "----", "; ".join(filter(None, notes))
        return f"{self.kind}: {state} {meta} {shape} [{figures}] {said}"


def stock_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Return the untouched model with eager attention and random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=dtype)
    vars(model.config)["pad_token_id"] = None  # no token of the tests is padding
    return model.eval().requires_grad_(False)


def real_chain(stock: PreTrainedModel, config: PretrainedConfig) -> Chain:
    """Return the chain of the same weights, copied name by name."""
    torch.manual_seed(0)
    skeleton = build_skeleton(config, stock.dtype, device="cpu")
    with torch.no_grad():
        for name, parameter in stock.named_parameters(remove_duplicate=False):
            slot = skeleton.slots[name]
            slot.holder.get_parameter(slot.leaf).copy_(parameter)
    return skeleton.chain


def inputs(chain: Chain, place: Place, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ids, positions and, where it is needed, the mask of one example."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, tiny_models.VOCABULARY - 3, (tokens,), generator=generator).to(place.device)
    mask = block_diagonal_mask((tokens,), chain.dtype, place) if chain.needs_mask else None
    return ids, torch.arange(tokens, device=place.device), mask


def to_logits(chain: Chain, hidden: Tensor) -> Tensor:
    """Do what the family does from the last hidden state to the logits."""
    return chain.logits.apply(chain.head(chain.finish(hidden)))


def last_hidden(chain: Chain, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
    """Replay prelude and blocks."""
    with torch.no_grad():
        hidden, calls = chain.prelude(ids, positions, mask)
        for index, call in enumerate(calls):
            hidden = chain.run_block(index, hidden, call)
    return hidden


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max())


def gradient_by_islands(chain: Chain, ids: Tensor, positions: Tensor, mask: Tensor | None, weights: Tensor) -> Tensor:
    """Return d sum(weights * logits) / d first hidden state, carried from island to island."""
    with torch.no_grad():
        hidden, calls = chain.prelude(ids, positions, mask)
    islands = []
    for index, call in enumerate(calls):
        islands.append(Keep().forward(chain.runner(index, call), hidden, wants_grad=True))
        hidden = islands[-1].output
    end = hidden.detach().requires_grad_(True)
    with torch.enable_grad():
        torch.autograd.backward(to_logits(chain, end), weights)
    grad = end.grad
    while islands:
        assert grad is not None
        grad = islands.pop().backward(grad)
    assert grad is not None
    return grad


def gradient_of_model(chain: Chain, ids: Tensor, positions: Tensor, mask: Tensor | None, weights: Tensor) -> Tensor:
    """Return the same by one graph through the model's own forward."""
    leaf: list[Tensor] = []

    def cut(module: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> object:
        leaf.append((args[0] if args else kwargs["hidden_states"]).detach().requires_grad_(True))
        return ((leaf[0], *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": leaf[0]})

    assert chain.block_path is not None
    first = chain.model.get_submodule(chain.block_path)[0]
    handle = first.register_forward_pre_hook(cut, with_kwargs=True)
    try:
        with torch.enable_grad():
            torch.autograd.backward(chain.model(**chain.inputs(ids, positions, mask)).logits, weights)
    finally:
        handle.remove()
    assert leaf[0].grad is not None
    return leaf[0].grad


def judge(kind: str) -> Verdict:
    """Find out everything about one type."""
    verdict = Verdict(kind=kind)
    try:
        config = tiny_models.tiny_config(kind)
        verdict.meta = runs_on_meta(config)
        _judge_real(verdict, config)
    except Exception as error:  # foreign code raises what it likes: the type is reported, the count decides
        verdict.why = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return verdict


def _judge_real(verdict: Verdict, config: PretrainedConfig) -> None:
    place = RealPlace("cpu")
    with torch.device("meta"):
        size = tiny_models.numel(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    if size > TOO_BIG:
        raise ModelError(f"the tiny configuration still has {size / 1e6:.0f} million parameters")
    stock = stock_model(config)
    chain = real_chain(stock, config)
    verdict.path, verdict.blocks, verdict.why = chain.block_path, len(chain.blocks), chain.whole_because or ""
    verdict.classes = sorted({type(block).__name__ for block in chain.blocks})
    own_forward = ["the model's own forward"] if chain.ends_by_forward else []
    verdict.epilogue = [type(module).__name__ for module in chain.epilogue] or own_forward
    verdict.needs_mask = chain.needs_mask
    found = probe(chain, place, tiny_models.VOCABULARY)
    verdict.mixes, verdict.probed = chain.mixes_because, found.replay_equal and found.causal
    ids, positions, mask = inputs(chain, place, min(TOKENS, chain.exact_up_to or TOKENS))
    with torch.no_grad():
        own = chain.model(**chain.inputs(ids, positions, mask)).logits
        hidden = last_hidden(chain, ids, positions, mask)
        logits = to_logits(chain, hidden)
        verdict.replayed = torch.equal(logits, own)
        at = torch.tensor([0, 3, len(ids) - 1])
        verdict.subset = _relative(to_logits(chain, hidden[0].index_select(0, at)), logits[0][at])
        verdict.stock = _relative(logits, stock(input_ids=ids[None], use_cache=False).logits)
    if chain.block_path is not None:
        weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(2))
        by_islands = gradient_by_islands(chain, ids, positions, mask, weights)
        verdict.gradient = _relative(by_islands, gradient_of_model(chain, ids, positions, mask, weights))


def runs_on_meta(config: PretrainedConfig) -> bool:
    """Whether the chain runs forward and backward without bytes, in fp32 or, where experts refuse it, in bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        try:
            chain = build_skeleton(config, dtype).chain
            ids, positions, mask = inputs(chain, CountingPlace())
            if chain.block_path is None:
                weight = chain.model.get_input_embeddings().get_parameter("weight").requires_grad_(True)
                with torch.enable_grad():
                    chain.model(**chain.inputs(ids, positions, mask)).logits.sum().backward()
                return weight.grad is not None
            hidden = last_hidden(chain, ids, positions, mask)
            weights = torch.empty_like(to_logits(chain, hidden))
            return gradient_by_islands(chain, ids, positions, mask, weights).device.type == "meta"
        except (ModelError, RuntimeError):
            continue
    return False
