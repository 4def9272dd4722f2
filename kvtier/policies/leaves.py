"""Which entries have no resident child, and in which order those may go: the part that all built-in policies share.

Only leaves are ordered, so that children always go before their parents. An entry is filed in a heap when it becomes
a leaf; a use only notes the later rank, and the entry is filed again when its turn comes too early. So insert, touch
and remove cost O(log n) amortised, and naming k victims costs O(k log n); where ranks follow time, nearly all of it
is O(1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvtier.policies.base import nothing, share_of
from kvtier.policies.leaf_heap import Heap, Node
from kvtier.policies.leaf_walk import Walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.policies.leaf_heap import Order
    from kvtier.policies.leaf_walk import Prefer

Rank: TypeAlias = tuple[float, ...]
"""Place in the order within one priority and lane, of one or more numbers, as many for all; lower goes first."""

_SHARES = 64  # this many namespaces get heaps of their own; keys of further ones are asked for their share singly


class Leaves:
    """Entries with their parents, and an order over those that have no resident child.

    With several `lanes` (the queues of S3-FIFO and ARC) `prefer` chooses between them for each victim. `lane_bytes`
    holds the bytes in each.
    """

    def __init__(self, lanes: int = 1, prefer: Prefer | None = None) -> None:
        self.lane_bytes: list[int] = [0] * lanes
        self.size: int = 0  # bytes in all lanes
        self._prefer = prefer
        self._nodes: dict[str, Node] = {}
        self._orphans: dict[str, int] = {}  # resident children by the key of a parent that is absent
        self._heaps: list[dict[str, Heap]] = [{} for _ in range(lanes)]  # by share
        self._priorities = 0  # how many nodes have one other than 0
        self._shares: dict[str, str] = {}  # one text for all who have the same
        self._waiting: Node | None = None  # the newest leaf, not filed yet: it is the parent of the next one as a rule

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def find(self, key: str) -> Node | None:
        """Return what is known of `key`, or `None`."""
        return self._nodes.get(key)

    def insert(self, key: str, *, parent: str | None, size: int, priority: int, rank: Rank, lane: int = 0) -> Node:
        """Add an entry, or give a known one a new parent, size, priority, rank and lane; its `uses` stay."""
        nodes = self._nodes
        node = nodes.get(key)
        if node is not None:
            self._replace(node, parent, size, (priority, *rank, node.order[-1]), lane)
            return node
        node = Node((priority, *rank, key), size, lane, self._share(key))
        self.lane_bytes[lane] += size
        self.size += size
        if priority:
            self._priorities += 1
        if self._orphans:
            node.kids = self._orphans.pop(key, 0)
        above = nodes.get(parent) if parent is not None and not node.kids else None
        nodes[key] = node
        if above is not None:  # the usual case: nothing descends from a new entry, and the one above it is there
            node.parent = above.order[-1]  # one text for all who name it
            above.kids += 1
        elif parent is not None:
            self._link(node, parent)
        if not node.kids:
            waiting, self._waiting = self._waiting, node
            if waiting is not None and not waiting.kids:
                self._file(waiting)
        return node

    def _replace(self, node: Node, parent: str | None, size: int, order: Order, lane: int) -> None:
        self.lane_bytes[node.lane] += size - node.size
        self.size += size - node.size
        node.size = size
        if parent != node.parent:
            self._unlink(node)
            self._link(node, parent)
        self._place(node, order, lane)

    def rerank(self, node: Node, rank: Rank, lane: int | None = None) -> None:
        """Give `node` another place in the order, and optionally move it to another lane."""
        order = node.order
        self._place(node, (order[0], *rank, order[-1]), node.lane if lane is None else lane)

    def remove(self, key: str) -> Node | None:
        """Forget `key`; return what was known of it."""
        node = self._nodes.pop(key, None)
        if node is not None:
            if node.filed is not None:
                self._heaps[node.lane][node.share].current -= 1
            elif node is self._waiting:
                self._waiting = None
            if node.kids:
                self._orphans[key] = node.kids
            self.lane_bytes[node.lane] -= node.size
            self.size -= node.size
            if node.order[0]:
                self._priorities -= 1
            if node.parent is not None:
                self._unlink(node)
        return node

    def coldest(self, lane: int = 0) -> Node | None:
        """Return the leaf of `lane` that goes next, shares and protection aside, or `None`."""
        best: Node | None = None
        for heap in self._heaps[lane].values():
            node = heap.first()
            if node is not None and (best is None or node.order < best.order):
                best = node
        node = self._waiting
        if node is not None and node.lane == lane and not node.kids:
            return node if best is None or node.order < best.order else best
        return best

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> list[str]:
        """Answer as `Policy.victims` does."""
        if need <= 0 or need > self.size:
            return []
        first, spared = None, False
        if over_share is None:  # the usual question, for room for one entry, is answered without a walk
            first = self.coldest() if len(self.lane_bytes) == 1 else self._first()
            spared = first is not None and protected is not nothing and protected(first.key)
            if first is not None and first.size >= need and not spared:
                return [first.order[-1]]
        self._file_waiting()
        names: list[str] = []
        walk = Walk(self._nodes, self.lane_bytes, self._prefer, over_share)
        popped: list[tuple[Heap, list[tuple[Order, bool]]]] = []
        try:
            for share, heap in ((share, heap) for heaps in self._heaps for share, heap in heaps.items()):
                items: list[tuple[Order, bool]] = []
                popped.append((heap, items))
                walk.add(heap.drain(items), uniform=share != "")
            while need > 0:
                node = walk.next()
                if node is None:
                    return []
                if not (spared and node is first) and not protected(node.key):
                    walk.take(node)
                    names.append(node.key)
                    need -= node.size
        finally:
            for heap, items in popped:
                heap.put_back(items)
        return names

    def _first(self) -> Node | None:
        """Return what a walk over several lanes would offer first."""
        order = range(len(self.lane_bytes)) if self._prefer is None else self._prefer(self.lane_bytes)
        best: Node | None = None
        for lane in order:
            node = self.coldest(lane)
            if node is not None and (best is None or node.order[0] < best.order[0]):
                if not self._priorities:
                    return node
                best = node
        return best

    def coldest_first(self) -> Iterator[str]:
        """Iterate the keys as they are now, in the order in which they would go."""
        left = {key: node.kids for key, node in self._nodes.items() if node.kids}
        walk = Walk(dict(self._nodes), self.lane_bytes, self._prefer, None, left)
        for lane in range(len(self.lane_bytes)):
            leaves = [node for node in self._nodes.values() if node.lane == lane and not node.kids]
            walk.add(iter(sorted(leaves, key=lambda node: node.order)), uniform=True)
        return walk.keys()

    def _share(self, key: str) -> str:
        share = share_of(key)
        shares = self._shares  # it never shrinks, and does not grow once it is full
        return shares.setdefault(share, share) if len(shares) < _SHARES else shares.get(share, "")

    def _place(self, node: Node, order: Order, lane: int) -> None:
        if lane != node.lane:
            self.lane_bytes[node.lane] -= node.size
            self.lane_bytes[lane] += node.size
            if node.filed is not None:
                self._unfile(node)
            node.lane = lane
        if order[0] or node.order[0]:
            self._priorities += (order[0] != 0) - (node.order[0] != 0)
        node.order = order
        if node is not self._waiting and not node.kids:
            self._file(node)

    def _file_waiting(self) -> None:
        node, self._waiting = self._waiting, None
        if node is not None and not node.kids:
            self._file(node)

    def _file(self, node: Node) -> None:
        if node.filed is not None:
            if node.filed <= node.order:
                return  # its item comes up no later than it should, and is corrected then
            self._unfile(node)
        heaps = self._heaps[node.lane]
        heap = heaps.get(node.share)
        if heap is None:
            heap = heaps[node.share] = Heap(self._nodes)
        heap.file(node)

    def _unfile(self, node: Node) -> None:
        self._heaps[node.lane][node.share].forget(node)

    def _link(self, node: Node, parent: str | None) -> None:
        if parent is None or self._closes_circle(node, parent):
            node.parent = None
            return
        above = self._nodes.get(parent)
        if above is None:
            node.parent = parent
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
        else:
            node.parent = above.order[-1]
            above.kids += 1

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            return
        above = self._nodes.get(parent)
        if above is None:
            left = self._orphans.pop(parent) - 1
            if left:
                self._orphans[parent] = left
            return
        above.kids -= 1
        if not above.kids and above is not self._waiting:
            self._file(above)

    def _closes_circle(self, node: Node, parent: str) -> bool:
        """Tell whether `parent` descends from `node`: links come from media that others may write."""
        if parent == node.key:
            return True
        if not node.kids:
            return False  # the usual case: nothing descends from a new entry
        above = self._nodes.get(parent)
        while above is not None and above is not node:
            above = self._nodes.get(above.parent) if above.parent is not None else None
        return above is node
