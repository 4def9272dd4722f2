"""What a caller may tell about a prefix's future, for policies to use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtier.errors import InvalidValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """Advice that travels with a `get`, `put` or `touch`; it never changes what is returned.

    `session` names the conversation that `end_session` ends, a higher `priority` stays longer, and
    `expected_reuse_seconds` is when the prefix is likely to be asked for again, from now.

    Raises:
        InvalidValueError: for an empty session, a priority that is no int, a time that is negative or not finite.
    """

    session: str | None = None
    priority: int = 0
    expected_reuse_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_session(self.session)
        _check_priority(self.priority)
        _check_wait(self.expected_reuse_seconds)


def _check_session(session: object) -> None:
    if session is not None and (not isinstance(session, str) or not session):
        raise InvalidValueError(f"hint.session is {session!r}; give a non-empty string or None")


def _check_priority(priority: object) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidValueError(f"hint.priority is {priority!r}; give an int")


def _check_wait(seconds: object) -> None:
    if seconds is None:
        return
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and math.isfinite(seconds) and seconds >= 0:
        return
    raise InvalidValueError(f"hint.expected_reuse_seconds is {seconds!r}; give seconds, finite and at least 0, or None")
