"""A trace through tiers: look up, promote, put, evict, demote, as the store does it, without values and at once."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvtier.placement import (
    USES_REMEMBERED,
    TouchMemory,
    demotion_target,
    has_filter,
    promotion_targets,
    refill_targets,
    write_targets,
)
from kvtier.sessions import Sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.sim.tier import SimTier
    from kvtier.sim.trace import Request, Trace

SNAPSHOT_BYTES: Final = 64 << 20  # the store publishes a put in parts of about this size
_TELL_EVERY: Final = 256


@contextmanager
def _no_collector() -> Iterator[None]:
    """Keep the cyclic collector from looking at a million living entries again and again; a replay leaves no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(slots=True)
class Outcome:
    """What a replay counted; the unit is a block unless the name says otherwise."""

    requests: int = 0
    blocks: int = 0
    hits: int = 0
    tier_hits: list[int] = field(default_factory=list)
    run_lengths: list[list[int]] = field(default_factory=list)  # per request the hits of each tier, if asked for

    @property
    def hit_rate(self) -> float:
        """Share of the blocks that were hit."""
        return self.hits / self.blocks if self.blocks else 0.0


class Replay:
    """Runs requests through tiers, the uppermost first. A request is a `get` of its longest prefix, then a `put`."""

    def __init__(
        self,
        tiers: Sequence[SimTier],
        *,
        block_bytes: int,
        full_blocks: bool = False,
        hints: bool = False,
        keep_runs: bool = False,
    ) -> None:
        """Prepare a replay.

        Args:
            tiers: empty ones, in their order.
            block_bytes: size of every block.
            full_blocks: store full blocks only, as the store does by default; rates stay over all blocks.
            hints: tell the tiers of sessions that ended, where the trace says so.
            keep_runs: note the hits of every request.
        """
        self.tiers = tiers
        self.outcome: Outcome = Outcome(tier_hits=[0] * len(tiers))
        self._block_bytes = block_bytes
        self._full_blocks = full_blocks
        self._keep_runs = keep_runs
        self._hints = hints
        self._now = 0.0
        self._touches = TouchMemory()
        self._uses = TouchMemory(USES_REMEMBERED) if has_filter(tiers) else None
        self._sessions = Sessions()

    def run(self, trace: Trace, *, on_progress: Callable[[int], None] | None = None) -> Outcome:
        """Replay the whole trace; `on_progress` is told how many requests are done, now and then."""
        with _no_collector():
            for number, request in enumerate(trace.requests):
                self.take(request)
                if on_progress is not None and number % _TELL_EVERY == 0:
                    on_progress(number)
        return self.outcome

    def take(self, request: Request) -> int:
        """Run one request; return its hits."""
        keys = request.keys[: request.full] if self._full_blocks else request.keys
        found = self._lookup(keys)
        hits, outcome = len(found), self.outcome
        self._now = request.seconds
        outcome.requests += 1
        outcome.blocks += len(request.keys)
        outcome.hits += hits
        self._read(keys, found, request)
        self._put(keys, hits, request)
        if self._hints and request.session is not None:
            self._sessions.used(request.session, keys)
            if request.ends_session:
                self.end_session(request.session, request.seconds)
        return hits

    def _lookup(self, keys: Sequence[str]) -> list[int]:
        """Return the number of the uppermost tier that has each key of the longest leading run."""
        found: list[int] = []
        if len(self.tiers) == 1:  # the usual case, kept short
            resident = self.tiers[0].resident
            for key in keys:
                if key not in resident:
                    break
                found.append(0)
            return found
        for key in keys:
            for place, tier in enumerate(self.tiers):
                if key in tier.resident:
                    found.append(place)
                    break
            else:
                break
        return found

    def _read(self, keys: Sequence[str], found: Sequence[int], request: Request) -> None:
        hits = [0] * len(self.tiers)
        for place in found:
            hits[place] += 1
        for place, tier in enumerate(self.tiers):
            tier.hits += hits[place]
            tier.read_bytes += hits[place] * self._block_bytes
            self.outcome.tier_hits[place] += hits[place]
        if self._keep_runs:
            self.outcome.run_lengths.append(hits)
        if hits[0] < len(found):
            self._promote(keys, found, request)
        now = request.seconds
        for tier in self.tiers:
            resident, touch = tier.resident, tier.policy.touch
            for i in range(len(found) - 1, -1, -1):  # the deepest first: leaves stay older than parents
                if keys[i] in resident:
                    touch(keys[i], now)
            if tier.retired:
                tier.restore(keys[: len(found)], now, request.priority)
        if self._uses is not None:
            self._refill(self._uses, keys, found, request)

    def _refill(self, uses: TouchMemory, keys: Sequence[str], found: Sequence[int], request: Request) -> None:
        """Write what was used twice by now to the tiers whose filter waited for that."""
        for i in range(len(found)):
            if uses.again(keys[i]):
                place = next(place for place, tier in enumerate(self.tiers) if keys[i] in tier.resident)
                for target in refill_targets(self.tiers, place):
                    if keys[i] not in self.tiers[target].resident:
                        self._keep(target, keys, i, request)

    def _promote(self, keys: Sequence[str], found: Sequence[int], request: Request) -> None:
        reading = set(keys[: len(found)])
        for i, place in enumerate(found):
            if place == 0:
                continue
            again = self._touches.again(keys[i])
            for target in promotion_targets(self.tiers, place, again=again):
                tier = self.tiers[target]
                if keys[i] not in tier.resident and self._keep(
                    target, keys, i, request, protected=reading.__contains__
                ):
                    tier.promoted += 1

    def _put(self, keys: Sequence[str], first: int, request: Request) -> None:
        """Put the keys from `first` on: room for a part of them, then that part, as the store does."""
        if len(self.tiers) == 1 and self._block_bytes >= SNAPSHOT_BYTES:
            self._put_singly(keys, first, request)
            return
        top, size = self.tiers[0], self._block_bytes
        resident, capacity = top.resident, top.settings.capacity
        batch: list[int] = []
        for i in range(first, len(keys)):
            key = keys[i]
            if key in resident:  # behind a gap
                self._touch(key, request.seconds)
                self._write_down(keys, i, request)
                continue
            if top.usage + (len(batch) + 1) * size > capacity and not self._make_room(0, (len(batch) + 1) * size):
                self._publish(batch, keys, request)
                if not self._make_room(0, size):
                    top.dropped += 1
                    continue
            batch.append(i)
            if len(batch) * size >= SNAPSHOT_BYTES:
                self._publish(batch, keys, request)
        if batch:
            self._publish(batch, keys, request)

    def _put_singly(self, keys: Sequence[str], first: int, request: Request) -> None:
        """Do the same with one tier and blocks that are a part each: the usual case, kept short."""
        tier, size, now, priority = self.tiers[0], self._block_bytes, request.seconds, request.priority
        resident, capacity = tier.resident, tier.settings.capacity
        above = keys[first - 1] if first else None
        for key in keys[first:]:
            if key in resident:  # behind a gap
                tier.policy.touch(key, now)
            elif tier.usage + size <= capacity or self._make_room(0, size):
                tier.take(key, above, size, now, priority)
            else:
                tier.dropped += 1
            above = key

    def _touch(self, key: str, now: float) -> None:
        for tier in self.tiers:
            if key in tier.resident:
                tier.policy.touch(key, now)

    def _publish(self, batch: list[int], keys: Sequence[str], request: Request) -> None:
        top, size, now = self.tiers[0], self._block_bytes, request.seconds
        for i in batch:
            top.take(keys[i], keys[i - 1] if i else None, size, now, request.priority)
            self._write_down(keys, i, request)
        batch.clear()

    def _write_down(self, keys: Sequence[str], i: int, request: Request) -> None:
        """Write to the write-through tiers below that lack it, as far as their filters let it pass."""
        tiers = self.tiers
        if len(tiers) == 1:
            return
        again = self._uses is None or self._uses.again(keys[i])
        for place in write_targets(tiers, top=0, again=again):
            if keys[i] not in tiers[place].resident:
                self._keep(place, keys, i, request)
        if not again:
            for place in refill_targets(tiers, 0):
                tiers[place].held_back += 1

    def _keep(
        self,
        place: int,
        keys: Sequence[str],
        i: int,
        request: Request,
        *,
        protected: Callable[[str], bool] | None = None,
    ) -> bool:
        tier, size, now = self.tiers[place], self._block_bytes, request.seconds
        if not tier.policy.admit(keys[i], size=size, now=now) or not self._make_room(place, size, protected):
            tier.dropped += 1
            return False
        parent = keys[i - 1] if i else None
        tier.add(keys[i], parent=parent, size=size, now=now, priority=request.priority)
        return True

    def _make_room(self, place: int, size: int, protected: Callable[[str], bool] | None = None) -> bool:
        tier = self.tiers[place]
        need = tier.usage + size - tier.settings.capacity
        if need <= 0:
            return True
        if size > tier.settings.capacity:
            return False
        victims = tier.policy.victims(need) if protected is None else tier.policy.victims(need, protected=protected)
        if not victims:
            return False
        several = len(self.tiers) > 1
        for key in victims:
            if several:
                self._let_go(place, key)
            tier.drop(key)
        return True

    def _let_go(self, place: int, key: str) -> None:
        """Offer what is evicted to the tier below, but for what an ended session left."""
        if key in self.tiers[place].retired:
            return
        again = self._uses is None or self._uses.twice(key)
        below = demotion_target(self.tiers, place)
        if below is not None and demotion_target(self.tiers, place, again=again) is None:
            self.tiers[below].held_back += 1
        elif below is not None:
            self._demote(self.tiers[place], below, key)

    def _demote(self, tier: SimTier, below: int, key: str) -> None:
        target = self.tiers[below]
        parent, size = tier.resident[key]
        if key not in target.resident and self._make_room(below, size):
            target.add(key, parent=parent, size=size, now=self._now)
            target.demoted += 1

    def end_session(self, session: str, now: float) -> None:
        """Let what only this session used go before anything else."""
        for key in self._sessions.end(session):
            for tier in self.tiers:
                tier.retire(key, now)
