"""How long entries of a class wait for their next use, learnt while running, and what an entry of some age is worth."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

BINS: Final = 40
_FIRST_SECONDS: Final = 1 / 8  # two bins per doubling: the last one begins after 18 hours
_EDGES: Final = [_FIRST_SECONDS * (2 ** (i / 2) - 1) for i in range(BINS + 1)]
_PRIOR: Final = 20.0  # entries of the average class that each class is taken to have seen
_KEPT: Final = 0.97  # of what was counted, at each lesson
_MOST_REUSED: Final = 0.999


def bin_of(age: float) -> int:
    """Return the bin of an age in seconds."""
    return min(BINS - 1, int(2 * math.log2(age / _FIRST_SECONDS + 1))) if age > 0 else 0


class ReuseTimes:
    """Per class: entries that came, times until they were used again, and from both the worth of an entry by its age.

    The worth is the best ratio, over all horizons, of the chance of a use to the seconds held for it (a Gittins
    index). It rises to a peak and falls again, as far as it is told here.
    """

    def __init__(self, classes: int) -> None:
        self._came = [0.0] * classes
        self._waits = [[0.0] * BINS for _ in range(classes)]
        falling = [1.0 / (1.0 + edge) for edge in _EDGES[:-1]]
        self.worth: list[list[float]] = [falling for _ in range(classes)]
        self.peak_seconds: list[float] = [0.0] * classes

    def came(self, of_class: int) -> None:
        """Count an entry that was put or used, and is of this class from now on."""
        self._came[of_class] += 1.0

    def used(self, of_class: int, age: float) -> None:
        """Count the use of an entry of this class, `age` seconds after the one before."""
        self._waits[of_class][bin_of(age)] += 1.0

    def learn(self) -> None:
        """Work the worth of every class out anew from what was counted, and let old counts fade."""
        total = sum(self._came) or 1.0
        average = [sum(waits[i] for waits in self._waits) / total for i in range(BINS)]
        for of_class, waits in enumerate(self._waits):
            seen = self._came[of_class] + _PRIOR
            shares = [(wait + _PRIOR * usual) / seen for wait, usual in zip(waits, average, strict=True)]
            worth = _worth([min(share, _MOST_REUSED) for share in accumulate(shares, initial=0.0)])
            self.worth[of_class] = worth
            self.peak_seconds[of_class] = _EDGES[max(range(BINS), key=worth.__getitem__)]
            self._came[of_class] *= _KEPT
            self._waits[of_class] = [wait * _KEPT for wait in waits]


def _worth(reused: Sequence[float]) -> list[float]:
    """Return for each bin the steepest slope from its beginning to any later point of `reused` over the time held."""
    spans = [later - edge for edge, later in pairwise(_EDGES)]
    held_in = [span * (1 - (before + after) / 2) for span, (before, after) in zip(spans, pairwise(reused), strict=True)]
    held = list(accumulate(held_in, initial=0.0))
    hull: list[int] = [BINS]  # upper hull of the points from here to the right, the next one last
    worth = [0.0] * BINS

    def slope(here: int, there: int) -> float:
        return (reused[there] - reused[here]) / (held[there] - held[here])

    for i in range(BINS - 1, -1, -1):
        while len(hull) > 1 and slope(i, hull[-1]) <= slope(i, hull[-2]):
            hull.pop()
        worth[i] = slope(i, hull[-1])
        hull.append(i)
    return worth
