"""The way in: a snapshot into the top tier, then on its way to the tiers below."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvtier.chunk.container import PAGE, payload_offset, payload_size, plan_segments
from kvtier.chunk.dtypes import raw_size
from kvtier.chunk.header import Header
from kvtier.concurrency.gate import gate_of_call
from kvtier.errors import CapacityError, CodecError
from kvtier.store.lookup import locate
from kvtier.store.results import ChunkPut
from kvtier.store.snapshots import take_snapshots
from kvtier.tier.encode import bound_of, encoded_for, shared_steps
from kvtier.tier.memory import MemoryTier
from kvtier.tier.value import Value
from kvtier.tier.writing import STORED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kvtier.buffers.arena import Slot
    from kvtier.chunk.segments import SegmentSpec
    from kvtier.codecs.chain import CodecChain
    from kvtier.concurrency.deadline import Deadline
    from kvtier.concurrency.generations import Claim
    from kvtier.store.engine import Engine, Tier
    from kvtier.tier.stored import Removed, StoredTier

SNAPSHOT_JOB_BYTES = 64 << 20  # a cancelled put waits for at most one such copy job
AT_A_TIME = 8  # values, about 0.5 ms of the loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """One value to place: what it is, and `fill`, which copies it into one view per segment (called in a thread).

    `tensors`, if there, returns the segments' elements where they lie, for a codec that takes them from there.
    """

    key: str
    namespace: str
    parent: str | None
    kind: str
    specs: Sequence[SegmentSpec]
    tokens: int
    lossy: bool
    fill: Callable[[Sequence[memoryview]], None]
    tensors: Callable[[], Sequence[torch.Tensor] | None] | None = None
    replace: bool = False  # put over whatever the key holds; without it a key names one content for ever

    def header(self, *, created: float, expires: float | None) -> Header:
        """Return the header of the raw snapshot."""
        sizes = [raw_size(spec.dtype, spec.shape) for spec in self.specs]
        return Header(
            key=self.key,
            namespace=self.namespace,
            parent=self.parent,
            kind=self.kind,
            segments=plan_segments(self.specs, sizes),
            tokens=self.tokens,
            created=created,
            expires=expires,
            lossy=self.lossy,
        )


@dataclass(slots=True, kw_only=True)
class Placed:
    """What became of one put so far, and the outcomes that lower tiers still owe."""

    key: str
    status: str
    reason: str = ""
    offered: list[tuple[StoredTier, asyncio.Future[str] | None]]
    removals: list[asyncio.Task[Removed]] = field(default_factory=list)  # of the values it took the place of

    def result(self) -> ChunkPut:
        """Return it for the caller."""
        return ChunkPut(key=self.key, status=self.status, reason=self.reason)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """One put between its claim on the key and its publication."""

    put: Put
    value: Value
    claim: Claim
    result: Placed


class Placing:
    """Places the values of one put call, in order."""

    def __init__(self, engine: Engine, *, expires: float | None, priority: int, deadline: Deadline) -> None:
        self._engine = engine
        self._expires = expires
        self._priority = priority
        self._deadline = deadline
        self._gate = gate_of_call()  # before the caller's memory
        self._reserved: dict[int, int] = {}  # bytes counted against the top tier for a value, by identity
        self._steps: CodecChain | None = shared_steps(engine.tiers)

    async def place(self, puts: Sequence[Put]) -> list[Placed]:
        """Place every value; the callers' memory is not touched once this returns, raises or was cancelled."""
        placed: list[Placed] = []
        batch: list[_Snapshot] = []
        try:
            for number, put in enumerate(puts, start=1):
                if number % AT_A_TIME == 0:
                    await asyncio.sleep(0)  # a long prompt's bookkeeping takes turns with other calls
                present = self._present(put)
                if present is not None:
                    placed.append(present)
                    continue
                begun = await self._begin(put, batch)
                if begun is None:
                    placed.append(self._dropped(put, "no-memory"))
                    continue
                placed.append(begun.result)
                batch.append(begun)
                if sum(item.value.size for item in batch) >= SNAPSHOT_JOB_BYTES:
                    await self._snapshot(batch)
            await self._snapshot(batch)
        finally:
            self._end(batch)
        return placed

    async def _begin(self, put: Put, batch: list[_Snapshot]) -> _Snapshot | None:
        """Claim the key, then find memory: a delete that comes while this waits came after the put, and wins."""
        claim = self._engine.generations.claim(put.key)
        try:
            value = await self._new_value(put, batch)
        except BaseException:
            claim.end()
            raise
        if value is None:
            claim.end()
            return None
        return _Snapshot(put, value, claim, Placed(key=put.key, status="queued", offered=[]))

    def _end(self, batch: list[_Snapshot]) -> None:
        while batch:
            item = batch.pop()
            item.claim.end()
            self._unreserve(item.value)
            item.value.release()

    def _present(self, put: Put) -> Placed | None:
        """Settle a put whose content the top tier has already: only fill the tiers that lack it."""
        if put.replace:
            return None
        engine, top = self._engine, self._engine.top
        where = locate(engine, put.key, exact=not put.lossy)
        if where is None or (top is not None and (where.memory is None or where.memory[0] is not top)):
            return None
        self._extend_life(put.key)
        offered: list[tuple[StoredTier, asyncio.Future[str] | None]] = []
        if where.memory is not None and top is not None:
            value = top.lend(where.memory[1])
            try:
                offered = engine.movement.write_down(value, below=0, expires=self._expires, priority=self._priority)
            finally:
                value.release()
        elif any(
            engine.movement.lacks(tier, put.key, lossy=put.lossy) and tier.settings.write == "through" and tier.up
            for tier in engine.stored_tiers
        ):
            return None  # some tier lacks it and no memory has it: take the snapshot
        return Placed(key=put.key, status="present", offered=offered)

    def _extend_life(self, key: str) -> None:
        for tier in self._engine.tiers:
            entry = tier.find(key)
            if entry is not None and tier.ledger.extend_life(entry, self._expires) and not isinstance(tier, MemoryTier):
                tier.set_expiry(entry)
            tier.ledger.touch(key)

    async def _new_value(self, put: Put, batch: list[_Snapshot]) -> Value | None:
        """Return an empty raw value for the snapshot, or None if there is no memory for it.

        If it has to wait, what this call has begun is published first: that makes room by itself, and two calls that
        wait with memory in their hands could wait for each other.
        """
        header = put.header(created=self._engine.clock.wall(), expires=self._expires)
        offset = payload_offset(put.specs, put.key)
        size = offset + payload_size(header.segments)
        room = size if self._steps is None or put.tensors is None else max(size, offset + bound_of(self._steps, header))
        pages = -(-room // PAGE) * PAGE
        slot = self._free_slot(put.key, pages)
        if slot is None:
            await self._snapshot(batch)
            slot = self._free_slot(put.key, pages) or await self._awaited_slot(pages)
        if slot is None:
            return None
        value = Value(header, slot, payload_offset=offset, size=size, sealed=False)
        self._reserve(value)
        return value

    def _free_slot(self, key: str, size: int) -> Slot | None:
        """Find memory for a new entry without waiting: evict what the capacity asks for.

        More is evicted only where free memory lies in pieces. Memory that evicted values still hold on their way down
        comes back by itself: evicting more would empty the tier and free nothing.
        """
        arena, top = self._engine.arena, self._engine.top
        if top is None or size > top.ledger.capacity:  # it only passes through on its way down
            return arena.try_allocate(size, entry=self._spares_reserve(size))
        older = top.ledger.index.find(key)
        growth = size if older is None else max(0, size - older.size)
        for victim in top.ledger.victims_for(growth, sparing=older) or ():
            top.evict(victim)
        slot = arena.try_allocate(size, entry=True)
        while slot is None and arena.free >= size + arena.staging:
            victims = top.ledger.victims(size, sparing=older)
            if not victims:
                break
            for victim in victims:
                top.evict(victim)
            slot = arena.try_allocate(size, entry=True)
        if slot is None and older is not None:
            slot = arena.try_allocate(size)  # the value it replaces gives as much back in a moment
        return slot

    def _spares_reserve(self, size: int) -> bool:
        """Tell whether a value leaves the reserve to encoding and reads.

        It does where nothing else bounds what is on its way: without a memory tier on top, unless it fits nowhere else.
        """
        arena = self._engine.arena
        return self._engine.top is None and size <= arena.capacity - arena.staging

    async def _awaited_slot(self, size: int) -> Slot | None:
        """Wait for memory, where the first tier is on a medium or told to wait."""
        top = self._engine.top
        if top is not None and top.settings.on_full != "wait":
            return None
        try:
            return await self._engine.arena.allocate(
                size, timeout=self._deadline.remaining(), entry=self._spares_reserve(size)
            )
        except (TimeoutError, CapacityError):
            return None

    def _reserve(self, value: Value) -> None:
        """Count a value against the top tier before it stands there: the next one of this call must leave it room."""
        top = self._engine.top
        if top is not None and value.slot.size <= top.ledger.capacity:
            top.ledger.reserved += value.slot.size
            self._reserved[id(value)] = value.slot.size

    def _unreserve(self, value: Value) -> None:
        if self._engine.top is not None:
            self._engine.top.ledger.reserved -= self._reserved.pop(id(value), 0)

    async def _snapshot(self, batch: list[_Snapshot]) -> None:
        """Copy a batch in one thread job, then publish each value; empties the batch."""
        if not batch:
            return
        snapshot = partial(take_snapshots, self._steps, self._engine.services)
        await self._engine.services.workers.run(snapshot, self._gate, [(item.put, item.value) for item in batch])
        for number, item in enumerate(batch, start=1):
            if number % AT_A_TIME == 0:
                await asyncio.sleep(0)
            if item.claim.stale:  # deleted or put anew meanwhile: that call came later and wins
                item.result.status, item.result.reason = "dropped", "superseded"
            elif not item.put.replace and self._there(item.put):
                item.result.status = "present"  # the same content came by another call meanwhile
            else:
                await self._publish(item.put, item.value, item.result)
        self._end(batch)

    def _there(self, put: Put) -> bool:
        """Tell whether the top tier has the content; without a memory tier on top, whether any has it or will."""
        top = self._engine.top
        if top is None:
            return locate(self._engine, put.key, exact=not put.lossy) is not None
        entry = top.find(put.key)
        return entry is not None and (put.lossy or not entry.lossy)

    async def _publish(self, put: Put, value: Value, result: Placed) -> None:
        """Make the value gettable in the top tier and offer it to those below."""
        engine = self._engine
        engine.flights.close_boarding(put.key)
        result.removals = self._make_way(put)
        claim = engine.generations.claim(put.key)
        try:
            kept = await self._keep_on_top(put, value, claim)
            await self._wait_for_queues(value)
            if claim.stale:
                result.status, result.reason = "dropped", "superseded"
                return
            below = 0 if engine.top is not None else -1
            result.offered = engine.movement.write_down(
                value, below=below, expires=self._expires, priority=self._priority
            )
        finally:
            if put.replace and not claim.stale:
                self._forget_unknown(put.key, result)
            claim.end()
        if kept:
            result.status = "stored"
        elif not any(outcome is not None for _, outcome in result.offered):
            result.status, result.reason = "dropped", self._untaken(put, result)

    def _untaken(self, put: Put, result: Placed) -> str:
        """Return why no tier took a value. Tiers that refused it have counted it; those of memory have not told."""
        top, offered = self._engine.top, result.offered
        if top is None and not offered:
            return self._dropped(put, "down").reason
        reason = "down" if offered and not any(tier.up for tier, _ in offered) else "no-room"
        if top is not None:
            self._engine.events.emit("dropped", tier=top.name, key=put.key, reason=reason)
        return reason

    def _make_way(self, put: Put) -> list[asyncio.Task[Removed]]:
        """Take older values of the key out of the lower tiers: they must not be served if this one never gets there."""
        engine = self._engine
        outdated = [tier for tier in engine.tiers if tier is not engine.top and self._outdated(tier, put)]
        if outdated or put.replace:
            engine.generations.change(put.key)
        removals = [self._drop_older(tier, put.key) for tier in outdated]
        return [removal for removal in removals if removal is not None]

    def _outdated(self, tier: Tier, put: Put) -> bool:
        entry = tier.ledger.index.find(put.key)
        if not put.replace:
            return entry is not None and entry.lossy is True and not put.lossy
        if isinstance(tier, MemoryTier):
            return entry is not None
        return tier.knows(put.key) or self._engine.writers[tier.name].has(put.key)

    def _drop_older(self, tier: Tier, key: str) -> asyncio.Task[Removed] | None:
        if not isinstance(tier, MemoryTier):
            self._engine.writers[tier.name].forget(key)
            return tier.remove_older(key) if tier.knows(key) else None
        entry = tier.ledger.index.find(key)
        if entry is not None:
            tier.drop(entry, "deleted")
        return None

    def _forget_unknown(self, key: str, result: Placed) -> None:
        """Where this value does not get to, a shared medium must not give what it held before, known here or not."""
        outcomes = {tier.name: outcome for tier, outcome in result.offered}
        for tier in self._engine.stored_tiers:
            outcome = outcomes.get(tier.name)
            if outcome is None:
                tier.forget_unknown(key)
            elif tier.shared:
                outcome.add_done_callback(partial(_forget_if_not_written, tier, key))

    async def _keep_on_top(self, put: Put, value: Value, claim: Claim) -> bool:
        """Put the value in the older one's place, at one stroke; if it does not get in, the older one goes alone."""
        kept = await self._try_top(value, claim)
        top = self._engine.top
        if top is not None and not kept and put.replace and not claim.stale:
            _ = self._drop_older(top, put.key)
        return kept

    async def _try_top(self, value: Value, claim: Claim) -> bool:
        engine, top = self._engine, self._engine.top
        if top is None:
            return False
        self._unreserve(value)
        if not len(top.chain):
            return top.keep(value, expires=self._expires, priority=self._priority)
        try:
            encoded = await encoded_for(top.chain, value, engine.services, timeout=self._deadline.remaining())
        except (CodecError, TimeoutError, CapacityError):
            top.ledger.counters.dropped["encode"] += 1
            return False
        try:
            return not claim.stale and top.keep(encoded, expires=self._expires, priority=self._priority)
        finally:
            encoded.release()

    async def _wait_for_queues(self, value: Value) -> None:
        for tier in self._engine.stored_tiers:
            if tier.settings.on_full == "wait" and tier.settings.write == "through" and tier.up:
                await self._engine.writers[tier.name].room_for(value.size, timeout=self._deadline.remaining())

    def _dropped(self, put: Put, reason: str) -> Placed:
        engine = self._engine
        tier = engine.tiers[0]
        tier.ledger.counters.dropped[reason] += 1
        engine.events.emit("dropped", tier=tier.name, key=put.key, reason=reason)
        return Placed(key=put.key, status="dropped", reason=reason, offered=[])


def _forget_if_not_written(tier: StoredTier, key: str, outcome: asyncio.Future[str]) -> None:
    if not outcome.cancelled() and outcome.result() not in {STORED, "superseded"}:
        tier.forget_unknown(key)
