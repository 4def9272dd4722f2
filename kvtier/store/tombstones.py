"""What was deleted lately, by this store or by others on a shared medium: older values of it are never served again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.concurrency.clock import Clock


class Tombstones:
    """Deleted keys and cleared prefixes with the wall-clock second of the deletion, kept for `keep_seconds`.

    After that every store on the medium has heard of it (they look every `coherence_seconds`), so nobody can bring an
    older value back. Comparing the time a value was put with the time of a deletion trusts the clocks of the
    machines that share a medium to agree within the time between the two.
    """

    def __init__(self, clock: Clock, *, keep_seconds: float) -> None:
        self._clock = clock
        self._keep_seconds = keep_seconds
        self._keys: OrderedDict[str, float] = OrderedDict()
        self._prefixes: OrderedDict[str, float] = OrderedDict()

    def add(self, key: str, when: float) -> None:
        """Note that `key` was deleted."""
        self._note(self._keys, key, when)

    def add_prefix(self, prefix: str, when: float) -> None:
        """Note that everything under a literal prefix was deleted."""
        self._note(self._prefixes, prefix, when)

    def _note(self, stones: OrderedDict[str, float], what: str, when: float) -> None:
        stones[what] = max(when, stones.get(what, when))
        stones.move_to_end(what)
        oldest = self._clock.wall() - self._keep_seconds
        while stones and next(iter(stones.values())) < oldest:
            stones.popitem(last=False)

    def outdated(self, key: str, created: float) -> bool:
        """Tell whether a value of `key` that was put at `created` was deleted since."""
        if created < self._keys.get(key, 0.0):
            return True
        return any(created < when and key.startswith(prefix) for prefix, when in self._prefixes.items())

    def __len__(self) -> int:
        return len(self._keys) + len(self._prefixes)
