"""S3-FIFO: newcomers pass a small queue first, and only those used again reach the main one."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, ClassVar

from kvtier.errors import ConfigError
from kvtier.policies.ghosts import Ghosts
from kvtier.policies.leaf_policy import LeafPolicy
from kvtier.policies.leaves import Leaves

if TYPE_CHECKING:
    from kvtier.policies.leaf_heap import Node

_SMALL, _MAIN = 0, 1
_LAPS_SAVED = 3  # a use saves an entry of the main queue from one lap of the hand, up to three in advance


class S3FIFOPolicy(LeafPolicy):
    """Evicts from the small queue while it is over its share, else from the main queue; uses save entries there.

    Both queues are in order of entry. The main queue is a clock whose hand passes an entry once for each use it saw;
    `rank` is the lap in which the hand takes it, so that nothing has to move when the hand passes.

    Args:
        small_share: share of the resident bytes for the small queue, between 0 and 1.
        uses_to_stay: uses in the small queue after which an entry moves to the main one.
    """

    name: ClassVar[str] = "s3-fifo"

    def __init__(self, *, small_share: float = 0.1, uses_to_stay: int = 2) -> None:
        if not 0 < small_share < 1:
            raise ConfigError(f"s3-fifo: small_share is {small_share!r}; write a share between 0 and 1, such as 0.1")
        if uses_to_stay < 1:
            raise ConfigError(f"s3-fifo: uses_to_stay is {uses_to_stay!r}; write at least 1")
        super().__init__(Leaves(lanes=2, prefer=self._lane))
        self._small_share = small_share
        self._uses_to_stay = uses_to_stay
        self._lap = 0.0
        self._ghosts = Ghosts()
        self._entries = count()

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        """Take in `key` at the end of the small queue, or of the main one if it left the small one lately."""
        node = self._leaves.find(key)
        if node is None:
            lane = _MAIN if self._ghosts.pop(key) else _SMALL
            rank = (self._lap + 1 if lane == _MAIN else 0.0, next(self._entries))
            self._leaves.insert(key, parent=parent, size=size, priority=priority, rank=rank, lane=lane).uses = 0
        else:
            _, lap, place, _ = node.order
            self._leaves.insert(key, parent=parent, size=size, priority=priority, rank=(lap, place), lane=node.lane)
            self.touch(key, now)

    def touch(self, key: str, now: float) -> None:
        """Count a use: it saves `key` from a lap, or brings it nearer to the main queue."""
        del now
        node = self._leaves.find(key)
        if node is None:
            return
        if node.lane == _MAIN:
            _, lap, place, _ = node.order
            saved = min(max(lap, self._lap) + 1, self._lap + 1 + _LAPS_SAVED)
            self._leaves.rerank(node, (saved, place))
            return
        node.uses += 1
        if node.uses >= self._uses_to_stay:
            self._leaves.rerank(node, (self._lap + 1, next(self._entries)), _MAIN)

    def remove(self, key: str) -> None:
        """Forget `key`, but for the name of one that did not reach the main queue."""
        node = self._leaves.remove(key)
        if node is None:
            return
        if node.lane == _SMALL:
            self._ghosts.add(key, node.size)
            resident = self._leaves.size + node.size
            self._ghosts.trim(round(resident * (1 - self._small_share)), len(self._leaves))
        else:
            self._move_hand(node)

    def _move_hand(self, gone: Node) -> None:
        left = self._leaves.coldest(_MAIN)  # a deleted entry may be far ahead of the hand
        lap = gone.order[1] if left is None else min(gone.order[1], left.order[1])
        self._lap = max(self._lap, lap)

    def _lane(self, lane_bytes: list[int]) -> tuple[int, int]:
        return (_SMALL, _MAIN) if lane_bytes[_SMALL] > self._small_share * sum(lane_bytes) else (_MAIN, _SMALL)
