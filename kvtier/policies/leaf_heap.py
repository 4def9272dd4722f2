"""Leaves in order: a queue for what comes in order, a heap for the rest; out-of-date items go when they come up."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

Order: TypeAlias = tuple[Any, ...]
"""Priority, then rank, then key: what is lower goes first, and no two are equal."""

_SLACK = 64


class Node(msgspec.Struct, gc=False, eq=False):
    """What is known of one entry. Owned by `Leaves`; policies read it and keep their own count in `uses`.

    As of `Entry` there may be a million, so the garbage collector does not know it: it refers to nothing that leads
    back to it, and stands in heaps by its order alone.
    """

    order: Order
    size: int
    lane: int
    share: str  # whose heap it stands in when it is a leaf
    parent: str | None = None
    filed: Order | None = None  # the order under which it stands in the heap of its lane and share, if it does
    kids: int = 0  # resident children
    uses: int = 1

    @property
    def key(self) -> str:
        """The entry's key."""
        key: str = self.order[-1]
        return key


class Heap:
    """Leaves of one share and lane, with items among them that are out of date, but never more than half for long.

    An item is the order of a node. It is current if it is the very object that the node was filed under. Orders that
    rise or fall from one to the next (uses in order of time) stand in a queue; only what comes between is sorted.
    """

    __slots__ = ("_between", "_nodes", "_queue", "current")

    def __init__(self, nodes: dict[str, Node]) -> None:
        self._nodes = nodes
        self._queue: deque[Order] = deque()
        self._between: list[Order] = []
        self.current: int = 0  # items that are not out of date

    def __len__(self) -> int:
        return len(self._queue) + len(self._between)

    def file(self, node: Node) -> None:
        """Add `node`, which stands in no heap, under its order."""
        self.current += 1
        self._add(node)
        if len(self._queue) + len(self._between) > 2 * self.current + _SLACK:
            self._queue = deque(item for item in self._queue if self._of(item) is not None)
            self._between = [item for item in self._between if self._of(item) is not None]
            heapify(self._between)

    def _add(self, node: Node) -> None:
        queue, order = self._queue, node.order
        node.filed = order
        if not queue or order <= queue[0]:  # a parent just after its last child: the usual case
            queue.appendleft(order)
        elif order >= queue[-1]:
            queue.append(order)
        else:
            heappush(self._between, order)

    def forget(self, node: Node) -> None:
        """Leave the item of `node` to be dropped later."""
        node.filed = None
        self.current -= 1

    def first(self) -> Node | None:
        """Return the leaf that goes first, or `None`; items that are out of date go for good on the way."""
        queue, between, nodes = self._queue, self._between, self._nodes
        while queue or between:
            queued = not between or (bool(queue) and queue[0] < between[0])
            item = queue[0] if queued else between[0]
            node = nodes.get(item[-1])
            if node is None or node.filed is not item:
                self._pop(queued)
            elif node.kids:
                self._pop(queued)
                self.forget(node)
            elif node.order is not item:  # used since it was filed: its turn comes later
                self._pop(queued)
                self._add(node)
            else:
                return node
        return None

    def _pop(self, queued: bool) -> Order:  # noqa: FBT001  # where the first item stands
        return self._queue.popleft() if queued else heappop(self._between)

    def put_back(self, popped: list[tuple[Order, bool]]) -> None:
        """Return what `drain` popped."""
        for item, queued in reversed(popped):
            if queued:
                self._queue.appendleft(item)
            else:
                heappush(self._between, item)

    def drain(self, popped: list[tuple[Order, bool]]) -> Iterator[Node]:
        """Pop leaves in order, noting each in `popped` for `put_back`; other items go for good."""
        queue, between = self._queue, self._between
        while queue or between:
            queued = not between or (bool(queue) and queue[0] < between[0])
            item = self._pop(queued)
            node = self._of(item)
            if node is None:
                continue
            if node.kids:
                self.forget(node)
            elif node.order is not item:  # used since it was filed: its turn comes later
                self._add(node)
            else:
                popped.append((item, queued))
                yield node

    def _of(self, item: Order) -> Node | None:
        """Return the node whose current item this is."""
        node = self._nodes.get(item[-1])
        return node if node is not None and node.filed is item else None
