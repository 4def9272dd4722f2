"""Counts what a piece of Python does, so that its growth can be tested without a clock."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from _typeshed import TraceFunction


class Steps:
    """Bytecodes run, and comparisons of `Instant`s, which sorting in C makes unseen by bytecode."""

    def __init__(self) -> None:
        self.count: int = 0

    def of(self, work: Callable[[], None]) -> int:
        """Run `work`; return the steps it took. Not for use under a debugger."""
        before, self.count = self.count, 0
        outer = sys.gettrace()
        sys.settrace(self._trace)
        try:
            work()
        finally:
            sys.settrace(outer)
            taken, self.count = self.count, before
        return taken

    def _trace(self, frame: FrameType, event: str, _arg: object) -> TraceFunction:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            self.count += 1
        return self._trace


class Instant(float):
    """A time whose comparisons count as steps."""

    __slots__ = ("steps",)

    steps: Steps

    @classmethod
    def at(cls, seconds: float, steps: Steps) -> Instant:
        """Return the time `seconds`, counting for `steps`."""
        instant = cls(seconds)
        instant.steps = steps
        return instant

    def __lt__(self, other: float) -> bool:
        self.steps.count += 1
        return float(self) < float(other)

    def __gt__(self, other: float) -> bool:
        self.steps.count += 1
        return float(self) > float(other)

    def __hash__(self) -> int:
        return float.__hash__(self)
