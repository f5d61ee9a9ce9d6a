"""What both sides read, made once: the book as token ids, the weights as safetensors, the adapter as PEFT writes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import ours
import torch
from book import text
from measures import ALPHA, RANK, Case, Rung
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ajusta.data.gguf_tokenizer import tokenizer_from_gguf
from ajusta.engine.weights import GgufSource, open_weights
from ajusta.memory.dtypes import DTYPES
from ajusta.memory.ledger import Category
from ajusta.planning.search import Request, search
from ajusta.planning.trace import Subject
from ajusta.spec.device import Device, Machine
from ajusta.spec.speeds import typical_processor

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_CHARACTERS_PER_TOKEN = 8  # more than English has, so that the text never ends early
# There before the step on both sides; what a step takes above them is compared.
_STANDING = (Category.BASE, Category.QUANTIZATION, Category.ADAPTERS, Category.OPTIMIZER)


def make(gguf: Path, folder: Path, num_tokens: int) -> str:
    """Write `model/`, `adapter/` and `ids.npy` (at least `num_tokens`) into `folder`; return where the text is from."""
    source = open_weights(gguf)
    assert isinstance(source, GgufSource)
    model = folder / "model"
    model.mkdir()
    source.config.save_pretrained(model)
    tensors = {name: source.read(name).float().contiguous() for name in source.infos}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    _make_adapter(model, folder / "adapter")
    found, origin = text(num_tokens * _CHARACTERS_PER_TOKEN)
    tokenizer = tokenizer_from_gguf(source.metadata, str(gguf))
    ids = tokenizer(found[: num_tokens * _CHARACTERS_PER_TOKEN], add_special_tokens=False)["input_ids"]
    assert len(ids) >= num_tokens
    np.save(folder / "ids.npy", np.asarray(ids[:num_tokens], dtype=np.int64))
    return origin


def _make_adapter(model: Path, folder: Path) -> None:
    """Let PEFT draw and write the initial adapter: A random, B zero, alpha / r."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0, task_type="CAUSAL_LM")
    get_peft_model(base, config).save_pretrained(folder)


def plan(gguf: Path, case: Case) -> Rung:
    """Let ajusta's own planner say how its step runs at this size, and what the step takes above what stands."""
    source = open_weights(gguf)
    micro = ours.one_example(np.zeros(case.tokens, dtype=np.int64))
    device = Device(kind="cpu", name="", total_bytes=1 << 40, free_bytes=1 << 40, cpu_threads=1, dtypes=(case.dtype,))
    found = search(
        Request(
            subject=Subject(
                config=source.config,
                source=source,
                dtype=DTYPES[case.dtype],
                bits=case.bits,
                adapter=ours.adapter_spec(),
                optimizer=ours.optimizer_settings(),
            ),
            batches=lambda tokens: (micro,),
            fullest=lambda tokens: micro,
            measured=lambda tokens: micro,
            step_tokens=case.tokens,
            longest=case.tokens,
            machine=Machine(
                device=device,
                dtype=case.dtype,
                dtype_because="",
                budget_bytes=1 << 40,
                budget_because="",
                roofline=typical_processor(1),
            ),
            recompute={"keep": "none", "full": "full"}[case.checkpointing],
            micro_tokens=case.tokens,
        )
    )
    step = next(phase for phase in found.phases if phase.phase == "train")
    planned = sum(size for category, size in step.by_category.items() if category not in _STANDING)
    return Rung(recompute_blocks=found.rung.recompute_blocks, loss_chunk=found.rung.loss_chunk, planned_bytes=planned)
