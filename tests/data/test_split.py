"""The split: stable when data is added, never the same text on both sides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ajusta.data.split import fold_text, split, split_key
from ajusta.spec.data import Row


def _docs(*texts: str) -> list[Row]:
    return [Row(source=f"f:{number}", text=text) for number, text in enumerate(texts)]


def _chat(*turns: tuple[str, str]) -> Row:
    return Row(source="c", messages=tuple({"role": role, "content": content} for role, content in turns))


@given(
    texts=st.lists(st.text(alphabet="aAbB .,!\n\u00e9\u0301", max_size=5), min_size=1, max_size=30),
    more=st.lists(st.text(alphabet="xyz", min_size=1, max_size=3), max_size=5),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 3),
)
def test_sides_are_whole_disjoint_and_never_empty(
    texts: list[str], more: list[str], fraction: float, seed: int
) -> None:
    rows = _docs(*texts, *more)
    sides = split(rows, fraction, seed)
    assert sorted((*sides.train, *sides.heldout)) == list(range(len(rows)))
    assert sides.train
    train = {split_key(rows[index]) for index in sides.train}
    assert not train & {split_key(rows[index]) for index in sides.heldout}
    if fraction == 0:
        assert not sides.heldout
    assert sides == split(rows, fraction, seed)


def test_adding_rows_moves_none() -> None:
    texts = [f"document number {number}" for number in range(200)]
    before, after = split(_docs(*texts[:100]), 0.2, 7), split(_docs(*texts), 0.2, 7)
    assert set(before.heldout) == {index for index in after.heldout if index < 100}
    assert 10 <= len(before.heldout) <= 35
    assert set(split(_docs(*texts), 0.2, 8).heldout) != set(after.heldout)


def test_ten_rows_hold_at_least_one_out() -> None:
    texts = [f"text {number}" for number in range(10)]
    assert len(split(_docs(*texts), 1e-9, 0).heldout) == 1
    assert not split(_docs(*texts[:9]), 1e-9, 0).heldout
    assert not split(_docs(*["same"] * 12), 1e-9, 0).heldout
    assert len(split(_docs(*texts), 1.0, 0).train) == 1


def test_folding_ignores_case_spacing_punctuation_and_composition() -> None:
    assert fold_text("  The\u00a0Tarn, (in) the-north!\n") == fold_text("the tarn in the north")
    assert fold_text("cafe\u0301") == fold_text("CAF\u00c9")
    assert fold_text(" !? ") == "!?" and fold_text("") == ""


def test_conversations_go_by_their_first_user_turn() -> None:
    one = _chat(("system", "s"), ("user", "Where is it?"), ("assistant", "x"))
    two = _chat(("human", "where is it"), ("gpt", "another"))
    assert split_key(one) == split_key(two) == "where is it"
    assert split_key(_chat(("narrator", "Alone"))) == "alone"


def test_doubles_are_counted() -> None:
    notes = split(_docs("a b", "a b", "A b!", "c"), 0.0, 0).notes
    assert [note.rsplit(": ", 1)[1] for note in notes] == ["1", "1"]
