"""A GGUF file's tokenizer, rebuilt as the fast tokenizer that its model was trained with.

Two kinds are read. `gpt2`: byte-level BPE; the file names how text is cut into words before merging
(`tokenizer.ggml.pre`), and a wrong cut gives other ids in silence: SmolLM2 splits numbers into digits ("2026" is four
tokens), GPT-2 does not. So an unknown name is refused. `llama`: SentencePiece BPE with scores; merges are recovered
from the scores, bytes are the fall-back. Names and cuts: llama.cpp, src/llama-vocab.cpp; patterns as in the models' own
tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ajusta.base.errors import ModelError, nearest

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type; 1 is normal, 6 a byte

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The escapes are the ellipsis, and the full stops and commas of Chinese, Hindi, Urdu and Arabic.
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """How text is cut before merging: `patterns` one after the other, each match a piece of its own."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is in the vocabulary is taken whole, merges or not
    add_bos: bool = False  # where the file does not say
    compose: bool = False  # Unicode NFC first


_DIGITS = _Cut(patterns=(r"\p{N}", _GPT2))
_PLAIN = _Cut(patterns=(_GPT2,))
_CUTS: dict[str, _Cut] = {
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "olmo": _PLAIN,
    "mpt": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _Cut(patterns=(_LLAMA3,), whole_words=True, add_bos=True),
    "llama3": _Cut(patterns=(_LLAMA3,), whole_words=True, add_bos=True),
    "llama-v3": _Cut(patterns=(_LLAMA3,), whole_words=True, add_bos=True),
    "qwen2": _Cut(patterns=(_QWEN2,), compose=True),
    "deepseek-r1-qwen": _Cut(patterns=(_QWEN2,)),
    "qwen35": _Cut(patterns=(_QWEN35,), compose=True),
    "bloom": _Cut(patterns=(_BLOOM,)),
    "default": _Cut(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
SUPPORTED_CUTS = tuple(_CUTS)


def tokenizer_from_gguf(metadata: Mapping[str, object], where: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer described by a GGUF file's metadata, special tokens and chat template included.

    Args:
        metadata: GGUF keys with plain values (`GgufSource.metadata`).
        where: the file, for messages.

    Raises:
        ModelError: no tokenizer in the file, a kind or cut that is not known, tables that do not belong together.
    """
    tokens = _strings(metadata, "tokenizer.ggml.tokens", where)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens, where)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens, where), True
    else:
        raise ModelError(
            f"{where} has the tokenizer kind {kind!r}; expected gpt2 or llama; use the model's safetensors folder "
            f"instead"
        )
    tokenizer.add_special_tokens(_added(metadata, tokens, special=True))
    tokenizer.add_tokens(_added(metadata, tokens, special=False))
    named = {
        f"{ours}_token": _token(metadata, theirs, tokens)
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    _add_ends(tokenizer, metadata, named, add_bos)
    template = metadata.get("tokenizer.chat_template")
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **({"model_max_length": context} if isinstance(context, int) else {}),
        **{name: token for name, token in named.items() if token is not None},
    )
    if isinstance(template, str):
        fast.chat_template = template
    return fast


def _byte_level(metadata: Mapping[str, object], tokens: Sequence[str], where: str) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    cut = _CUTS.get(str(name))
    if cut is None:
        raise ModelError(
            f"{where} cuts text into words by the rule {name!r} (tokenizer.ggml.pre), which is not known here"
            f"{nearest(str(name), _CUTS)}; expected one of {', '.join(_CUTS)}; use the model's safetensors folder "
            f"instead"
        )
    vocabulary = {token: index for index, token in reversed(list(enumerate(tokens)))}  # of twins, the first one
    merges = _merges(_strings(metadata, "tokenizer.ggml.merges", where), vocabulary, where)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.whole_words))
    if cut.compose:
        tokenizer.normalizer = normalizers.NFC()
    pieces = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pieces, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.add_bos


def _merges(lines: Sequence[str], vocabulary: Mapping[str, int], where: str) -> list[tuple[str, str]]:
    pairs = []
    for line in lines:
        at = line.find(" ", 1)  # a piece is never empty, so the first letter is no separator
        left, right = line[:at], line[at + 1 :]
        if at < 1 or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError(f"{where}: the merge {line!r} makes no token of the vocabulary; fetch the file again")
        pairs.append((left, right))
    return pairs


def _sentencepiece(metadata: Mapping[str, object], tokens: Sequence[str], where: str) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{where} has no score for each of its {len(tokens)} tokens; expected a SentencePiece table")
    kinds = _kinds(metadata, tokens)
    vocabulary = {token: index for index, token in reversed(list(enumerate(tokens)))}
    # Only real pieces merge: control and user-defined tokens are found in the raw text, unused ones never.
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in (_UNKNOWN, _CONTROL, _UNUSED)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_from_scores(normal, vocabulary, scores)
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    space = "\u2581"
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    spaces = normalizers.Replace(" ", space)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), spaces]) if prefix else spaces
    decoder = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoder, decoders.Strip(content=" ", left=1)] if prefix else decoder)
    return tokenizer


def _merges_from_scores(
    pieces: set[str], vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return every cut of every piece into two pieces, the best scored piece first: SentencePiece's own order."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece in pieces:
        score = -scores[vocabulary[piece]]
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in pieces and right in pieces:
                ranked.append((score, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _added(metadata: Mapping[str, object], tokens: Sequence[str], *, special: bool) -> list[AddedToken]:
    wanted = (_UNKNOWN, _CONTROL) if special else (_USER_DEFINED,)
    kinds = _kinds(metadata, tokens)
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in wanted and token
    ]


def _add_ends(
    tokenizer: Tokenizer, metadata: Mapping[str, object], named: Mapping[str, str | None], add_bos: bool
) -> None:
    """Put the begin and end tokens around a text, where the file wants them."""
    bos, eos = named["bos_token"], named["eos_token"]
    with_bos = bos if metadata.get("tokenizer.ggml.add_bos_token", add_bos) is True else None
    with_eos = eos if metadata.get("tokenizer.ggml.add_eos_token", False) is True else None
    ends = {token: tokenizer.token_to_id(token) for token in (with_bos, with_eos) if token is not None}
    if not ends:
        return
    one = [part for part in (with_bos, "$A", with_eos) if part is not None]
    pair = one + ["$B:1" if part == "$A" else f"{part}:1" for part in one]
    tokenizer.post_processor = processors.TemplateProcessing(single=one, pair=pair, special_tokens=list(ends.items()))


def _kinds(metadata: Mapping[str, object], tokens: Sequence[str]) -> Sequence[int]:
    kinds = metadata.get("tokenizer.ggml.token_type")
    return kinds if isinstance(kinds, list) and len(kinds) == len(tokens) else [1] * len(tokens)


def _token(metadata: Mapping[str, object], name: str, tokens: Sequence[str]) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _strings(metadata: Mapping[str, object], key: str, where: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise ModelError(
            f"{where} has no {key}; expected a model with its tokenizer; use the model's safetensors folder"
        )
    return values
