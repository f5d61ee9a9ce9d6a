"""The policy for roles, one case each, and that it is counted."""

from __future__ import annotations

import pytest

from ajusta.base.errors import DataError
from ajusta.data.roles import Turns, settle


def _settle(
    *turns: tuple[str, str], system: str | None = None, fold_system: bool = False, training: bool = True
) -> Turns:
    messages = [{"role": role, "content": content} for role, content in turns]
    return settle(messages, system=system, fold_system=fold_system, training=training)


def _shown(turns: Turns) -> list[tuple[object, object]]:
    return [(turn["role"], turn["content"]) for turn in turns.messages]


U, A = ("user", "u"), ("assistant", "a")


def test_plain_conversation_is_untouched() -> None:
    turns = _settle(U, A, U, A)
    assert _shown(turns) == [U, A, U, A] and turns.notes == ()


def test_names_are_settled_and_unknown_ones_refused() -> None:
    assert _shown(_settle(("human", "u"), ("gpt", "a"), ("Human ", "u"), ("bot", "a"))) == [U, A, U, A]
    with pytest.raises(DataError, match="role 'narrator' is not known"):
        _settle(("narrator", "x"), U, A)


def test_neighbours_are_joined_but_tool_results_are_not() -> None:
    turns = _settle(("user", "1"), ("user", "2"), ("assistant", "a"), ("assistant", "b"))
    assert _shown(turns) == [("user", "1\n\n2"), ("assistant", "a\n\nb")]
    assert turns.notes == ("neighbouring user turns joined", "neighbouring assistant turns joined")
    assert len(_settle(U, A, ("tool", "1"), ("tool", "2"), A).messages) == 5


def test_leading_and_trailing_turns_are_dropped_and_counted() -> None:
    turns = _settle(("system", "s"), ("assistant", "hi"), U, A, ("user", "?"), ("tool", "t"))
    assert _shown(turns) == [("system", "s"), U, A]
    assert turns.notes == (
        "assistant turn before the first user turn dropped",
        "trailing user turn without an answer dropped",
        "trailing tool turn without an answer dropped",
    )


@pytest.mark.parametrize("turns", [(U,), (A,), (("system", "s"),), (), (("system", "s"), A)])
def test_nothing_to_learn_is_refused(turns: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(DataError, match="no assistant turn"):
        _settle(*turns)


def test_system_is_put_in_folded_and_moved() -> None:
    assert _shown(_settle(U, A, system="s")) == [("system", "s"), U, A]
    assert _shown(_settle(("system", "own"), U, A, system="s"))[0] == ("system", "own")
    folded = _settle(U, A, system="s", fold_system=True)
    assert _shown(folded) == [("user", "s\n\nu"), A] and "folded" in folded.notes[0]
    late = _settle(U, ("system", "now"), A)
    assert _shown(late) == [("user", "u\n\nnow"), A] and "in the middle" in late.notes[0]
    assert _shown(_settle(("system", "1"), ("system", "2"), U, A))[0] == ("system", "1\n\n2")


def test_chat_time_keeps_the_question_at_the_end() -> None:
    assert _shown(_settle(U, A, U, training=False)) == [U, A, U]
    with pytest.raises(DataError, match="does not end with a user turn"):
        _settle(U, A, training=False)
    with pytest.raises(DataError, match="does not end with a user turn"):
        _settle(training=False)
