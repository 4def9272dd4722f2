"""Reads from a stored tier: one counted outcome each, nothing returned that was not verified."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvtier.backends.base import Read, TooLongError
from kvtier.chunk.container import UnknownFormatError
from kvtier.chunk.verifier import Verifier
from kvtier.concurrency.workers import work_for
from kvtier.errors import BackendError, BackendTimeoutError, CorruptChunkError, RacedError
from kvtier.keys.names import name_of
from kvtier.tier.admission import BusyError
from kvtier.tier.index import new_entry
from kvtier.tier.value import Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.backends.base import Stat
    from kvtier.buffers.arena import Slot
    from kvtier.chunk.header import Header
    from kvtier.tier.admission import Admission
    from kvtier.tier.index import Entry
    from kvtier.tier.stored import StoredTier

MOST_ABSENT = 100_000

Failure = Literal["misses", "corrupt", "raced", "timeouts", "errors", "skipped"]


@dataclass(frozen=True, slots=True)
class Missed:
    """Why a read gave no value: the counter it went to, and the error if there was one."""

    why: Failure
    error: Exception | None = None


async def read(
    tier: StoredTier, entry: Entry, slot: Slot, admission: Admission, *, lookup: bool = True
) -> Value | Missed:
    """Read and verify one entry into `slot` (at least `entry.size` long), counting exactly one outcome.

    `admission` is the place among the tier's transfers to wait for. A read that is no lookup (`lookup=False`:
    demotion, scrubbing) is counted only if it finds a bad entry.

    A returned value lives in `slot`, under the caller's own reference. After a time-out the read goes on with a
    reference of its own: the caller may drop its own, but must not use the slot for anything else.
    """
    counters = tier.ledger.counters
    if not tier.up:
        return _skipped(tier, Missed("skipped"), lookup=lookup)
    try:
        if admission.background:
            await tier.services.pace.turn()
        await admission.wait()
    except BusyError as exc:
        return _skipped(tier, Missed("skipped", exc), lookup=lookup)
    slot.retain()
    began = tier.ledger.now()
    tier.link.began(began)
    given = 0
    try:
        job = tier.services.supervisor.spawn(_read_job(tier, entry, slot, admission), name=f"{tier.name} read")
        done, _ = await asyncio.wait({job}, timeout=tier.settings.deadline_seconds)
        given = entry.size if not done or isinstance(job.result(), Value) else 0
    finally:
        tier.link.ended(given, tier.ledger.now())
    if not done:
        late = BackendTimeoutError(f"tier {tier.name!r} did not answer a read in time")
        return _missed(tier, entry, Missed("timeouts", late), lookup=lookup)
    answer = job.result()
    if isinstance(answer, Missed):
        return _missed(tier, entry, answer, lookup=lookup)
    tier.breaker.succeeded()
    counters.read_latency.note(tier.ledger.now() - began)
    counters.lookups += lookup  # with its outcome, so that the sums hold at any moment
    counters.hits += lookup
    counters.read_bytes += entry.size
    return answer


async def _read_job(tier: StoredTier, entry: Entry, slot: Slot, admission: Admission) -> Value | Missed:
    work_for(admission)
    try:
        try:
            view = slot.view(0, entry.size)
            verifier = _verifier(tier, entry, view)
            answer = (await tier.backend.read_many([Read(entry.name, [view], watch=verifier.advance)]))[0]
        finally:
            admission.end()
        if admission.background:
            await tier.services.pace.turn()
        if answer is None:
            return Missed("misses")
        if isinstance(answer, BackendError):
            return _failure(answer)
        workers = tier.services.workers
        if verifier.left(answer) <= workers.loop_bytes:  # as a rule the backend has shown it all of them
            return _verified(verifier, slot, answer)
        return await workers.run(_verified, verifier, slot, answer)
    except Exception as exc:  # noqa: BLE001  # whatever a backend raises is a miss here, counted and told
        return _failure(exc)
    finally:
        slot.release()


def _failure(error: Exception) -> Missed:
    if isinstance(error, UnknownFormatError):  # of a newer kvtier that shares the medium: not ours to drop
        return Missed("misses", error)
    if isinstance(error, CorruptChunkError):
        return Missed("corrupt", error)
    if isinstance(error, RacedError | TooLongError):
        return Missed("raced", error)
    return Missed("timeouts" if isinstance(error, TimeoutError) else "errors", error)


def _verifier(tier: StoredTier, entry: Entry, view: memoryview) -> Verifier:
    def key_of(header: Header) -> str:
        if not entry.nameless:
            return entry.key
        if name_of(header.key) != entry.name:  # only its own header can tell, and must fit the name
            raise CorruptChunkError(f"entry {entry.name} holds key {header.key!r}")
        return header.key

    max_raw = tier.settings.max_value_bytes
    return Verifier(view, key_of=key_of, codecs=tier.services.codecs, max_raw=max_raw)


def _verified(verifier: Verifier, slot: Slot, size: int) -> Value:
    """Look at what the backend did not show the verifier while it read, as a rule nothing."""
    header = verifier.finish(size)
    return Value(header, slot, payload_offset=header.payload_offset, size=size, sealed=True)


def _skipped(tier: StoredTier, missed: Missed, *, lookup: bool) -> Missed:
    tier.ledger.counters.lookups += lookup
    tier.ledger.counters.skipped += lookup
    return missed


def _missed(tier: StoredTier, entry: Entry, missed: Missed, *, lookup: bool) -> Missed:
    """Count a read that gave nothing, and act on what it means for the entry and the tier's health."""
    if missed.why in {"corrupt", "misses"} and not tier.current(entry):
        missed = Missed("raced", missed.error)  # rewritten or removed meanwhile: nothing is known to be bad
    counters, events = tier.ledger.counters, tier.services.events
    if lookup or missed.why == "corrupt":
        counters.lookups += 1
        setattr(counters, missed.why, getattr(counters, missed.why) + 1)
    if missed.why in {"timeouts", "errors"}:
        tier.failed(missed.error or BackendError(missed.why))
        events.emit(missed.why.removesuffix("s"), tier=tier.name, key=entry.key, error=missed.error)
        return missed
    tier.breaker.succeeded()
    if missed.why == "corrupt":
        events.emit("corrupt", tier=tier.name, key=entry.key, error=missed.error)
        tier.discard([entry], "corrupt")
    elif tier.ledger.depart(entry, "vanished"):  # gone, or another value than the one in the books
        tier.changed(entry, came=False)
    return missed


