"""First in, first out, leaves before their parents: use does not count."""

from __future__ import annotations

from itertools import count
from typing import ClassVar

from kvtier.policies.leaf_policy import LeafPolicy


class FIFOPolicy(LeafPolicy):
    """Evicts the leaf that was put in longest ago; a value put again is new."""

    name: ClassVar[str] = "fifo"

    def __init__(self) -> None:
        super().__init__()
        self._inserts = count()

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        """Take in `key` as the newest."""
        del now  # it never goes back, so the count of inserts says as much
        self._leaves.insert(key, parent=parent, size=size, priority=priority, rank=(next(self._inserts),))

    def touch(self, key: str, now: float) -> None:
        """Change nothing."""
