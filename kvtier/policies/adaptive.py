"""Adaptive: learns how long each kind of entry waits for its next use, and evicts what pays least for its room."""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import count
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from kvtier.policies.duel import Duel
from kvtier.policies.leaf_policy import LeafPolicy
from kvtier.policies.leaves import Leaves
from kvtier.policies.reuse_times import ReuseTimes, bin_of

if TYPE_CHECKING:
    from kvtier.policies.leaf_heap import Node

_OFTEN, _SOMETIMES, _AGAIN, _FIRST = 0, 1, 2, 3  # classes by number of uses; newcomers have some more
_USES: Final = ((8, _OFTEN), (4, _SOMETIMES), (2, _AGAIN))
_LENGTHS: Final = (8, 24, 64)  # entries in a run of uses: newcomers of short and long prompts are told apart
_HINTED = _FIRST + 2 * (len(_LENGTHS) + 1)
_HINTS: Final = (10.0, 60.0, 600.0)  # expected seconds to the next use: each range is a class of its own
_CLASSES = _HINTED + len(_HINTS) + 1
_PLAIN = 2 * _CLASSES  # the lane in order of use, while recency does better
_OPEN = _PLAIN + 1  # the lane of the prompt that is being put or used: what comes next is useless without it
_LESSON_USES = 5_000
_RANK_USES = 16
_AGED_AT_ONCE = 64
_SPARE_GHOSTS = 20_000


class _Record(msgspec.Struct, gc=False, eq=False):
    """What is remembered of a key, also for a while after its entry went. As of `Node` there may be a million."""

    last: float
    number: int | None = None
    uses: int = 0
    kind: int = _FIRST
    hint: int = -1
    resident: bool = False


