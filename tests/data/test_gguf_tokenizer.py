"""Tiny vocabularies always; the demo model's against ids recorded from llama.cpp where the model is at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from ajusta.base.errors import ModelError
from ajusta.data.gguf_tokenizer import SUPPORTED_CUTS, tokenizer_from_gguf
from ajusta.data.tokenizer import load_tokenizer, save_tokenizer
from ajusta.engine.gguf_header import read_header

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
ALPHABET = sorted(ByteLevel.alphabet())
TEXTS = [
    "In 2026 it's   here.\n\n  x\t= 3.14",
    "\u00bfD\u00f3nde est\u00e1? \u00a1All\u00ed! \U0001f389\U0001f44d\U0001f3fd",
    "DON'T 1,234,567 e\u0301 \u00e9",
    "",
    " ",
    "a\n",
]
PROSE = (
    "Hello world, it's 12345 in 2026!\n\n"
    "new line: caf\u00e9 \u2014 \ufb01n \u4f60\u597d\uff0c\u4e16\u754c\u3002 \u043c\u0438\u0440"
)


def byte_level(pre: str | None, extra: list[str] = (), merges: list[str] = (), **more) -> dict:
    specials = ["<|end|>", "<|user|>"]
    tokens = [*specials, *ALPHABET, *extra]
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 2048,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, USER, *[NORMAL] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": list(merges) or ["\u0120 \u0120"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    if not merges:
        tokens.append("\u0120\u0120")
        metadata["tokenizer.ggml.token_type"].append(NORMAL)
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | {key.replace("__", "."): value for key, value in more.items()}


def digits(pre: str) -> dict:
    return byte_level(pre, extra=["20", "26", "2026", "202"], merges=["2 0", "2 6", "20 26", "20 2"])


def words(pre: str, text: str) -> list[str]:
    """The pieces that text is cut into before merging."""
    tokenizer = tokenizer_from_gguf(byte_level(pre), "f").backend_tokenizer
    return [text[start:stop] for _, (start, stop) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_a_year_is_four_tokens_where_the_model_splits_digits_and_one_where_not():
    assert tokenizer_from_gguf(digits("smollm"), "f").tokenize("2026") == ["2", "0", "2", "6"]
    assert tokenizer_from_gguf(digits("gpt-2"), "f").tokenize("2026") == ["2026"]
    assert tokenizer_from_gguf(digits("llama-bpe"), "f").tokenize("2026") == ["202", "6"]
    assert tokenizer_from_gguf(digits("qwen2"), "f").tokenize("2026") == ["2", "0", "2", "6"]
    assert tokenizer_from_gguf(digits("bloom"), "f").tokenize("2026") == ["2026"]


def test_each_rule_cuts_as_its_model_was_trained():
    assert words("gpt-2", "it's 12345!\n\n x") == ["it", "'s", " 12345", "!", "\n\n", " x"]
    assert words("smollm", "it's 123!") == ["it", "'s", " ", "1", "2", "3", "!"]
    assert words("llama-bpe", "IT'S 12345!\n\n x") == ["IT", "'S", " ", "123", "45", "!\n\n", " x"]
    assert words("qwen2", "IT'S 12!\n x") == ["IT", "'S", " ", "1", "2", "!\n", " x"]
    assert words("bloom", "Hola, mundo. (x)") == ["Hola", ",", " mundo", ". (", "x", ")"]


@pytest.mark.parametrize("pre", SUPPORTED_CUTS)
def test_no_rule_loses_a_letter(pre):
    tokenizer = tokenizer_from_gguf(byte_level(pre), "f")
    for text in (*TEXTS, PROSE):
        expected = (
            text.replace("e\u0301", "\u00e9") if pre in ("qwen2", "qwen35") else text
        )  # these compose letters first
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == expected


def test_special_tokens_template_and_length_are_restored():
    metadata = byte_level(
        "gpt-2", **{"tokenizer__chat_template": "{{ messages }}", "tokenizer__ggml__padding_token_id": 0}
    )
    tokenizer = tokenizer_from_gguf(metadata, "f")
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|end|>", "<|end|>", None)
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.model_max_length == 2048
    assert tokenizer.encode("a<|end|>b<|user|>") == [tokenizer.vocab["a"], 0, tokenizer.vocab["b"], 1]
    assert tokenizer.decode([0, 1], skip_special_tokens=True) == "<|user|>"  # user-defined is no control token
    assert tokenizer.decode(tokenizer.encode("a , b .")) == "a , b ."  # no clean-up of spaces


def test_begin_and_end_tokens_go_where_the_file_says():
    ids = {"tokenizer__ggml__bos_token_id": 1}
    a = 2 + ALPHABET.index("a")
    assert tokenizer_from_gguf(byte_level("gpt-2", **ids), "f").encode("a") == [a]
    assert tokenizer_from_gguf(byte_level("llama-bpe", **ids), "f").encode("a") == [1, a]  # this family's default
    for begin in (True, False):
        for end in (True, False):
            more = ids | {"tokenizer__ggml__add_bos_token": begin, "tokenizer__ggml__add_eos_token": end}
            tokenizer = tokenizer_from_gguf(byte_level("gpt-2", **more), "f")
            around = ([1] * begin, [0] * end)
            assert tokenizer.encode("a") == [*around[0], a, *around[1]]
            assert tokenizer.encode("a", "a") == [*around[0], a, *around[1]] * 2
            assert tokenizer.encode("a", add_special_tokens=False) == [a]


def test_it_survives_saving_and_loading(tmp_path):
    metadata = digits("smollm") | {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    tokenizer = tokenizer_from_gguf(metadata, "f")
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    for text in (*TEXTS, PROSE):
        assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.chat_template == tokenizer.chat_template


def sentencepiece(**more) -> dict:
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{value:02X}>", 0.0, BYTE) for value in range(256)]
    merged = ["\u2581a", "ab", "\u2581ab", "bc"]
    pieces += [(piece, -float(rank), NORMAL) for rank, piece in enumerate(merged)]
    pieces += [(letter, -100.0, NORMAL) for letter in "\u2581abc"]
    pieces += [("<tool>", -1000.0, USER)]
    tokens, scores, kinds = zip(*pieces, strict=True)
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": list(kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {key.replace("__", "."): value for key, value in more.items()}


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes():
    tokenizer = tokenizer_from_gguf(sentencepiece(), "f")
    assert tokenizer.tokenize("abc") == ["\u2581ab", "c"]  # "\u2581a", then "\u2581ab" before "bc": by score
    assert tokenizer.tokenize("cbc") == ["\u2581", "c", "bc"]
    assert tokenizer.tokenize("\u00e9") == ["\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("a") == [1, tokenizer.vocab["\u2581a"]]
    for text in ("abc", " abc  \u00e9\n\U0001f389 ", "a<tool>b"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")
    assert tokenizer.decode(tokenizer.encode("ab c  \u00e9", add_special_tokens=False)) == "ab c  \u00e9"


def test_sentencepiece_without_the_space_in_front():
    tokenizer = tokenizer_from_gguf(sentencepiece(tokenizer__ggml__add_space_prefix=False), "f")
    assert tokenizer.tokenize("ab") == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab", add_special_tokens=False)) == " ab"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "gpt2"}, "by the rule 'gpt2'.*did you mean 'gpt-2'.*expected one of gpt-2"),
        ({"tokenizer.ggml.pre": None}, "by the rule None"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer kind 'bert'; expected gpt2 or llama"),
        ({"tokenizer.ggml.model": "llama"}, "no score for each of its 259 tokens"),
        ({"tokenizer.ggml.merges": ["a b"]}, "the merge 'a b' makes no token"),
        ({"tokenizer.ggml.merges": ["ab"]}, "the merge 'ab' makes no token"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": [1]}, "no tokenizer.ggml.merges"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(change, message):
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(byte_level("gpt-2") | change, "f")


def demo_model() -> Path | None:
    """The demo model's file: AJUSTA_DEMO_MODEL, or where `make demo` puts it."""
    named = os.environ.get("AJUSTA_DEMO_MODEL")
    found = [Path(named)] if named else sorted(Path(__file__).parents[2].glob("demo/model/*.gguf"))
    return found[0] if found and found[0].is_file() else None


@pytest.mark.slow
def test_the_demo_model_s_ids_are_llama_cpp_s():
    path = demo_model()
    if path is None:
        pytest.fail("no demo model: run `make demo`, or set AJUSTA_DEMO_MODEL to SmolLM2-135M-Instruct.Q4_1.gguf")
    recorded = json.loads((Path(__file__).parent / "smollm_ids.json").read_text())
    tokenizer = tokenizer_from_gguf(read_header(path).metadata, str(path))
    assert len(recorded["rows"]) >= 20
    for row in recorded["rows"]:
        assert tokenizer.encode(row["text"]) == row["ids"], row["text"]
        assert tokenizer.decode(row["ids"]) == row["text"]
    assert len(tokenizer.encode("2026")) == 4
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"