async def probe(tier: StoredTier, keys: Sequence[str]) -> BackendError | None:
    """Ask the medium for keys this store does not know of; found ones enter the books. Return the error if it failed.

    A key that is written or removed here before the answer comes is not asked for, or the answer not believed: it
    would be out of date. What was not there is not asked for again for `negative_seconds`.
    """
    now = tier.ledger.now()
    unknown = [key for key in keys if _worth_asking(tier, key, now)]
    if not unknown or not tier.up:
        return None
    with tier.locks.watch() as touched:
        try:
            stats = await tier.bounded(_stat(tier, [name_of(key) for key in unknown]))
        except BackendError as exc:
            return _probe_failed(tier, exc)
        failures = [stat for stat in stats if isinstance(stat, BackendError)]
        for key, stat in zip(unknown, stats, strict=True):
            if name_of(key) not in touched and name_of(key) not in tier.unremoved:
                _note(tier, key, stat, now)
    if failures:
        return _probe_failed(tier, failures[0])
    tier.breaker.succeeded()
    return None


def _probe_failed(tier: StoredTier, error: BackendError) -> BackendError:
    """Count a probe that failed as one look-up, and tell of it."""
    why = "timeouts" if isinstance(error, BackendTimeoutError) else "errors"
    counters = tier.ledger.counters
    counters.lookups += 1
    setattr(counters, why, getattr(counters, why) + 1)
    tier.failed(error)
    tier.services.events.emit(why.removesuffix("s"), tier=tier.name, reason=f"probe failed: {error}", error=error)
    return error


async def _stat(tier: StoredTier, names: Sequence[str]) -> Sequence[Stat | BackendError | None]:
    return await tier.backend.stat_many(names)


def _worth_asking(tier: StoredTier, key: str, now: float) -> bool:
    return tier.find(key) is None and not tier.own_affair(name_of(key)) and tier.absent.get(key, 0.0) <= now


def _note(tier: StoredTier, key: str, stat: Stat | BackendError | None, now: float) -> None:
    if stat is None:
        if len(tier.absent) >= MOST_ABSENT:
            tier.absent.clear()
        tier.absent[key] = now + tier.settings.negative_seconds
    elif not isinstance(stat, BackendError):
        entry = new_entry(key, stat.size, expires=stat.expires, lossy=None)
        if not tier.ledger.expired(entry):
            tier.ledger.discover(entry)
