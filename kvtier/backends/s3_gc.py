"""Housekeeping of a bucket: what nobody needs any more goes, and what is over a capacity, oldest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.backends.base import BackendContext, Read
from kvtier.buffers.arena import Arena
from kvtier.chunk.container import PAGE, NeedMore, peek
from kvtier.concurrency.clock import SystemClock
from kvtier.concurrency.workers import Workers
from kvtier.errors import BackendError, CorruptChunkError
from kvtier.events import Events

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.backends.base import Stat
    from kvtier.backends.s3 import S3Backend

ABANDONED_SECONDS = 86_400.0  # a multipart upload this old belongs to a process that was killed
_BATCH = 200


@dataclass(slots=True)
class Collected:
    """What a collection found and, unless it was a dry run, removed.

    Attributes:
        seen: entries looked at.
        seen_bytes: and their bytes.
        expired: entries whose time is over.
        foreign: entries that this version cannot read.
        over: entries beyond the capacity.
        removed_bytes: bytes of those three kinds.
        uploads: multipart uploads of processes that were killed.
        logs: journals and markers that nobody follows any more.
        failed: removals that the server refused; the next run finds them again.
    """

    seen: int = 0
    seen_bytes: int = 0
    expired: int = 0
    foreign: int = 0
    over: int = 0
    removed_bytes: int = 0
    uploads: int = 0
    logs: int = 0
    failed: int = 0


async def collect(
    backend: S3Backend,
    *,
    foreign: bool = False,
    capacity: int | None = None,
    dry_run: bool = False,
    threads: int = 8,
    deadline_seconds: float = 30.0,
) -> Collected:
    """Open a backend, do `collect_in` as of now, and close it.

    Args:
        backend: not open.
        foreign: see `collect_in`.
        capacity: bytes to leave at most, see `collect_in`.
        dry_run: see `collect_in`.
        threads: requests under way at once.
        deadline_seconds: for each request.

    Raises:
        ConfigError, BackendError: as `S3Backend.open` and `collect_in`.
    """
    clock = SystemClock()
    workers = Workers("kvtier-gc", threads)
    arena = Arena(PAGE, staging=0, pin=False)
    context = BackendContext(
        tier="s3",
        workers=workers,
        clock=clock,
        events=Events(None, clock),
        arena=arena,
        capacity=0,
        deadline_seconds=deadline_seconds,
    )
    try:
        await backend.open(context)
        return await collect_in(backend, now=clock.wall(), foreign=foreign, capacity=capacity, dry_run=dry_run)
    finally:
        await backend.aclose()
        await workers.aclose(deadline_seconds)
        arena.close()


async def collect_in(
    backend: S3Backend,
    *,
    now: float,
    foreign: bool = False,
    capacity: int | None = None,
    upload_seconds: float = ABANDONED_SECONDS,
    dry_run: bool = False,
) -> Collected:
    """Remove expired entries, abandoned uploads and old journals from an open backend's folder.

    Objects that are no entries are never touched. Running it beside stores is safe: what they lose is a miss to them.

    Args:
        backend: an open backend.
        now: wall-clock seconds; an entry is expired when its expiry is not after that.
        foreign: also remove entries that this version of kvtier cannot read: of another format, or damaged. Every
            entry's first page is read for that. Not while newer versions still use the folder.
        capacity: bytes to leave at most; the longest unchanged entries go first.
        upload_seconds: multipart uploads that began longer ago are aborted.
        dry_run: count only.

    Raises:
        BackendError: the listing failed; what was removed before stays removed.
    """
    collected = Collected()
    kept: list[Stat] = []
    async for page in backend.scan():
        collected.seen += len(page)
        collected.seen_bytes += sum(stat.size for stat in page)
        expired = [stat for stat in page if stat.expires is not None and stat.expires <= now]
        rest = [stat for stat in page if stat.expires is None or stat.expires > now]
        unreadable = await _unreadable(backend, rest) if foreign else []
        collected.expired += len(expired)
        collected.foreign += len(unreadable)
        await _remove(backend, [*expired, *unreadable], collected, dry_run=dry_run)
        if capacity is not None:
            names = {stat.name for stat in unreadable}
            kept += [stat for stat in rest if stat.name not in names]
    if capacity is not None:
        over = _beyond(kept, capacity)
        collected.over = len(over)
        for first in range(0, len(over), _BATCH):
            await _remove(backend, over[first : first + _BATCH], collected, dry_run=dry_run)
    uploads, logs = await backend.leftovers(upload_seconds=upload_seconds)
    collected.uploads, collected.logs = len(uploads), len(logs)
    if not dry_run:
        collected.failed += await backend.remove_leftovers(uploads, logs)
    return collected


def _beyond(entries: Sequence[Stat], capacity: int) -> list[Stat]:
    """Return the entries to remove so that the rest fits, those that changed longest ago first."""
    left = sum(stat.size for stat in entries)
    over = []
    for stat in sorted(entries, key=lambda stat: stat.changed):
        if left <= capacity:
            break
        over.append(stat)
        left -= stat.size
    return over


async def _unreadable(backend: S3Backend, entries: Sequence[Stat]) -> list[Stat]:
    pages = [bytearray(min(PAGE, stat.size)) for stat in entries]
    reads = [Read(stat.name, [memoryview(page)], partial=True) for stat, page in zip(entries, pages, strict=True)]
    answers = await backend.read_many(reads)
    return [
        stat
        for stat, page, filled in zip(entries, pages, answers, strict=True)
        if isinstance(filled, int) and not _is_readable(memoryview(page)[:filled])
    ]


def _is_readable(front: memoryview) -> bool:
    try:
        peek(front)
    except NeedMore:
        return True
    except CorruptChunkError:
        return False
    return True


async def _remove(backend: S3Backend, entries: Sequence[Stat], collected: Collected, *, dry_run: bool) -> None:
    collected.removed_bytes += sum(stat.size for stat in entries)
    if dry_run or not entries:
        return
    answers = await backend.delete_many([stat.name for stat in entries])
    left = [stat for stat, answer in zip(entries, answers, strict=True) if isinstance(answer, BackendError)]
    collected.failed += len(left)
    collected.removed_bytes -= sum(stat.size for stat in left)
