"""A tiny model assembled by ajusta beside the same model in stock transformers + PEFT, and examples for both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tiny_models
import torch
from architectures import stock_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW
from ajusta.blocks.recompute import Policy
from ajusta.engine.assemble import AdapterSpec, Assembled, assemble
from ajusta.engine.skeleton import build_skeleton
from ajusta.engine.step import StepPlan, accumulate
from ajusta.engine.weights_base import TensorInfo
from ajusta.memory.place import Place, RealPlace
from ajusta.spec.data import Example, MicroBatch

RANK, ALPHA = 4, 8.0


class ModelSource:
    """A model in memory as a source of weights."""

    reference = "a model in memory"

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors = model.state_dict(keep_vars=True)
        self.config: PretrainedConfig = model.config

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(shape=tuple(t.shape), dtype=t.dtype, stored_bytes=t.nbytes)
            for name, t in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach().clone()

    def content_hash(self) -> str:
        return "none"


def examples(lengths: Sequence[int], seed: int = 0) -> list[Example]:
    """Return random examples of which about two thirds of the tokens are trained, the last one always."""
    chance = np.random.default_rng(seed)
    made = []
    for number, length in enumerate(lengths):
        trained = chance.random(length) < 0.67
        trained[0], trained[-1] = False, True
        ids = chance.integers(3, tiny_models.VOCABULARY - 3, length)
        made.append(Example(ids=ids, trained=trained, source=f"made:{number}", example_id=number))
    return made


def tuned(
    stock: PreTrainedModel | PretrainedConfig,
    place: Place | None = None,
    dtype: torch.dtype = torch.float64,
    bits: str = "none",
    dropout: float = 0.0,
) -> Assembled:
    """Assemble the stock model's weights with LoRA on every linear, B random; a configuration alone is for `meta`."""
    adapter = AdapterSpec(rank=RANK, alpha=ALPHA, dropout=dropout, dtype=dtype)
    source = ModelSource(stock) if isinstance(stock, PreTrainedModel) else None
    config = stock.config if isinstance(stock, PreTrainedModel) else stock
    assembled = assemble(
        build_skeleton(config, dtype), source, place or RealPlace("cpu"),
        dtype=dtype, bits=bits, adapter=adapter,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in assembled.adapters.values():
            values = torch.randn(layer.lora_B.shape, generator=generator, dtype=torch.float64) * 0.05
            layer.lora_B.copy_(values.to(dtype))
    return assembled


def with_peft(kind: str, assembled: Assembled, stock: PreTrainedModel) -> PeftModel:
    """Put PEFT's adapters on the stock model and give them the values of ours."""
    settings = LoraConfig(
        r=RANK, lora_alpha=ALPHA, use_rslora=True, target_modules=list(assembled.adapters), lora_dropout=0.0,
        fan_in_fan_out=kind == "gpt2",
    )  # fmt: skip
    model = get_peft_model(stock, settings, autocast_adapter_dtype=False)
    with torch.no_grad():
        for path, layer in assembled.adapters.items():
            theirs = model.get_submodule(f"base_model.model.{path}")
            theirs.lora_A["default"].weight.copy_(layer.lora_A)
            theirs.lora_B["default"].weight.copy_(layer.lora_B)
    return model


def stock_gradients(model: PeftModel, made: Sequence[Example], paths: Iterable[str]) -> dict[str, Tensor]:
    """Return the gradient of the summed cross-entropy, one example at a time, by stock code from end to end."""
    for example in made:
        ids = torch.from_numpy(example.ids)
        at = torch.from_numpy(example.trained[1:].nonzero()[0])
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        torch.nn.functional.cross_entropy(logits[at].double(), ids[1:][at], reduction="sum").backward()
    found = {}
    for path in paths:
        layer = model.get_submodule(f"base_model.model.{path}")
        found[f"{path}.A"] = layer.lora_A["default"].weight.grad.clone()
        found[f"{path}.B"] = layer.lora_B["default"].weight.grad.clone()
    return found


def our_gradients(
    assembled: Assembled, batches: Sequence[MicroBatch], policy: Policy, loss_chunk: int = 1000, step: int = 0
) -> dict[str, Tensor]:
    """Return the same by the chain step."""
    place = RealPlace("cpu")
    FlatAdamW(assembled.parameters(), AdamWSettings(), place)  # gives each parameter a zero gradient
    plan = StepPlan(policies=(policy,) * len(assembled.chain.blocks), loss_chunk=loss_chunk)
    for batch in batches:
        accumulate(assembled.chain, place, batch, plan, step)
    found = {}
    for path, layer in assembled.adapters.items():
        assert layer.lora_A.grad is not None and layer.lora_B.grad is not None
        found[f"{path}.A"], found[f"{path}.B"] = layer.lora_A.grad.clone(), layer.lora_B.grad.clone()
    return found


def stock_and_config(kind: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PretrainedConfig]:
    """Return the untouched model of one kind and its configuration."""
    config = tiny_models.tiny_config(kind)
    return stock_model(config, dtype), config
