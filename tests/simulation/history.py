"""What the clients of one scenario asked for and were told, in one total order."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

NEVER = math.inf


@dataclass(eq=False)
class Change:
    """A put, a delete or a clear of one key. `stop` is NEVER if the process died before the call returned."""

    kind: str  # put, delete
    key: str
    epoch: int
    start: float
    value: int = 0  # puts: a number of its own
    stop: float = NEVER
    took: bool = False  # it certainly had its effect by `stop`
    lasting: bool = False  # ... also for later processes
    expires: float = NEVER  # the last moment (loop time) at which the value may be given to a call that begins then
    reason: str = ""  # why a put was dropped
    parent: int = 0  # for puts: the call it belongs to


@dataclass(eq=False)
class Reading:
    """A get that gave `value` (0: a miss), or an exists (`value` None) that said there is something (`there`)."""

    key: str
    epoch: int
    start: float
    stop: float
    value: int | None
    time: float  # loop time at which the call began
    there: bool = True
    patient: bool = True  # it had time enough to ask every tier


@dataclass(eq=False)
class Promise:
    """At some time between start and stop this value was reported to be on a persistent tier."""

    key: str
    value: int
    epoch: int
    start: float
    by: str


class History:
    """Events get numbers as they come: real time order, without ties."""

    def __init__(self) -> None:
        self._moments = itertools.count(1)
        self._values = itertools.count(1)
        self.changes: list[Change] = []
        self.readings: list[Reading] = []
        self.promises: list[Promise] = []
        self.departures: list[tuple[float, str, str, str]] = []  # moment, tier, key, how
        self.drops: list[tuple[float, str, str]] = []  # moment, tier, key: writes that were given up

    def moment(self) -> int:
        return next(self._moments)

    def new_value(self) -> int:
        return next(self._values)

    def change(self, kind: str, key: str, epoch: int, *, value: int = 0) -> Change:
        change = Change(kind, key, epoch, self.moment(), value=value)
        self.changes.append(change)
        return change

    def of(self, key: str) -> list[Change]:
        return [change for change in self.changes if change.key == key]
