"""Hints are checked where they are made."""

import pytest

from kvtier.errors import InvalidValueError
from kvtier.keys import Hint


def test_a_hint_says_nothing_by_default():
    assert Hint() == Hint(session=None, priority=0, expected_reuse_seconds=None)
    assert Hint(session="s", priority=-3, expected_reuse_seconds=0).priority == -3


@pytest.mark.parametrize(
    "wrong",
    [
        {"session": ""},
        {"session": 5},
        {"priority": 1.5},
        {"priority": True},
        {"priority": None},
        {"expected_reuse_seconds": -1},
        {"expected_reuse_seconds": float("nan")},
        {"expected_reuse_seconds": float("inf")},
        {"expected_reuse_seconds": True},
        {"expected_reuse_seconds": "5"},
    ],
)
def test_a_wrong_hint_is_named(wrong):
    (name,) = wrong
    with pytest.raises(InvalidValueError, match=f"hint.{name} is "):
        Hint(**wrong)
