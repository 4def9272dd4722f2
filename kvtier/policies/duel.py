"""Whether plain recency would have done better: a cache of names in order of use, beside the real one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_SIGNIFICANT = 3.0  # standard deviations by which recency must lead
_LONGEST_PAUSE: Final = 64


class Duel:
    """Follows which keys a least-recently-used cache of the same size would hold, and tells when to act like one.

    Runs of uses (one request each) are compared as pairs. Once recency leads by more than chance, `recency` turns
    true for four turns of the cache, twice as long after each relapse.
    """

    def __init__(self) -> None:
        self.recency: bool = False
        self._recent: OrderedDict[str, tuple[int, int]] = OrderedDict()  # size, number of the last use
        self._size = 0
        self.number: int = 0  # of the latest use
        self._floor = 0  # number of the oldest use that recency held when the run began: a run must not judge itself
        self._lead, self._spread, self._run = 0.0, 0.0, 0
        self._pause, self._left = 1, 0

    def __contains__(self, key: object) -> bool:
        return key in self._recent

    def used(self, key: str, size: int, capacity: int, *, before: int | None, hit: bool) -> list[str]:
        """Note a use; return the keys that recency would have dropped for it.

        `before` is the number of the key's last use, if there was one; `number` tells that of this use afterwards.
        """
        self._run += (before is not None and before >= self._floor) - hit
        known = self._recent.pop(key, None)
        self.number += 1
        self._recent[key] = (size, self.number)
        self._size += size - (known[0] if known is not None else 0)
        dropped = []
        while self._size > capacity:
            gone, (its_size, _) = self._recent.popitem(last=False)
            self._size -= its_size
            dropped.append(gone)
        return dropped

    def end_run(self, entries: int) -> None:
        """Judge, after a run of uses that belong together; `entries` are resident."""
        self._lead += self._run
        self._spread += self._run * self._run
        self._run = 0
        self._floor = next(iter(self._recent.values()))[1] if self._recent else 0
        self._left -= 1
        if self.recency:
            if self._left <= 0:
                self.recency, self._lead, self._spread, self._left = False, 0.0, 0.0, entries
        elif self._lead > 0 and self._lead * self._lead > _SIGNIFICANT**2 * self._spread:
            self.recency, self._left = True, self._pause * max(entries, 64) // 2
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self._left <= 0:  # long ago is no guide to now
            self._left = entries
            self._lead, self._spread = self._lead / 2, self._spread / 2
