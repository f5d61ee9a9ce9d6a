"""The opening that a tokenizer puts first, and cuts at the start of answers."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from ajusta.data.tokens import encode, encode_turns, missing_opening, opening_ids

Maker = Callable[..., PreTrainedTokenizerFast]


def test_opening_of_no_one_and_two_tokens(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer()
    assert opening_ids(tokenizer) == ()
    bos, eot = tokenizer.convert_tokens_to_ids(["<s>", "<|eot|>"])
    assert opening_ids(make_tokenizer(adds_bos=True)) == (bos,)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|eot|> <s> $A </s>",
        special_tokens=[(text, tokenizer.convert_tokens_to_ids(text)) for text in ("<|eot|>", "<s>", "</s>")],
    )
    assert opening_ids(tokenizer) == (eot, bos)
    assert missing_opening([eot, bos, 9], (eot, bos)) == ()
    assert missing_opening([9], (eot, bos)) == (eot, bos)
    assert missing_opening([], (bos,)) == (bos,) and missing_opening([9], ()) == ()


def test_text_is_cut_only_where_a_token_straddles_or_the_prompt_differs(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer()
    clean = "user: the mill"
    encoded = encode_turns(tokenizer, clean, [5])
    assert encoded.ids == encode(tokenizer, clean) and encoded.ids[: encoded.starts[0]] == encode(tokenizer, "user:")
    for text, boundary in (("user: the mill", 6), ("user: the mill", 8), ("a \nb", 3), ("a  b", 2)):
        encoded = encode_turns(tokenizer, text, [boundary])
        assert encoded.ids[: encoded.starts[0]] == encode(tokenizer, text[:boundary])
        assert encoded.ids[encoded.starts[0] :] == encode(tokenizer, text[boundary:])
        assert tokenizer.decode(encoded.ids) == text
        assert len(encoded.ids) == len(encoded.offsets)


def test_several_cuts_keep_the_whole_text(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer()
    text = "<|im_start|>The mill  burned \n\n in 1846.<|im_end|> The tarn"
    boundaries = [14, 21, 30, 32, 44, len(text)]
    encoded = encode_turns(tokenizer, text, boundaries)
    assert tokenizer.decode(encoded.ids) == text
    for boundary, start in zip(boundaries, encoded.starts, strict=True):
        assert tokenizer.decode(encoded.ids[:start]) == text[:boundary]