class AdaptivePolicy(LeafPolicy):
    """Evicts from the class of entries whose chance of use per second of room is least; no tuning.

    Classes are told by what can be seen of an entry: how often it was used, whether it began a prompt or continued
    one, how long that was, and what a hint said. For each the times between uses are counted, also over entries that
    are gone. The worth of an entry rises with its age up to a peak and then falls, so that within a class the newest
    or the oldest goes: two lanes, "young" in reverse order of use and "old" in order of use. What is learnt is
    checked against plain recency, and where that does better it is followed.
    """

    name: ClassVar[str] = "adaptive"

    def __init__(self) -> None:
        super().__init__(Leaves(lanes=_OPEN + 1, prefer=lambda _bytes: self._order))
        self._order = list(range(_OPEN + 1))
        self._times = ReuseTimes(_CLASSES)
        self._duel = Duel()
        self._known: dict[str, _Record] = {}
        self._ghosts: OrderedDict[str, None] = OrderedDict()
        self._young: list[deque[tuple[float, str]]] = [deque() for _ in range(_CLASSES)]
        self._serial = count()
        self._run: list[tuple[str, _Record]] = []  # uses that belong to one prompt, as far as their order tells
        self._tail: str | None = None
        self._above: str | None = None  # what a run of touches, deepest first, goes on with
        self._attached = False  # whether the run's newcomers continue something that few others share
        self._untaught = self._unranked = 0

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        """Take in `key`; what it is worth is known by those like it."""
        self._tick(now)
        if not self._run or parent is None or parent != self._tail:
            self._end_run()
        if not self._run or self._above is not None:
            self._attached = self._few_share(parent)
            self._above = None
        self._tail = key
        known = self._leaves.find(key)
        record = self._use(key, size, now, hit=known is not None)
        record.resident = True
        rank = (now, next(self._serial))
        self._leaves.insert(key, parent=parent, size=size, priority=priority, rank=rank, lane=_OPEN)

    def touch(self, key: str, now: float) -> None:
        """Count a use, and how long it was waited for."""
        node = self._leaves.find(key)
        if node is None:
            return
        self._tick(now)
        if self._above != key:
            self._end_run()
            self._tail = key
        self._above = node.parent or ""
        self._use(key, node.size, now, hit=True)
        self._leaves.rerank(node, (now, next(self._serial)), _OPEN)

    def expect(self, key: str, *, seconds: float, now: float) -> None:
        """Put `key` in a class with others of which a like time was said; what that is worth is learnt too."""
        record, node = self._known.get(key), self._leaves.find(key)
        if record is not None and node is not None:
            record.hint = _HINTED + sum(seconds > bound for bound in _HINTS)
            if node.lane != _OPEN:
                record.kind = record.hint
                self._place(node, record, now)

    def remove(self, key: str) -> None:
        """Forget the entry, but not yet what was seen of it."""
        if self._leaves.remove(key) is None:
            return
        self._known[key].resident = False
        if key not in self._duel:
            self._haunt(key)

    def _tick(self, now: float) -> None:
        self._unranked += 1
        if self._unranked >= _RANK_USES or self._unranked > len(self._leaves) // 64:
            self._unranked = 0
            self._rank(now)

    def _few_share(self, parent: str | None) -> bool:
        above = self._known.get(parent) if parent is not None else None
        return above is not None and above.uses < _USES[0][0]

    def _use(self, key: str, size: int, now: float, *, hit: bool) -> _Record:
        record = self._known.get(key)
        if record is None:
            record = self._known[key] = _Record(now)
        else:
            self._times.used(record.kind, now - record.last)
            if not record.resident:
                self._ghosts.pop(key, None)
        record.uses += 1
        record.last = now
        self._run.append((key, record))
        held = self._leaves.size if hit else self._leaves.size + size
        for gone in self._duel.used(key, size, held, before=record.number, hit=hit):
            if not self._known[gone].resident:
                self._haunt(gone)
        record.number = self._duel.number
        return record

    def _haunt(self, key: str) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > 2 * len(self._leaves) + _SPARE_GHOSTS:
            forgotten, _ = self._ghosts.popitem(last=False)
            del self._known[forgotten]

    def _end_run(self) -> None:
        """Give every entry of the run its class, now that its length is known."""
        run = self._run
        newcomer = _FIRST + self._attached * (len(_LENGTHS) + 1) + sum(len(run) > bound for bound in _LENGTHS)
        for key, record in run:
            kind = record.hint if record.hint >= 0 else _kind(record.uses, newcomer)
            self._times.came(kind)
            record.kind = kind
            node = self._leaves.find(key)
            if node is not None:
                self._place(node, record, record.last)
        self._duel.end_run(len(self._leaves))
        self._untaught += len(run)
        if self._untaught >= _LESSON_USES:
            self._untaught = 0
            self._times.learn()
        self._run, self._tail, self._above, self._attached = [], None, None, False

    def _place(self, node: Node, record: _Record, now: float) -> None:
        if self._duel.recency:
            self._leaves.rerank(node, (now, next(self._serial)), _PLAIN)
        elif self._times.peak_seconds[record.kind] > 0:
            self._leaves.rerank(node, (-now, -next(self._serial)), 2 * record.kind)
            young = self._young[record.kind]
            young.append((now, node.key))
            if len(young) > 2 * len(self._leaves) + _AGED_AT_ONCE:
                young = deque(item for item in young if self._is_young(record.kind, *item))
                self._young[record.kind] = young
        else:
            self._leaves.rerank(node, (now, next(self._serial)), 2 * record.kind + 1)

    def _is_young(self, kind: int, last: float, key: str) -> bool:
        node = self._leaves.find(key)
        return node is not None and node.lane == 2 * kind and self._known[key].last == last

    def _age(self, now: float) -> None:
        """Move those past their class's peak to its old lane, a bounded number at a time."""
        for kind, young in enumerate(self._young):
            grown = now - self._times.peak_seconds[kind]
            for _ in range(_AGED_AT_ONCE):
                if not young or young[0][0] > grown:
                    break
                last, key = young.popleft()
                node = self._leaves.find(key)
                if node is not None and self._is_young(kind, last, key):
                    self._leaves.rerank(node, (last, next(self._serial)), 2 * kind + 1)

    def _rank(self, now: float) -> None:
        """Order the lanes by the worth of who would go next in each."""
        self._age(now)
        ranked: list[tuple[float, float, int]] = []
        for lane in range(_PLAIN + 1):
            node = self._leaves.coldest(lane) if self._leaves.lane_bytes[lane] else None
            if node is not None:
                record = self._known[node.key]
                worth = 0.0 if self._duel.recency else self._times.worth[record.kind][bin_of(now - record.last)]
                ranked.append((worth, record.last, lane))
        ranked.sort()
        order = [lane for _, _, lane in ranked]
        chosen = set(order)
        self._order = [*order, *(lane for lane in range(_OPEN + 1) if lane not in chosen)]


def _kind(uses: int, newcomer: int) -> int:
    return next((kind for least, kind in _USES if uses >= least), newcomer)
