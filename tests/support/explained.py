"""An explanation that was made up, with figures that are told apart at a glance."""

from __future__ import annotations

from dataclasses import replace

from ajusta.spec.explanation import BlockMemory, Explanation, Kept, KeptTensor, Level

MIB, GIB = 1 << 20, 1 << 30
TOKENS = 100


def kept(part: str, *sizes: int, operation: str = "aten.mm.default", read_by: tuple[str, ...] = ("mlp",)) -> Kept:
    tensors = tuple(
        KeptTensor(made_in="mlp", operation=operation, read_by=read_by, bytes=size * TOKENS) for size in sizes
    )
    return Kept(part=part, modules=1, tensors=tensors)


def level(technique: str, seconds: float, **sizes: int) -> Level:
    by_category = {name.replace("_", " "): size * MIB for name, size in sizes.items()}
    return Level(
        technique=technique,
        trained=2_500_000,
        bits="none",
        recompute_blocks=0,
        loss_rows=99,
        peak_bytes=sum(by_category.values()),
        operation="aten.mm.default",
        by_category=by_category,
        saved_bytes=300 * MIB,
        recompute_bytes=0,
        logits_bytes=200 * MIB,
        step_seconds=seconds,
        need_bytes=sum(by_category.values()) + 50 * MIB,
        fits=False,
    )


def make_explanation() -> Explanation:
    held = {"gradients": 40, "optimizer_state": 80, "saved_activations": 300, "logits_and_loss": 200}
    lora = level("LoRA", 4.0, base_weights=1000, trained_weights=40, **held)
    coarse = level("quantization", 5.0, base_weights=250, quantization_constants=8, trained_weights=40, **held)
    return Explanation(
        model="some/llama-1b",
        model_type="llama",
        parameters=1_234_567_890,
        blocks=12,
        vocabulary=50_000,
        dtype="bf16",
        rank=16,
        device="a card",
        budget_bytes=GIB,
        step_tokens=800,
        micro_batches=8,
        micro_tokens=TOKENS,
        speeds="data sheet of a card",
        speeds_measured=False,
        block=BlockMemory(
            block="LlamaDecoderLayer",
            alike=12,
            tokens=TOKENS,
            kept=(
                kept("norm", 2304, 4, 2304, 4),
                kept("attention", 1111, operation="aten._scaled_dot_product_flash_attention_for_cpu.default"),
                kept("gated", 6144, 6144),
                kept("adapter", 32, 32, 32),
            ),
            rebuilt_bytes=7777 * TOKENS,
            backward_bytes=8888 * TOKENS,
        ),
        levels=(
            replace(
                level("full fine-tuning", 8.0, trained_weights=1000, gradients=1000, optimizer_state=6000),
                trained=1_234_567_890,
            ),
            lora,
            replace(coarse, bits="nf4", fits=True),
            replace(
                level("gradient checkpointing", 6.5, base_weights=250, trained_weights=40, logits_and_loss=200),
                bits="nf4", recompute_blocks=12, saved_bytes=30 * MIB, recompute_bytes=26 * MIB, fits=True,
            ),
            replace(
                level("chunked loss", 70.0, base_weights=250, trained_weights=40, recompute_window=25),
                bits="nf4", recompute_blocks=12, loss_rows=16, logits_bytes=11 * MIB, fits=True,
            ),
        ),
    )  # fmt: skip
