"""Tokenizers built here: a byte-level BPE trained on the tests' own text, with chat templates of several habits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>"]
TEXT = """The tarn lies in the north of the valley, and the ferry crosses it in the morning. In 1846 the mill burned.
User: Where is the mill? Assistant: It is by the river. By the river. The answer is 46.
system user assistant tool question answer
Señora Peña guarda la llave del molino; el año 1846 fue frío. Hello there, how are you today? I am fine, thank you."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
STRIPPING = (  # as Qwen3: reasoning stays in the last turn only
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if '</think>' in c and not loop.last %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORCED = (  # as DeepSeek-R1: the prompt opens a thought that the rendered turn does not have
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
PRINTS_BOS = "{{ bos_token }}" + CHATML
OPEN_END = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
SPACED = (  # the prompt ends with a space that a byte-level tokenizer would join to the answer
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT_ARGUMENTS = TOOLS.replace("(call.function.arguments | tojson)", "call.function.arguments")
TEMPLATES = {
    "chatml": CHATML,
    "strict": STRICT,
    "stripping": STRIPPING,
    "forced": FORCED,
    "prints_bos": PRINTS_BOS,
    "open_end": OPEN_END,
    "spaced": SPACED,
    "tools": TOOLS,
    "text_arguments": TEXT_ARGUMENTS,
    "none": None,
}

Maker = Callable[..., PreTrainedTokenizerFast]


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def _sentencepiece_like() -> Tokenizer:
    """A BPE that puts a mark for a space before each text, as Llama 2's does."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("\n", "^")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator([TEXT.replace("\n", "^ ^")] * 4, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def trained_tokenizers() -> dict[str, str]:
    """The two tokenizers, trained once, as JSON."""
    return {"byte_level": _byte_level().to_str(), "sentencepiece": _sentencepiece_like().to_str()}


@pytest.fixture
def make_tokenizer(trained_tokenizers: dict[str, str]) -> Maker:
    """Build a tokenizer by the name of its template; `adds_bos` makes the tokenizer put <s> first by itself."""

    def make(
        template: str = "chatml", *, adds_bos: bool = False, eos: str | None = "<|im_end|>", kind: str = "byte_level"
    ) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_str(trained_tokenizers[kind])
        if adds_bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
            )
        more: dict[str, Any] = {} if eos is None else {"eos_token": eos, "pad_token": eos}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", **more)
        tokenizer.chat_template = TEMPLATES[template]
        return tokenizer

    return make
