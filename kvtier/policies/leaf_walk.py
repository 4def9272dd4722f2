"""The order in which entries go, as a walk that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.policies.leaf_heap import Node, Order

Prefer: TypeAlias = Callable[[list[int]], "Sequence[int]"]
"""Given the bytes left in each lane, tell from which lanes to take the next victim, best first; each lane once."""


class Walk:
    """Entries in the order in which they go, without changing anything; a parent's turn comes after its last child."""

    def __init__(
        self,
        nodes: dict[str, Node],
        lane_bytes: list[int],
        prefer: Prefer | None,
        over_share: Callable[[str], bool] | None,
        left: dict[str, int] | None = None,
    ) -> None:
        self._nodes = nodes
        self._left = {} if left is None else left  # children not taken, where any was taken
        self._lane_bytes = lane_bytes.copy()
        self._prefer = prefer
        self._over_share = over_share
        self._fronts: list[list[tuple[bool, Order, int, Node, Iterator[Node] | None]]] = [[] for _ in lane_bytes]
        self._serial = 0

    def add(self, leaves: Iterator[Node], *, uniform: bool) -> None:
        """Merge in `leaves`, which come in order; `uniform` if all are over their share or none is."""
        if uniform or self._over_share is None:
            self._advance(leaves)
        else:
            for node in leaves:
                self._offer(node, None)

    def next(self) -> Node | None:
        """Return the next to go, or `None`; nothing above it follows unless it is taken."""
        heads = [(front[0][0], front[0][1][0], lane) for lane, front in enumerate(self._fronts) if front]
        if not heads:
            return None
        fairest, lowest, lane = min(heads)
        if len(heads) > 1 and self._prefer is not None:
            ready = {lane for fair, priority, lane in heads if fair == fairest and priority == lowest}
            lane = next(lane for lane in self._prefer(self._lane_bytes) if lane in ready)
        _, _, _, node, source = heappop(self._fronts[lane])
        if source is not None:
            self._advance(source)
        return node

    def take(self, node: Node) -> None:
        """Treat `node` as gone."""
        self._lane_bytes[node.lane] -= node.size
        parent = self._nodes.get(node.parent) if node.parent is not None else None
        if parent is None:
            return
        left = self._left.get(parent.key, parent.kids) - 1
        self._left[parent.key] = left
        if left == 0:
            self._offer(parent, None)

    def keys(self) -> Iterator[str]:
        """Take and yield everything."""
        while (node := self.next()) is not None:
            self.take(node)
            yield node.key

    def _advance(self, source: Iterator[Node]) -> None:
        node = next(source, None)
        if node is not None:
            self._offer(node, source)

    def _offer(self, node: Node, source: Iterator[Node] | None) -> None:
        fair = self._over_share is None or not self._over_share(node.key)
        self._serial += 1
        heappush(self._fronts[node.lane], (fair, node.order, self._serial, node, source))
