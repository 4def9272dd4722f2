"""Greedy dual size frequency: what is rarely used, large or cheap to compute again goes first, and fame ages."""

from __future__ import annotations

from itertools import count
from typing import ClassVar, Literal

from kvtier.errors import ConfigError
from kvtier.policies.leaf_policy import LeafPolicy

_MIB = 1 << 20


class GDSFPolicy(LeafPolicy):
    """Evicts the leaf with the least `age + uses * cost / size`, `age` being that of what was last evicted.

    Args:
        cost: what it costs to lose an entry. `"entry"`: the same for all, so that small entries stay longer.
            `"byte"`: in proportion to its size, so that size does not matter (LFU with ageing).
    """

    name: ClassVar[str] = "gdsf"

    def __init__(self, *, cost: Literal["entry", "byte"] = "entry") -> None:
        if cost not in {"entry", "byte"}:
            raise ConfigError(f"gdsf: cost is {cost!r}; write 'entry' or 'byte'")
        super().__init__()
        self._by_entry = cost == "entry"
        self._age = 0.0
        self._clock = count()

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        """Take in `key` with one use, or count another use of a known one."""
        del now
        known = self._leaves.find(key)
        uses = 1 if known is None else known.uses + 1
        rank = (self._worth(uses, size), next(self._clock))
        self._leaves.insert(key, parent=parent, size=size, priority=priority, rank=rank).uses = uses

    def touch(self, key: str, now: float) -> None:
        """Count a use, worth most when it is new."""
        del now
        node = self._leaves.find(key)
        if node is not None:
            node.uses += 1
            self._leaves.rerank(node, (self._worth(node.uses, node.size), next(self._clock)))

    def remove(self, key: str) -> None:
        """Forget `key`; all that stay are older now by comparison."""
        node = self._leaves.remove(key)
        if node is None:
            return
        left = self._leaves.coldest()  # a deleted entry may be worth more than others: age only as far as the next
        worth = node.order[1] if left is None else min(node.order[1], left.order[1])
        self._age = max(self._age, worth)

    def _worth(self, uses: int, size: int) -> float:
        return self._age + uses * (_MIB / max(size, 1) if self._by_entry else 1.0)
