"""The policy for roles, applied before rendering, so that no chat template has to refuse a conversation.

In this order, each step counted under its own words:
1. names: human, gpt, bot, model, ... become user and assistant; a name that nobody knows makes the row unusable;
2. a system text from the settings goes in front of conversations that have none;
3. a system turn later than the beginning is read as a user turn;
4. neighbours of the same role are joined by a blank line (tool results and turns with tool calls stay apart);
5. assistant turns before the first user turn are dropped: nothing was asked;
6. for training, turns after the last assistant turn are dropped: nothing is learned from them;
7. a system turn is folded into the first user turn where the template takes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ajusta.base.errors import DataError

Message = dict[str, object]

ALIASES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
}
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A conversation that every template can take, and the policies that made it so."""

    messages: tuple[Message, ...]
    notes: tuple[str, ...] = ()


def role_of(message: Mapping[str, object]) -> str:
    """Return system, user, assistant or tool.

    Raises:
        DataError: the role is none of them and no known other name for one.
    """
    name = str(message.get("role", "")).strip().lower()
    role = ALIASES.get(name, name)
    if role not in ROLES:
        known = ", ".join((*ROLES, *ALIASES))
        raise DataError(f"role {name!r} is not known; expected one of {known}; rename it")
    return role


def settle(messages: Sequence[Mapping[str, object]], *, system: str | None, fold_system: bool, training: bool) -> Turns:
    """Apply the policy above; without `training` the last turn must be one that an assistant answers.

    Raises:
        DataError: an unknown role; no assistant turn to learn from; no user turn to answer.
    """
    notes: list[str] = []
    turns = _named(messages, notes)
    if system and not any(turn["role"] == "system" for turn in turns):
        turns.insert(0, {"role": "system", "content": system})
    turns = _joined(_late_system_to_user(turns, notes), notes)
    turns = _from_first_user(turns, notes)
    if training:
        turns = _to_last_assistant(turns, notes)
    elif not turns or turns[-1]["role"] not in ("user", "tool"):
        raise DataError("the conversation does not end with a user turn; expected something to answer; add a question")
    if fold_system and turns[0]["role"] == "system":
        turns = _folded(turns)
        notes.append("system turn folded into the first user turn (the template takes none)")
    return Turns(messages=tuple(turns), notes=tuple(notes))


def _named(messages: Sequence[Mapping[str, object]], notes: list[str]) -> list[Message]:
    named: list[Message] = []
    for message in messages:
        role = role_of(message)
        if role != message.get("role"):
            notes.append(f"role {message.get('role')} read as {role}")
        named.append({**message, "role": role})
    return named


def _late_system_to_user(turns: list[Message], notes: list[str]) -> list[Message]:
    started = False
    result: list[Message] = []
    for turn in turns:
        if turn["role"] != "system":
            started = True
        elif started:
            notes.append("system turn in the middle read as a user turn")
            turn = {**turn, "role": "user"}
        result.append(turn)
    return result


def _joined(turns: list[Message], notes: list[str]) -> list[Message]:
    result: list[Message] = []
    for turn in turns:
        before = result[-1] if result else None
        if before is None or before["role"] != turn["role"] or not (_is_plain(before) and _is_plain(turn)):
            result.append(turn)
            continue
        result[-1] = {**turn, **before, "content": f"{before['content']}\n\n{turn['content']}"}
        notes.append(f"neighbouring {turn['role']} turns joined")
    return result


def _is_plain(turn: Message) -> bool:
    return turn["role"] != "tool" and "content" in turn and "tool_calls" not in turn


def _from_first_user(turns: list[Message], notes: list[str]) -> list[Message]:
    start = next((index for index, turn in enumerate(turns) if turn["role"] == "user"), len(turns))
    before = [turn for turn in turns[:start] if turn["role"] != "system"]
    notes.extend(f"{turn['role']} turn before the first user turn dropped" for turn in before)
    return [turn for turn in turns[:start] if turn["role"] == "system"] + turns[start:]


def _to_last_assistant(turns: list[Message], notes: list[str]) -> list[Message]:
    end = max((index + 1 for index, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
    if not end:
        raise DataError("no assistant turn after a user turn; expected an answer to learn; add one or delete the row")
    notes.extend(f"trailing {turn['role']} turn without an answer dropped" for turn in turns[end:])
    return turns[:end]


def _folded(turns: list[Message]) -> list[Message]:
    system, user, *rest = turns
    return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest]
