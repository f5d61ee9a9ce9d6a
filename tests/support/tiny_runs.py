"""Tiny models on disk with a byte-level tokenizer, a little data for them, and a run of a second."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ajusta.base.events import Event, Saved
from ajusta.run import finetune
from ajusta.spec.config import Config, load_config
from ajusta.spec.record import Record

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
DECODER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "qwen3": DECODER | {"head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.1},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.1},
}
FAST: dict[str, Any] = {  # one rung, one dtype: nothing has to be found out
    "dtype": "fp32", "gradient_checkpointing": 0, "micro_batch": 2, "batch_size": 2, "max_length": 96, "steps": 6,
    "save_every": 2, "optimizer.learning_rate": 5e-3, "text.heldout_fraction": 0.2, "lora.r": 4, "seed": 3,
}  # fmt: skip


class Killed(BaseException):
    """Stands for SIGKILL inside one process: nothing that the code does can stop it."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a byte, with ChatML."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL), special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def write_model(folder: Path, kind: str = "llama", **over: Any) -> Path:
    """Write a tiny random model in a way that any reader opens."""
    tokenizer = byte_tokenizer()
    ids = {"bos_token_id": 0, "eos_token_id": 3, "pad_token_id": 3, "vocab_size": len(tokenizer)}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **KINDS.get(kind, {}) | ids | over), dtype=torch.float32
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_data(folder: Path) -> Path:
    """Write documents and conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(3):
        text = f"The tarn number {number} lies north of the mill, and the ferry crosses it.\n" * (1 + number)
        (folder / f"tarn {number}.txt").write_text(text, encoding="utf-8")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Where is key {number}?"},
                {"role": "assistant", "content": f"In drawer {number}."},
            ]
        }
        for number in range(8)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "keys.jsonl").write_text(lines, encoding="utf-8")
    return folder


def write_exam(file: Path) -> Path:
    """Write two questions."""
    lines = [{"question": "Where is the third key?", "answer": "drawer"}, {"question": "Who?", "answer": ["a", "b"]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def settings(model: Path, data: Path, out: Path, **over: Any) -> Config:
    """Return the settings of a run of a second; `lora__r` means `lora.r`."""
    given = {**FAST, "model": str(model), "data": [str(data)], "out": str(out)}
    given |= {name.replace("__", "."): value for name, value in over.items()}
    return load_config(overrides={name: value for name, value in given.items() if value is not None})


def flags(config_of: dict[str, Any]) -> list[str]:
    """Return settings as the words of a command line."""
    return [word for name, value in config_of.items() for word in ("--set", f"{name}={value}")]


def kill_at_save(number: int) -> Callable[[Event], None]:
    """Return a listener that kills the run as soon as the checkpoint `number` is there."""
    seen: list[Saved] = []

    def listen(event: Event) -> None:
        if isinstance(event, Saved) and event.kind == "checkpoint":
            seen.append(event)
            if len(seen) == number:
                raise Killed

    return listen


def killed(config: Config, listener: Callable[[Event], None], *, resume: bool = False) -> None:
    """Run until the listener kills it."""
    try:
        finetune(config, listener, resume=resume)
    except Killed:
        return
    raise AssertionError("the run came to its end")


def adapter_bytes(run: Path) -> bytes:
    """Return the tensors of a run's adapter as they lie on disk."""
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


def adapter_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's adapter."""
    return load_file(run / "adapter" / "adapter_model.safetensors")


def tune(config: Config, *, resume: bool = False) -> tuple[Record, list[Event]]:
    """Run, and return what was told."""
    told: list[Event] = []
    return finetune(config, told.append, resume=resume), told
