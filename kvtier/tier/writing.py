"""Writes to a stored tier: whole values, undone when the key changed meanwhile, one word for how each ended."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from kvtier.backends.base import Stat, Write, Written
from kvtier.chunk.header import Header
from kvtier.concurrency.workers import work_for
from kvtier.errors import BackendError, BackendTimeoutError, CapacityError, CodecError
from kvtier.keys.names import name_of
from kvtier.tier.admission import BusyError
from kvtier.tier.encode import encoded_for
from kvtier.tier.index import new_entry
from kvtier.tier.opening import read_header, stocked
from kvtier.tier.relief import relieve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtier.concurrency.generations import Claim
    from kvtier.concurrency.key_locks import Turn
    from kvtier.tier.index import Entry
    from kvtier.tier.stored import StoredTier
    from kvtier.tier.value import Value

STORED = "stored"


@dataclass(slots=True, kw_only=True)
class _Write:
    """One write on its way; the job owns a reference on the value, the key's turn and the claim."""

    value: Value
    turn: Turn
    claim: Claim
    expires: float | None
    priority: int
    reached_medium: bool = False


async def write(tier: StoredTier, value: Value, claim: Claim, *, expires: float | None, priority: int) -> str:
    """Write one value; return "stored" or why not.

    Reasons: "superseded" (the claim went stale: the key was deleted or put anew, and the write undid itself), "down",
    "capacity" (no room under the tier's capacity), "full" (the medium says so), "busy" (the tier's own limits),
    "encode", "timeout", "error". The claim is taken over and ended here; the caller keeps its own reference on
    `value` for the duration of this call only.
    """
    if not tier.up:
        claim.end()
        return "down"
    turn = tier.locks.take_place(name_of(value.key))
    writing = _Write(value=value.retain(), turn=turn, claim=claim, expires=expires, priority=priority)
    job = tier.services.supervisor.spawn(_write_job(tier, writing), name=f"{tier.name} write")
    began = tier.ledger.now()
    done, _ = await asyncio.wait({job}, timeout=tier.settings.deadline_seconds)
    if done:
        if job.result() == STORED:
            tier.ledger.counters.write_latency.note(tier.ledger.now() - began)
        return job.result()
    if not writing.reached_medium:
        return "busy"  # it waited for older work on the key or for its place; it still may get there
    tier.ledger.counters.write_timeouts += 1
    error = BackendTimeoutError(f"tier {tier.name!r} did not finish a write in time")
    tier.failed(error)
    tier.services.events.emit("timeout", tier=tier.name, key=value.key, error=error)
    return "timeout"


async def _write_job(tier: StoredTier, writing: _Write) -> str:
    value, claim = writing.value, writing.claim
    encoded: Value | None = None
    try:
        await writing.turn.wait()
        if claim.stale:
            return "superseded"
        seconds = tier.settings.deadline_seconds
        encoded = await encoded_for(tier.chain, value, tier.services, timeout=seconds, background=True)
        await encoded.seal(tier.services.workers)
        entry = new_entry(
            value.key,
            encoded.size,
            parent=value.header.parent,
            expires=tier.ledger.capped(writing.expires),
            lossy=encoded.header.lossy,
            priority=writing.priority,
            created=value.header.created,
        )
        return await _publish(tier, entry, encoded, writing)
    except Exception as exc:  # noqa: BLE001  # one value that cannot be written must not end the writer
        return _failed(tier, value.key, exc)
    finally:
        writing.turn.release()
        claim.end()
        if encoded is not None:
            encoded.release()
        value.release()


async def _publish(tier: StoredTier, entry: Entry, value: Value, writing: _Write) -> str:
    """Make room, write, and enter the books; an entry whose key changed meanwhile is taken off the medium again."""
    await stocked(tier)
    async with _room(tier, entry) as fits:
        if not fits:
            return "capacity"
        answer = await _written(tier, entry, value, writing)
        if isinstance(answer, CapacityError) and await relieve(tier, entry, answer):
            answer = await _written(tier, entry, value, writing)
        if isinstance(answer, BackendError):
            if not isinstance(answer, CapacityError):
                tier.doubt(entry)
            try:
                raise answer
            finally:
                del answer  # the traceback leads here: a cycle would keep views of the arena until it is collected
        tier.breaker.succeeded()
        entry.size = answer.size
        if writing.claim.stale:
            await _undo(tier, entry)
            return "superseded"
        tier.enter(entry)
    return STORED


