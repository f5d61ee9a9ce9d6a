"""The trained mask, by templates of several habits; and that chat time sees the ids of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ajusta.base.errors import DataError
from ajusta.data.chat import Marked, Rendered, chat_format, chat_prompt_ids, render_conversation
from ajusta.data.template import DEFAULT_TEMPLATE
from ajusta.spec.data import Row

Maker = Callable[..., PreTrainedTokenizerFast]
Tools = tuple[dict[str, object], ...]
CHAT = (
    ("user", "Where is the mill?"),
    ("assistant", "By the river."),
    ("user", "And 1846?"),
    ("assistant", "It burned."),
)


def _row(*turns: tuple[str, str] | dict[str, object], tools: Tools | None = None) -> Row:
    messages: list[dict[str, object]] = []
    for turn in turns:
        messages.append(turn if isinstance(turn, dict) else {"role": turn[0], "content": turn[1]})
    return Row(source="f:1", messages=tuple(messages), tools=tools)


def _render(tokenizer: PreTrainedTokenizerFast, row: Row, **options: Any) -> Rendered:
    return render_conversation(chat_format(tokenizer), row, **options)


def _trained(tokenizer: PreTrainedTokenizerFast, marked: Marked) -> list[str]:
    """The texts of the trained runs."""
    runs: list[str] = []
    place = 0
    for trained, group in groupby(marked.trained.tolist()):
        end = place + len(list(group))
        if trained:
            runs.append(str(tokenizer.decode(marked.ids[place:end])))
        place = end
    return runs


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(
    ("template", "eos", "ends"),
    [
        ("chatml", "<|im_end|>", "<|im_end|>"),
        ("chatml", "</s>", "<|im_end|></s>"),  # the turn end is no known end token: eos follows it
        ("strict", "</s>", "</s>"),
        ("prints_bos", "<|im_end|>", "<|im_end|>"),
        ("open_end", "</s>", "</s>"),
        ("spaced", "<|im_end|>", "<|im_end|>"),
        ("none", "</s>", "</s>"),
    ],
)
def test_loss_falls_on_answers_and_turn_ends_and_prompts_match(
    make_tokenizer: Maker, template: str, eos: str, ends: str, adds_bos: bool
) -> None:
    tokenizer = make_tokenizer(template, eos=eos, adds_bos=adds_bos)
    row = _row(*CHAT)
    rendered = _render(tokenizer, row)
    assert len(rendered.sequences) == 1
    (marked,) = rendered.sequences
    first, last = _trained(tokenizer, marked)
    assert last.strip() == "It burned." + ends
    assert first.strip().startswith("By the river.") and "user" not in first and "[INST]" not in first
    if template != "open_end":
        assert first.strip() == "By the river." + ends.removesuffix("</s>" if template == "chatml" else "")
    uses_bos = adds_bos or template in ("strict", "prints_bos")
    assert marked.ids.tolist().count(tokenizer.bos_token_id) == uses_bos
    assert (marked.ids[0] == tokenizer.bos_token_id) == uses_bos
    assert row.messages is not None
    for turn in (1, 3):
        prompt = chat_prompt_ids(tokenizer, row.messages[:turn])
        assert marked.ids[: len(prompt)].tolist() == prompt
        assert marked.trained[len(prompt)] and not marked.trained[len(prompt) - 1]


def test_end_tokens_of_generation_config_are_honoured(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer("chatml", eos="</s>")
    chat = chat_format(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]))
    (marked,) = render_conversation(chat, _row(*CHAT)).sequences
    assert _trained(tokenizer, marked) == ["By the river.<|im_end|>", "It burned.<|im_end|>"]


def test_an_end_token_inside_the_answer_does_not_end_it(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer("chatml")
    (marked,) = _render(tokenizer, _row(CHAT[0], ("assistant", "Say <|im_end|> twice."))).sequences
    assert _trained(tokenizer, marked) == ["Say <|im_end|> twice.<|im_end|>"]


@pytest.mark.parametrize("answer", ["\nOn a new line", " 46", "46", "\n\n", "  ", "Q", "9", "$46 ", "é\U0001f41f"])
@pytest.mark.parametrize("template", ["chatml", "spaced", "none", "prints_bos"])
def test_prompt_ids_do_not_depend_on_the_answer(make_tokenizer: Maker, template: str, answer: str) -> None:
    tokenizer = make_tokenizer(template)
    row = _row(("user", "The answer is "), ("assistant", answer), ("user", " again "), ("assistant", answer))
    (marked,) = _render(tokenizer, row).sequences
    assert row.messages is not None
    for turn in (1, 3):
        prompt = chat_prompt_ids(tokenizer, row.messages[:turn])
        assert marked.ids[: len(prompt)].tolist() == prompt
        assert marked.trained[len(prompt)] and not marked.trained[len(prompt) - 1]
    assert tokenizer.decode(marked.ids).count("assistant" if template != "none" else "Assistant") == 2


def test_a_template_that_rewrites_earlier_turns_gives_one_example_an_answer(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer("stripping")
    row = _row(("user", "a"), ("assistant", "<think>x</think>\nb"), ("user", "c"), ("assistant", "<think>y</think>\nd"))
    rendered = _render(tokenizer, row)
    assert [_trained(tokenizer, marked) for marked in rendered.sequences] == [
        ["<think>x</think>\nb<|im_end|>"],
        ["<think>y</think>\nd<|im_end|>"],
    ]
    assert "one example for each answer (the chat template rewrites earlier turns)" in rendered.notes
    second = rendered.sequences[1]
    assert "<think>x" not in tokenizer.decode(second.ids)
    assert row.messages is not None
    prompt = chat_prompt_ids(tokenizer, row.messages[:3])
    assert second.ids[: len(prompt)].tolist() == prompt


def test_answers_that_join_the_prompt_match_in_examples_of_one_answer_too(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer("stripping")
    row = _row(("user", "a"), ("assistant", "\nb"), ("user", "c"), ("assistant", "<think>y</think>d"), CHAT[0], CHAT[1])
    last = _render(tokenizer, row).sequences[-1]
    assert row.messages is not None
    prompt = chat_prompt_ids(tokenizer, row.messages[:5])
    assert last.ids[: len(prompt)].tolist() == prompt


def test_a_prompt_that_the_turn_does_not_start_with_is_found_by_comparing(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer("forced")
    (marked,) = _render(tokenizer, _row(*CHAT)).sequences
    assert _trained(tokenizer, marked) == ["By the river.<|im_end|>", "It burned.<|im_end|>"]


def test_no_end_token_at_all_is_said(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer("none", eos=None)
    chat = chat_format(tokenizer)
    assert any("no end token" in note for note in chat.notes)
    (marked,) = render_conversation(chat, _row(*CHAT[:2])).sequences
    assert _trained(tokenizer, marked) == [" By the river."]


def test_base_models_are_given_the_default_template(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer("none", eos="</s>")
    chat = chat_format(tokenizer)
    assert tokenizer.chat_template == DEFAULT_TEMPLATE and "no chat template" in chat.notes[0]
    assert chat_format(tokenizer).notes == ()
    (marked,) = render_conversation(chat, _row(*CHAT), system="Be short.").sequences
    assert tokenizer.decode(marked.ids) == (
        "Be short.\n\nUser: Where is the mill?\nAssistant: By the river.</s>\n"
        "User: And 1846?\nAssistant: It burned.</s>\n"
    )


def test_system_is_added_and_folded_where_refused(make_tokenizer: Maker) -> None:
    kept = make_tokenizer("chatml")
    (marked,) = _render(kept, _row(*CHAT[:2]), system="Be short.").sequences
    assert str(kept.decode(marked.ids)).startswith("<|im_start|>system\nBe short.<|im_end|>")
    folding = make_tokenizer("strict", eos="</s>")
    rendered = _render(folding, _row(("system", "S."), ("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")))
    assert folding.decode(rendered.sequences[0].ids) == "<s>[INST] S.\n\na\n\nb [/INST] c</s>"
    assert len(rendered.notes) == 3
    prompt = chat_prompt_ids(folding, [{"role": "user", "content": "a\n\nb"}], system="S.")
    assert rendered.sequences[0].ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (_row(("user", "a")), "no assistant turn"),
        (_row(("narrator", "a"), ("assistant", "b")), "not known"),
        (_row(("user", "a"), ("assistant", "b"), ("tool", "t"), ("assistant", "c")), "refuses this conversation"),
    ],
)
def test_refusals_are_one_line(make_tokenizer: Maker, row: Row, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        _render(make_tokenizer("strict", eos="</s>"), row)
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)


def _tool_row(content: Sequence[tuple[str, object]], tools: Tools | None = None) -> Row:
    call = {"type": "function", "function": {"name": "get_depth", "arguments": {"place": "tarn é"}}}
    return _row(
        ("user", "How deep?"),
        {"role": "assistant", **dict(content), "tool_calls": [call, call]},
        ("tool", "12 m"),
        ("tool", "13 m"),
        ("assistant", "12 m."),
        tools=tools,
    )


@pytest.mark.parametrize("template", ["tools", "text_arguments"])
def test_tool_calls_are_trained_and_rendered_alike(make_tokenizer: Maker, template: str) -> None:
    tokenizer = make_tokenizer(template)
    tools: Tools = ({"type": "function", "function": {"name": "get_depth"}},)
    texts = []
    for content in ([], [("content", "")]):
        (marked,) = _render(tokenizer, _tool_row(content, tools)).sequences
        texts.append(tokenizer.decode(marked.ids))
        call = '<call>get_depth {"place": "tarn é"}</call>'
        assert _trained(tokenizer, marked) == [call * 2 + "<|im_end|>", "12 m.<|im_end|>"]
    assert texts[0] == texts[1] and "Tools:" in texts[0] and "null" not in texts[0]


def test_templates_without_tools_refuse_calls_and_say_that_the_list_is_left_out(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer("chatml")
    with pytest.raises(DataError, match="'get_depth' would be lost"):
        _render(tokenizer, _tool_row([]))
    tools: Tools = ({"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}},)
    notes = _render(tokenizer, _row(*CHAT, tools=tools)).notes
    assert notes == ("tools list left out (the chat template does not show it)",)


def test_a_tokenizer_that_puts_a_space_first(make_tokenizer: Maker) -> None:
    tokenizer = make_tokenizer("spaced", kind="sentencepiece", adds_bos=True)
    row = _row(*CHAT)
    (marked,) = _render(tokenizer, row).sequences
    assert _trained(tokenizer, marked)[1].strip() == "It burned.<|im_end|>"
    assert "assistant: By the river." in tokenizer.decode(marked.ids)  # no second space where the text was cut
    assert row.messages is not None
    prompt = chat_prompt_ids(tokenizer, row.messages[:3])
    assert marked.ids[: len(prompt)].tolist() == prompt
    assert marked.ids.tolist().count(tokenizer.bos_token_id) == 1


def test_chat_prompt_needs_a_question(make_tokenizer: Maker) -> None:
    with pytest.raises(DataError, match="does not end with a user turn"):
        chat_prompt_ids(make_tokenizer(), [{"role": "assistant", "content": "a"}])
