"""ARC: balances recency against frequency by watching which of the two it gave up too early."""

from __future__ import annotations

from itertools import count
from typing import ClassVar

from kvtier.policies.ghosts import Ghosts
from kvtier.policies.leaf_policy import LeafPolicy
from kvtier.policies.leaves import Leaves

_ONCE, _AGAIN = 0, 1


class ARCPolicy(LeafPolicy):
    """Keeps entries used once and entries used again apart, each in order of last use; evicts from the one over target.

    The target, in bytes for those used once, grows when a key comes back that was evicted after one use, and shrinks
    when one comes back that had been used again.
    """

    name: ClassVar[str] = "arc"

    def __init__(self) -> None:
        super().__init__(Leaves(lanes=2, prefer=self._lane))
        self._target = 0.0
        self._ghosts = (Ghosts(), Ghosts())
        self._uses = count()

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        """Take in `key` as used once, or as used again if it is known or left lately."""
        known = key in self._leaves
        lane = _AGAIN if known or self._returned(key, size) else _ONCE
        rank = (now, next(self._uses))
        self._leaves.insert(key, parent=parent, size=size, priority=priority, rank=rank, lane=lane)

    def touch(self, key: str, now: float) -> None:
        """Make `key` the most recent of those used again."""
        node = self._leaves.find(key)
        if node is not None:
            self._leaves.rerank(node, (now, next(self._uses)), _AGAIN)

    def remove(self, key: str) -> None:
        """Forget `key`, but for its name."""
        node = self._leaves.remove(key)
        if node is None:
            return
        once, again = self._ghosts
        self._ghosts[node.lane].add(key, node.size)
        resident = self._leaves.size + node.size
        once.trim(max(0, resident - self._leaves.lane_bytes[_ONCE]), len(self._leaves))
        again.trim(max(0, resident - once.size), len(self._leaves))

    def _returned(self, key: str, size: int) -> bool:
        """Tell whether `key` left lately; move the target towards the side that it was missed on."""
        once, again = self._ghosts
        if once.pop(key):
            resident = self._leaves.size + size
            self._target = min(float(resident), self._target + size * max(1.0, again.size / (once.size + size or 1)))
            return True
        if again.pop(key):
            self._target = max(0.0, self._target - size * max(1.0, once.size / (again.size + size or 1)))
            return True
        return False

    def _lane(self, lane_bytes: list[int]) -> tuple[int, int]:
        return (_ONCE, _AGAIN) if lane_bytes[_ONCE] > self._target else (_AGAIN, _ONCE)
