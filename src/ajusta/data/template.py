"""The tokenizer's own chat template, asked politely: its refusals become one line, never a trace.

Variants are tried in turn, because templates disagree about tool calls: as the row has them; with an empty text where a
turn has none; with the arguments of tool calls as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from ajusta.base.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, object]
Tools = Sequence[Mapping[str, object]] | None

# Base models have no template; this one uses no token but eos. The prompt ends without a space and the answer starts
# with one, because the tokenizers of such models keep a space with the word that follows it.
DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'user' -%}{{ 'User: ' + message['content'] + '\\n' }}
{%- elif message['role'] == 'assistant' -%}{{ 'Assistant: ' + message['content'] + (eos_token or '') + '\\n' }}
{%- else -%}{{ raise_exception('this template knows the roles system, user and assistant only') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}
"""

_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)  # what templates raise


def ensure_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Give a tokenizer without a chat template the default one; returns the remark about it, or None."""
    if tokenizer.chat_template:
        return None
    tokenizer.chat_template = DEFAULT_TEMPLATE
    return (
        "the tokenizer has no chat template: 'User: ...' and 'Assistant: ...' lines are used and saved with the model"
    )


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools, *, prompt: bool) -> str:
    """Return the text of a conversation; with `prompt`, up to the place where the assistant starts.

    Raises:
        DataError: the template refuses the conversation.
    """
    turns: Any = [dict(message) for message in messages]  # transformers' own type knows turns of text only
    try:
        text = tokenizer.apply_chat_template(
            turns,
            tools=[dict(tool) for tool in tools] if tools else None,
            tokenize=False,
            add_generation_prompt=prompt,
        )
    except _REFUSALS as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"the chat template refuses this conversation: {line}; change or delete the row") from error
    assert isinstance(text, str)
    return text


def folds_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a system turn must be folded into the first user turn: the template refuses or ignores it."""
    probe: list[Message] = [{"role": "system", "content": "qzsystemzq"}, {"role": "user", "content": "qzuserzq"}]
    try:
        return "qzsystemzq" not in render(tokenizer, probe, None, prompt=True)
    except DataError:
        return True


def renderable(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools) -> list[Message]:
    """Return the first variant of a conversation that the template takes, and that shows all of its tool calls.

    Raises:
        DataError: the template refuses every variant, or would lose a tool call.
    """
    as_is = list(messages)
    variants = [as_is]
    if any("tool_calls" in message for message in messages):
        filled = [{"content": "", **message} for message in messages]
        variants += [filled, [_text_arguments(message) for message in filled]]
    refusal: DataError | None = None
    for variant in variants:
        try:
            text = render(tokenizer, variant, tools, prompt=False)
        except DataError as error:
            refusal = refusal or error
            continue
        lost = [name for name in _called(variant) if name not in text]
        if not lost:
            return variant
        refusal = DataError(
            f"the model's chat template shows no tool calls, so the call of {lost[0]!r} would be lost; "
            "use a model that knows tools, or delete the row"
        )
    assert refusal is not None
    raise refusal


def _calls(message: Message) -> list[Message]:
    calls = message.get("tool_calls")
    return [dict(call) for call in calls] if isinstance(calls, list) else []


def _called(messages: Sequence[Message]) -> list[str]:
    functions = [call.get("function", call) for message in messages for call in _calls(message)]
    return [str(function.get("name")) for function in functions if isinstance(function, Mapping)]


def _text_arguments(message: Message) -> Message:
    calls = _calls(message)
    return {**message, "tool_calls": [_text_call(call) for call in calls]} if calls else message


def _text_call(call: Message) -> Message:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _text_call(dict(function))}
    return {**call, "arguments": json.dumps(call.get("arguments"), ensure_ascii=False)}
