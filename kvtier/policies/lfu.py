"""Least frequently used goes first, leaves before their parents; among equals the least recently used."""

from __future__ import annotations

from itertools import count
from typing import ClassVar

from kvtier.policies.leaf_policy import LeafPolicy


class LFUPolicy(LeafPolicy):
    """Evicts the leaf with the fewest uses since it came in.

    Counts never age, so what was popular once stays long; `gdsf` is the same with ageing.
    """

    name: ClassVar[str] = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._clock = count()

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        """Take in `key` with one use, or count another use of a known one."""
        del now
        known = self._leaves.find(key)
        uses = 1 if known is None else known.uses + 1
        rank = (uses, next(self._clock))
        self._leaves.insert(key, parent=parent, size=size, priority=priority, rank=rank).uses = uses

    def touch(self, key: str, now: float) -> None:
        """Count a use."""
        del now
        node = self._leaves.find(key)
        if node is not None:
            node.uses += 1
            self._leaves.rerank(node, (node.uses, next(self._clock)))