async def _written(tier: StoredTier, entry: Entry, value: Value, writing: _Write) -> Written | BackendError:
    """Write once; what the medium holds afterwards is in doubt if it did not answer."""
    admission = tier.limits.ask(entry.size, background=True)
    await admission.wait()
    work_for(admission)
    try:
        writing.reached_medium = True
        return await _to_medium(tier, entry, value)
    except Exception:
        tier.doubt(entry)
        raise
    finally:
        admission.end()


async def _to_medium(tier: StoredTier, entry: Entry, value: Value) -> Written | BackendError:
    """Write an entry; of KV that another store has put meanwhile take note instead: a key of KV names one content."""
    write = Write(entry.name, [value.container()], entry.expires)
    first = tier.shared and value.header.kind == "kv" and tier.ledger.index.find(entry.key) is None
    answer = (await tier.backend.write_many([replace(write, if_absent=first)]))[0]
    if isinstance(answer, BackendError) or answer.stored:
        return answer
    stat = (await tier.backend.stat_many([entry.name]))[0]
    if not isinstance(stat, Stat) or not await _as_good(tier, entry, stat):
        return (await tier.backend.write_many([write]))[0]
    if stat.expires is not None and (entry.expires is None or entry.expires > stat.expires):
        await tier.backend.set_expiry_many([(entry.name, entry.expires)])
    else:
        entry.expires = stat.expires
    entry.created = None
    entry.remark(lossy=None, priority=entry.priority)  # its own header tells, when it is read
    return Written(stat.size, stored=False)


async def _as_good(tier: StoredTier, entry: Entry, stat: Stat) -> bool:
    """Tell by its header whether what is there holds the same key, and is exact if the new value is."""
    header = await read_header(tier, msgspec.structs.replace(entry, size=stat.size))
    if not isinstance(header, Header):
        return False  # damaged, or gone again
    return header.key == entry.key and (entry.lossy is True or not header.lossy)


async def _undo(tier: StoredTier, entry: Entry) -> None:
    """Take off the medium what should not be there any more; what cannot be taken off now is tried again later."""
    try:
        gone = (await tier.backend.delete_many([entry.name]))[0]
    except Exception:
        tier.doubt(entry)
        raise
    if isinstance(gone, BackendError):
        tier.doubt(entry)
        tier.failed(gone)


@asynccontextmanager
async def _room(tier: StoredTier, entry: Entry) -> AsyncIterator[bool]:
    """Reserve the entry's bytes for the block, evicting others first; False if it cannot get in."""
    ledger = tier.ledger
    older = ledger.index.find(entry.key)
    growth = max(0, entry.size - older.size) if older is not None else entry.size
    victims = ledger.victims_for(growth, sparing=older)
    if victims is None or not ledger.policy.admit(entry.key, size=entry.size, now=ledger.now()):
        yield False
        return
    ledger.reserved += growth
    try:
        if victims:
            if tier.demote is not None:
                await tier.demote(tier, victims)
            removal = tier.remove(victims, "evicted")
            await asyncio.wait({removal})  # `await removal` would hand a cancellation on to it
            if not removal.result().complete:  # their bytes are still there
                yield False
                return
        yield True
    finally:
        ledger.reserved -= growth


def _failed(tier: StoredTier, key: str, error: Exception) -> str:
    """Count a write that raised, tell the breaker if the medium is to blame, and find the word for it."""
    if isinstance(error, BusyError | TimeoutError) and not isinstance(error, BackendTimeoutError):
        return "busy"
    medium = not isinstance(error, CapacityError | CodecError)
    if medium:
        tier.failed(error)
    tier.ledger.counters.write_errors += 1
    tier.services.events.emit("error", tier=tier.name, key=key, reason=f"write failed: {error}", error=error)
    return "error" if medium else "full" if isinstance(error, CapacityError) else "encode"
