"""Least recently used goes first, leaves before their parents: the default policy."""

from __future__ import annotations

from itertools import count
from typing import ClassVar

from kvtier.policies.leaf_policy import LeafPolicy


class LRUPolicy(LeafPolicy):
    """Evicts the leaf whose last use is longest ago."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        super().__init__()
        self._uses = count()

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        """Take in `key` as the most recently used."""
        del now  # it never goes back, so the count of uses says as much
        self._leaves.insert(key, parent=parent, size=size, priority=priority, rank=(next(self._uses),))

    def touch(self, key: str, now: float) -> None:
        """Make `key` the most recently used."""
        del now
        node = self._leaves.find(key)
        if node is not None:
            self._leaves.rerank(node, (next(self._uses),))
