"""Side B: untouched transformers + PEFT, with the settings that serve it best here.

SDPA attention, no cache, gradients set to None, torch's fused AdamW, non-reentrant checkpointing. PEFT keeps the
adapters in fp32 over a bf16 base, as ours does. NF4 is bitsandbytes' Linear4bit with double-quantized scales.
"""

from __future__ import annotations

import torch
from measures import RATE, Job
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Stock:
    """The model as `from_pretrained` gives it, with the adapter of the file."""

    def __init__(self, job: Job) -> None:
        dtype = DTYPES[job.case.dtype]
        base = AutoModelForCausalLM.from_pretrained(
            job.folder, dtype=dtype, attn_implementation="sdpa", **_quantization(job.case.bits, dtype)
        )
        if job.case.checkpointing == "full":
            base.gradient_checkpointing_enable({"use_reentrant": False})
        self._model = PeftModel.from_pretrained(base, job.adapter, is_trainable=True).train()
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
        self._chunks = torch.from_numpy(job.chunks())

    def step(self, index: int) -> float:
        """Take one optimizer step on chunk `index`; return its mean loss."""
        ids = self._chunks[index][None]
        loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def held_bytes(self) -> int:
        """Return 0: between steps there are no gradients."""
        return sum(p.grad.nbytes for p in self._model.parameters() if p.grad is not None)


def _quantization(bits: str, dtype: torch.dtype) -> dict[str, object]:
    if bits == "none":
        return {}
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config, "device_map": {"": "cpu"}}


open_trainer = Stock
