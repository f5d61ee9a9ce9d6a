"""What is remembered of an operation on `meta` is what torch says each time: shapes, strides, dtypes, storages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ajusta.memory.answers import Answers

ATEN = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Counted:
    """An operation that says how often it was asked."""

    def __init__(self, func: Any) -> None:
        self.func, self.times, self._schema = func, 0, func._schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return self.func(*args, **kwargs)


def facts(result: Any) -> list[tuple[object, ...]]:
    tensors = [result] if isinstance(result, Tensor) else list(result)
    return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes(), t.device.type) for t in tensors]


FRESH = {
    "product": (ATEN.mm.default, lambda: (meta(6, 4).t(), meta(6, 3)), {}),
    "promotion": (ATEN.mul.Tensor, lambda: (meta(5, 1), meta(1, 7, dtype=torch.float64)), {}),
    "number": (ATEN.add.Tensor, lambda: (meta(5, dtype=torch.bfloat16), 2), {"alpha": 3}),
    "transposed": (ATEN.silu.default, lambda: (meta(8, 5).t(),), {}),
    "list": (ATEN.cat.default, lambda: ([meta(2, 3), meta(4, 3)],), {}),
    "two": (ATEN.topk.default, lambda: (meta(4, 9), 3), {}),
    "reduced": (ATEN.sum.dim_IntList, lambda: (meta(4, 9), [1], True), {}),
    "cast": (ATEN._to_copy.default, lambda: (meta(4, 9),), {"dtype": torch.bfloat16}),
    "made": (ATEN.zeros.default, lambda: ([3, 4],), {"dtype": torch.int64, "device": torch.device("meta")}),
}


@pytest.mark.parametrize("name", FRESH)
def test_a_second_answer_is_the_first_one_made_anew(name: str) -> None:
    func, given, kwargs = FRESH[name]
    asked, answers = Counted(func), Answers()
    args = given()
    first, second = answers(asked, args, kwargs), answers(asked, given(), kwargs)
    assert asked.times == 1
    assert facts(first) == facts(second) == facts(func(*args, **kwargs))
    for one, other in zip(*([r] if isinstance(r, Tensor) else list(r) for r in (first, second)), strict=True):
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


@pytest.mark.parametrize(
    "change", [lambda: (meta(6, 4), meta(4, 3)), lambda: (meta(4, 6).t(), meta(4, 3)), lambda: (meta(7, 4), meta(4, 3))]
)
def test_other_shapes_strides_and_numbers_are_another_question(change: Any) -> None:
    asked, answers = Counted(ATEN.mm.default), Answers()
    answers(asked, (meta(5, 4), meta(4, 3)), {})
    assert facts(answers(asked, change(), {})) == facts(ATEN.mm.default(*change()))
    assert asked.times == 2


def test_one_and_true_and_one_point_zero_are_three_questions() -> None:
    asked, answers = Counted(ATEN.mul.Tensor), Answers()
    dtypes = [answers(asked, (meta(3, dtype=torch.int64), number), {}).dtype for number in (1, 1.0, True, 1)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64] and asked.times == 3


def test_what_is_written_into_is_the_answer() -> None:
    x, answers = meta(4, 4), Answers()
    assert answers(ATEN.mul_.Tensor, (x, 2.0), {}) is x
    assert answers(ATEN.addmm_.default, (x, meta(4, 2), meta(2, 4)), {}) is x


def test_views_and_what_shares_memory_go_to_torch_every_time() -> None:
    answers = Answers()
    for func, rest in (
        (ATEN.t.default, ()),
        (ATEN._unsafe_view.default, ([20],)),
        (ATEN.detach.default, ()),
        (ATEN.slice.Tensor, (0, 1, 3)),
    ):
        asked, x = Counted(func), meta(5, 4)
        for _ in range(2):
            result = answers(asked, (x, *rest), {})
            assert result.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert asked.times == 2


def test_real_tensors_are_computed() -> None:
    x, answers = torch.ones(3), Answers()
    for _ in range(2):
        assert answers(ATEN.add.Tensor, (x, x), {}).tolist() == [2.0, 2.0, 2.0]
    assert answers(ATEN.mul_.Tensor, (x, 4.0), {}) is x and x.tolist() == [4.0, 4.0, 4.0]
