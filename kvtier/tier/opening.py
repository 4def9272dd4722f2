"""How a tier learns what its medium holds: at open, when it comes back, and when somebody asks for a list."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvtier.backends.base import Read
from kvtier.chunk.container import MAX_FRONT, NeedMore, UnknownFormatError, peek
from kvtier.errors import BackendError, ConfigError, CorruptChunkError, RacedError
from kvtier.keys.names import key_of, name_of, name_prefixes
from kvtier.tier.index import NAMELESS, new_entry
from kvtier.tier.journal import late_news, replay, snapshot

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from kvtier.backends.base import Stat
    from kvtier.chunk.header import Header
    from kvtier.tier.index import Entry, TierIndex
    from kvtier.tier.journal import Noted, TierJournal
    from kvtier.tier.stored import StoredTier

FIRST_READ = 8192  # bytes that hold most headers whole
HEADERS_AT_ONCE = 32
STOCK_SECONDS = 1.0  # an open waits so long for the index of a shared tier
NEWS_SECONDS = 3600.0  # a compaction keeps deletions so long: by then every store on the medium has heard of them
STEP_ENTRIES = 100  # taken into the index between two looks at the loop: a millisecond or two


async def bring_up(tier: StoredTier) -> None:
    """Open a tier's backend and take stock of the medium; used at open and when a tier comes back.

    A shared tier is waited for a second at most: it serves what it is asked for, key by key, while its stock is taken
    in the background. Writes wait for that: they need to know what there is to evict.

    Raises:
        ConfigError: the backend's options are wrong.
        BackendError: the medium cannot be reached.
    """
    try:
        async with tier.bringing_up:  # an attempt that took too long goes on unheard, and may still succeed
            if tier.ready:
                return
            await tier.bounded(tier.open_backend())
            if tier.backend.traits.scan_at_open:
                await _begin_stock(tier)
            elif tier.journal is not None:
                await _begin_to_listen(tier, tier.journal)
            tier.ready = True
    except (BackendError, ConfigError):
        raise
    except Exception as exc:
        raise BackendError(f"tier {tier.name!r} did not open: {exc!r}") from exc


async def _begin_to_listen(tier: StoredTier, journal: TierJournal) -> None:
    """Note where the journals of others end: what they delete from now on is news; taking stock does the same."""
    try:
        await tier.bounded(journal.follow())
    except BackendError as exc:
        tier.services.events.emit("error", tier=tier.name, reason=f"journal not followed: {exc}", error=exc)


async def _begin_stock(tier: StoredTier) -> None:
    if tier.stock is None or tier.stock.done():
        tier.stock = tier.services.supervisor.spawn(_stock_job(tier), name=f"{tier.name} stock")
    await asyncio.wait({tier.stock}, timeout=STOCK_SECONDS if tier.shared else None)
    if tier.stock.done():
        error = tier.stock.result()
        if error is not None:
            raise error


async def _stock_job(tier: StoredTier) -> Exception | None:
    """Take stock; return why that failed. If the tier serves already, it is out of service then."""
    try:
        await take_stock(tier, tier.journal)
    except Exception as exc:  # noqa: BLE001  # raised by who waits; told if nobody does
        if tier.ready:
            tier.ready = False
            tier.breaker.open_now(exc)
            tier.services.events.emit("degraded", tier=tier.name, reason=f"not listed: {exc}", error=exc)
        return exc
    return None


async def stocked(tier: StoredTier) -> None:
    """Wait until the stock that is being taken is taken, or that failed."""
    if tier.stock is not None and not tier.stock.done():
        await asyncio.wait({tier.stock})


async def take_stock(tier: StoredTier, journal: TierJournal | None) -> None:
    """Index what the medium holds, in the order the journal tells; entries it does not know come first to go.

    Raises:
        BackendError: the medium failed.
    """
    run = tier.services.workers.run
    noted, news = await _recalled(tier, journal) if journal is not None else ({}, b"")
    found: dict[str, Stat] = {}
    index = tier.ledger.index
    # Of what is touched the pages may tell what was true before this store acted.
    with tier.locks.watch() as touched, index.listening() as arrived:
        arrived.extend(index.entries.values())
        async for page in tier.pages():
            found.update((stat.name, stat) for stat in page)
        entries = await run(_in_order, found, noted)
        met: set[str] = set()
        for start in range(0, len(entries), STEP_ENTRIES):
            step = entries[start : start + STEP_ENTRIES]
            if any(entry.nameless for entry in step):
                await _note_names(arrived, met)
            _take_in(tier, [entry for entry in step if entry.name not in touched] if touched else step, met)
            await asyncio.sleep(0)
        tier.cleared.clear()
    await keep_capacity(tier)
    if journal is not None:
        try:
            await journal.replace(await run(snapshot, entries, tier.current) + news)
        except BackendError as exc:
            tier.services.events.emit("error", tier=tier.name, reason=f"journal not compacted: {exc}", error=exc)


async def _recalled(tier: StoredTier, journal: TierJournal) -> tuple[Mapping[str, Noted], bytes]:
    """Return what the journal knows of entries, and the deletions in it that somebody may not have heard of yet.

    Nothing, and an event, if it cannot be read: that costs the order, but none of the logs either.
    """
    run = tier.services.workers.run
    try:
        await journal.follow()  # what others announced so far is in the medium's state already
        logs = await journal.logs()
        return await run(replay, logs), await run(late_news, logs, tier.services.clock.wall() - NEWS_SECONDS)
    except BackendError as exc:
        tier.services.events.emit("error", tier=tier.name, reason=f"journal not read: {exc}", error=exc)
        return {}, b""


async def _note_names(arrived: list[Entry], met: set[str]) -> None:
    """Move what has arrived to the names that are met, a few at a time: making a name takes a microsecond."""
    while arrived:
        met.update(entry.name for entry in arrived[-STEP_ENTRIES:])
        del arrived[-STEP_ENTRIES:]
        await asyncio.sleep(0)


def _in_order(found: Mapping[str, Stat], noted: Mapping[str, Noted]) -> list[Entry]:
    """Return an entry for each file, least recently used first."""
    strangers = sorted((name for name in found if name not in noted), key=lambda name: found[name].changed)
    entries = [_entry(found[name]) for name in strangers]
    return entries + [_entry(found[name], known) for name, known in noted.items() if name in found]


def _take_in(tier: StoredTier, entries: Sequence[Entry], met: Container[str]) -> None:
    """Put entries into the books, but for those that were met by their keys meanwhile, and what is to be removed."""
    for entry in entries:
        if (entry.nameless and entry.name in met) or _is_hidden(tier, entry):
            continue
        if tier.ledger.discover(entry) and tier.ledger.expired(entry):
            tier.discard([entry], "expired")


def _is_hidden(tier: StoredTier, entry: Entry) -> bool:
    """Condemn what was deleted or put anew while the tier was down: it is removed when the tier is in service."""
    waiting = tier.unremoved.get(entry.name) if tier.unremoved else None
    if waiting is None and not (tier.cleared and entry.key.startswith(tuple(tier.cleared))):
        return False
    tier.ledger.condemned += entry.size - (waiting.size if waiting is not None else 0)
    tier.unremoved[entry.name] = entry
    return True


def _entry(stat: Stat, known: Noted | None = None) -> Entry:
    if known is None:
        return new_entry(key_of(stat.name) or NAMELESS + stat.name, stat.size, expires=stat.expires, lossy=None)
    key, parent, lossy, priority = known
    return new_entry(key, stat.size, parent=parent, expires=stat.expires, lossy=lossy, priority=priority)


async def keep_capacity(tier: StoredTier) -> None:
    """Evict what a lowered capacity no longer has room for."""
    over = tier.ledger.usage - tier.ledger.capacity
    if over > 0:
        await tier.remove(tier.ledger.victims(over), "evicted")


async def rescan(tier: StoredTier, prefix: str = "") -> None:
    """Bring the index up to date with a medium that others change: strangers enter, what is gone departs.

    Only names of keys that begin with `prefix` are looked at, where the medium can find them by that.

    Raises:
        BackendError: the medium failed.
    """
    prefixes = ("",) if tier.lister is None else name_prefixes(prefix)
    strangers: dict[str, Stat] = {}
    index = tier.ledger.index
    # Of what is touched the pages may tell what was true before this store acted.
    with tier.locks.watch() as touched, index.listening() as arrived:
        before = await _by_name(index, prefixes)
        async for page in tier.pages_under(prefixes):
            strangers.update((stat.name, stat) for stat in page if before.pop(stat.name, None) is None)
        met = {entry.name for entry in arrived} if strangers else set()  # some of them by their keys
    for name, stat in strangers.items():
        if name not in touched and name not in tier.unremoved and name not in met:
            tier.ledger.discover(_entry(stat))
    for name, entry in before.items():
        if name not in touched and tier.ledger.depart(entry, "vanished"):
            tier.changed(entry, came=False)


async def _by_name(index: TierIndex, prefixes: tuple[str, ...]) -> dict[str, Entry]:
    """Return the entries as they are now whose names have one of these beginnings."""
    entries = list(index.entries.values())
    found: dict[str, Entry] = {}
    for start in range(0, len(entries), STEP_ENTRIES):
        named = [(entry.name, entry) for entry in entries[start : start + STEP_ENTRIES]]
        found.update(each for each in named if each[0].startswith(prefixes))
        await asyncio.sleep(0)
    return found


async def learn_names(tier: StoredTier) -> None:
    """Read the headers of entries whose key nothing else tells; a header that does not fit its name is a bad entry."""
    index = tier.ledger.index
    nameless = [entry for entry in index.entries.values() if entry.nameless] if index.nameless else []
    for first in range(0, len(nameless), HEADERS_AT_ONCE):
        batch = nameless[first : first + HEADERS_AT_ONCE]
        for entry, header in zip(
            batch, await asyncio.gather(*(read_header(tier, entry) for entry in batch)), strict=True
        ):
            if not tier.current(entry) or not entry.nameless:
                continue  # somebody asked for it by its key meanwhile
            if header is None and tier.locks.held(entry.name):
                continue  # something is being done about it
            if isinstance(header, BackendError):
                continue  # the medium failed, or the entry went: nothing is known to be bad
            if header is None:
                tier.ledger.counters.lookups += 1
                tier.ledger.counters.corrupt += 1
                tier.services.events.emit("corrupt", tier=tier.name, key=entry.name)
                tier.discard([entry], "corrupt")
                continue
            entry.parent = header.parent
            entry.remark(lossy=header.lossy, priority=entry.priority)
            tier.ledger.rename(entry, header.key)


async def read_header(tier: StoredTier, entry: Entry) -> Header | BackendError | None:
    """Read an entry's header; None if it has none that fits its name, an error if it could not be read."""
    size = min(entry.size, FIRST_READ)
    while True:
        page = memoryview(bytearray(size))
        answer = (await tier.backend.read_many([Read(entry.name, [page], partial=True)]))[0]
        if not isinstance(answer, int):
            return answer or RacedError(f"{entry.name} is gone")
        try:
            header = peek(page[:answer])
        except NeedMore as more:
            if more.size <= size or more.size > MAX_FRONT:
                return None
            size = more.size
            continue
        except UnknownFormatError as exc:
            return BackendError(f"{entry.name}: {exc}")
        except CorruptChunkError:
            return None
        return header if name_of(header.key) == entry.name else None
