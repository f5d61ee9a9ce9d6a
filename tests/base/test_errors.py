"""Each refusal has the exit code that the command line promises."""

from __future__ import annotations

import pytest

from ajusta.base.errors import (
    AjustaError,
    ConfigError,
    DataError,
    DoesNotFit,
    ModelError,
    NumbersGoneBad,
    UserError,
    nearest,
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (AjustaError, 1),
        (NumbersGoneBad, 1),
        (UserError, 2),
        (ConfigError, 2),
        (DataError, 2),
        (ModelError, 2),
        (DoesNotFit, 3),
    ],
)
def test_exit_codes(kind: type[AjustaError], code: int) -> None:
    assert kind("why").exit_code == code
    assert issubclass(kind, AjustaError)


def test_the_persons_mistakes_are_user_errors_and_ours_are_not() -> None:
    assert not issubclass(DoesNotFit, UserError) and not issubclass(NumbersGoneBad, UserError)


def test_the_nearest_name_is_offered_and_a_far_one_is_not() -> None:
    assert nearest("learning_rat", ["learning_rate", "steps"]) == "; did you mean 'learning_rate'?"
    assert nearest("zzz", ["learning_rate", "steps"]) == ""
