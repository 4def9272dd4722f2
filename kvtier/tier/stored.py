"""A tier on a byte medium: its books, limits and health, and how entries leave it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvtier.backends.base import ArrivalTeller, PrefixLister
from kvtier.concurrency.key_locks import KeyLocks
from kvtier.errors import BackendError, BackendTimeoutError, BackendUnavailableError, ClosedError, ConfigError
from kvtier.keys.names import key_of, name_of
from kvtier.tier.admission import Limits
from kvtier.tier.breaker import Breaker
from kvtier.tier.guarded import GuardedBackend
from kvtier.tier.index import new_entry
from kvtier.tier.ledger import Ledger
from kvtier.tier.link import LinkEstimate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

    from kvtier.backends.base import Backend, BackendContext, Stat
    from kvtier.codecs.chain import CodecChain
    from kvtier.concurrency.deadline import Deadline
    from kvtier.concurrency.key_locks import Turn
    from kvtier.policies.base import Policy
    from kvtier.tier.counters import Departure
    from kvtier.tier.index import Entry
    from kvtier.tier.journal import TierJournal
    from kvtier.tier.services import Services
    from kvtier.tier.settings import TierSettings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Removed:
    """How a removal ended: whether the medium confirmed every key, and which keys it did have."""

    complete: bool
    found: frozenset[str]


class StoredTier:
    """Entries as containers on a backend.

    Every call to the backend runs in a task of its own that owns the slot, the reservation and the key's turn: when a
    deadline passes, callers stop waiting, and the task keeps what it owns until the backend is done. (Reads live in
    `reading.py`, writes in `writing.py`.)
    """

    def __init__(
        self, settings: TierSettings, backend: Backend, *, chain: CodecChain, policy: Policy, services: Services
    ) -> None:
        self.name: str = settings.name
        self.settings = settings
        self.kind: str = type(backend).__name__
        self.backend: Backend = GuardedBackend(backend)
        self.chain = chain
        self.services = services
        self.breaker: Breaker = Breaker(services.clock)
        self.locks: KeyLocks = KeyLocks()  # by medium name: an entry may be known by nothing else
        self.limits: Limits = Limits(settings, services.clock)
        self.link: LinkEstimate = LinkEstimate()
        self.ledger: Ledger = Ledger(
            capacity=settings.capacity,
            policy=policy,
            clock=services.clock,
            protected=lambda entry: self.locks.held(entry.name),
            ttl_seconds=settings.ttl_seconds,
            pin_fraction=settings.pin_fraction,
            shares=settings.shares,
        )
        self.demote: Callable[[StoredTier, Sequence[Entry]], Awaitable[None]] | None = None  # set by the store
        self.on_change: Callable[[Entry, bool], None] | None = None  # the journal listens: an entry came (True) or went
        self.opened: bool = False
        self.ready = False  # open, and its books say what the medium holds
        self.bringing_up: asyncio.Lock = asyncio.Lock()
        self.stock: asyncio.Task[Exception | None] | None = None  # the latest taking of stock; may still be under way
        self.journal: TierJournal | None = None
        self.teller: ArrivalTeller | None = None
        self.lister: PrefixLister | None = None
        self.unremoved: dict[str, Entry] = {}  # by name: out of the books, still on a medium that could not be reached
        self._removals: dict[str, tuple[Turn, asyncio.Task[Removed]]] = {}  # by name: the latest under way
        self.cleared: list[str] = []  # key prefixes cleared before the tier was ready: what is found under them goes
        self.absent: dict[str, float] = {}  # keys the medium did not have when asked: until when that is believed

    def attach(self, context: BackendContext, journal: TierJournal | None, *, powers: object = None) -> None:
        """Take what the backend will be opened with; `powers` is the backend itself, as far as it can do more."""
        self._context = context
        self.journal = journal
        self.teller = powers if isinstance(powers, ArrivalTeller) else None
        self.lister = powers if isinstance(powers, PrefixLister) else None
        if journal is not None:
            self.on_change = journal.note

    async def open_backend(self) -> None:
        """Open the backend; may be tried again after a failure."""
        if not self.opened:
            await self.backend.open(self._context)
            self.opened = True

    @property
    def persistent(self) -> bool:
        """Whether entries outlive the process."""
        return self.backend.traits.persistent

    @property
    def shared(self) -> bool:
        """Whether other processes may add and remove entries."""
        return self.backend.traits.shared

    @property
    def up(self) -> bool:
        """Whether the tier is in service."""
        return self.breaker.passes

    def find(self, key: str) -> Entry | None:
        """Return the live entry of `key` as far as this store knows."""
        return self.ledger.find(key)

    def current(self, entry: Entry) -> bool:
        """Tell whether this very entry is still in the books."""
        return self.ledger.index.entries.get(entry.key) is entry

    def enter(self, entry: Entry) -> None:
        """Put an entry that the medium has now into the books, in place of an older one of its key."""
        self.ledger.add(entry)
        overwritten = self.unremoved.pop(entry.name, None)
        self.ledger.condemned -= overwritten.size if overwritten is not None else 0
        self.changed(entry, came=True)

    def doubt(self, entry: Entry) -> None:
        """Take an entry for one to remove: a write of it failed, and nobody knows what the medium has now."""
        older = self.ledger.index.find(entry.key)
        if older is not None and self.ledger.depart(older, "evicted"):
            self.changed(older, came=False)
            entry.size = max(entry.size, older.size)
        before = self.unremoved.get(entry.name)
        self.unremoved[entry.name] = entry
        self.ledger.condemned += entry.size - (before.size if before is not None else 0)

    # --- changing expiry

    def set_expiry(self, entry: Entry) -> None:
        """Have the medium keep the entry's new expiry, in the background; if that fails it expires early."""
        items = [(entry.name, entry.expires)]
        self.services.supervisor.start(self._set_expiry_job(items), name=f"{self.name} expiry")

    async def _set_expiry_job(self, items: Sequence[tuple[str, float | None]]) -> None:
        try:
            await self.backend.set_expiry_many(items)
        except Exception as exc:  # noqa: BLE001  # told, not raised: nobody waits for this
            self.failed(exc)
            self.services.events.emit("error", tier=self.name, reason=f"expiry not set: {exc}", error=exc)

    # --- removing

    def remove(self, entries: Sequence[Entry], how: Departure) -> asyncio.Task[Removed]:
        """Take entries out of the books now and off the medium in the background; the task tells what went."""
        gone = [entry for entry in entries if self.ledger.depart(entry, how)]
        for entry in gone:
            self.ledger.condemned += entry.size
            self.changed(entry, came=False)
        return self._unlink(gone)

    def discard(self, entries: Sequence[Entry], how: Departure) -> None:
        """As `remove`, for a caller who does not wait."""
        _ = self.remove(entries, how)

    def remove_keys(self, keys: Sequence[str]) -> asyncio.Task[Removed]:
        """Remove keys from the books and the medium, also those that only the medium knows of."""
        return self._unlink([self._condemned(key) for key in keys])

    def _condemned(self, key: str) -> Entry:
        """Take a key out of the books and return what its removal has to credit."""
        entry = self.ledger.index.find(key)
        if entry is not None and self.ledger.depart(entry, "deleted"):
            self.ledger.condemned += entry.size
            self.changed(entry, came=False)
            return entry
        name = name_of(key)
        return self.unremoved.pop(name, None) or new_entry(key, 0)

    def remove_older(self, key: str) -> asyncio.Task[Removed]:
        """As `remove_keys` for one key, or the removal under way, if nothing can have come onto the medium after it."""
        name = name_of(key)
        turn, task = self._removals.get(name, (None, None))
        if task is None or self.locks.last(name) is not turn or self.ledger.index.find(key) is not None:
            return self.remove_keys([key])
        return task

    def forget_unknown(self, key: str) -> None:
        """Have a shared medium drop what others may have put under a key that has another value here by now.

        The next sweep does it for all such keys at once: a medium that is too slow for the puts gets no removal each.
        """
        name = name_of(key)
        if self.shared and self.ledger.index.find(key) is None and name not in self.unremoved:
            self.unremoved[name] = new_entry(key, 0)

    def concerned(self, prefix: str) -> Sequence[str]:
        """Return the keys under `prefix` that a removal concerns here: books, writes under way, what is in doubt."""
        keys = dict.fromkeys(self.ledger.index.keys_under(prefix))
        keys.update(dict.fromkeys(entry.key for entry in self.unremoved.values() if entry.key.startswith(prefix)))
        under_way = (key_of(name) for name in self.locks.names())
        keys.update(dict.fromkeys(key for key in under_way if key is not None and key.startswith(prefix)))
        return list(keys)

    def may_have(self, key: str) -> bool:
        """Tell whether a removal of `key` has anything to do here: books, medium, or a write under way."""
        return self.shared or self.knows(key)

    def knows(self, key: str) -> bool:
        """Tell whether this store has, writes, removes or doubts `key` here, or cannot say before the tier is ready."""
        name = name_of(key)
        known = self.ledger.index.find(key) is not None
        return known or not self.ready or self.locks.held(name) or name in self.unremoved

    def _unlink(self, entries: Sequence[Entry]) -> asyncio.Task[Removed]:
        # The place in each key's queue is taken now: a later write of the key comes after this removal.
        turns = [self.locks.take_place(entry.name) for entry in entries]
        try:
            task = self.services.supervisor.spawn(self._unlink_job(entries, turns), name=f"{self.name} remove")
        except ClosedError:
            for turn in turns:
                turn.release()
            raise
        self._removals.update((turn.key, (turn, task)) for turn in turns)
        return task

    async def _unlink_job(self, entries: Sequence[Entry], turns: Sequence[Turn]) -> Removed:
        answers: Sequence[bool | BackendError]
        try:
            for turn in turns:
                await turn.wait()
            doomed = [entry.name for entry in entries if not self._replaced(entry)]
            deleted = dict(zip(doomed, await self.backend.delete_many(doomed), strict=True))
            answers = [deleted.get(entry.name, False) for entry in entries]
        except Exception as exc:  # noqa: BLE001  # told by the return value; the bytes stay spoken for
            answers = [exc if isinstance(exc, BackendError) else BackendError(str(exc))] * len(entries)
        finally:
            for turn in turns:
                turn.release()
                if self._removals.get(turn.key, (None,))[0] is turn:
                    del self._removals[turn.key]
        pairs = list(zip(entries, answers, strict=True))
        confirmed = [self._unlinked(entry, answer) for entry, answer in pairs]
        return Removed(all(confirmed), frozenset(entry.key for entry, answer in pairs if answer is True))

    def _replaced(self, entry: Entry) -> bool:
        """Tell whether a write that came before this removal put another value in the entry's place."""
        there = self.ledger.index.find(entry.key)
        return there is not None and there is not entry

    def _unlinked(self, entry: Entry, answer: bool | BackendError) -> bool:  # noqa: FBT001  # a backend's answer
        waiting = self.unremoved.pop(entry.name, None)  # an earlier removal of the name failed, or a write
        size = entry.size + (waiting.size if waiting is not None else 0)
        if isinstance(answer, BackendError):
            self.unremoved[entry.name] = msgspec.structs.replace(entry, size=size)
            self.failed(answer)
            self.services.events.emit(
                "error", tier=self.name, key=entry.key, reason=f"delete failed: {answer}", error=answer
            )
            return False
        self.ledger.condemned -= size
        return True

    def own_affair(self, name: str) -> bool:
        """Tell whether this store has the name in its books, writes or removes it now, or failed to remove it."""
        key = key_of(name)
        in_books = key is not None and self.ledger.index.find(key) is not None
        return in_books or self.locks.held(name) or name in self.unremoved

    def sweep(self) -> None:
        """Remove what has expired, and try again what could not be removed."""
        due = self.ledger.due()
        if due:
            self.discard(due, "expired")
        if self.unremoved and self.up:
            # A write under way takes the place of what could not be removed: to remove after it would remove the new.
            again = [entry for name, entry in self.unremoved.items() if not self.locks.held(name)]
            for entry in again:
                del self.unremoved[entry.name]
            _ = self._unlink(again)

    # --- shared with reading.py and writing.py

    async def bounded(self, call: Coroutine[object, object, T], deadline: Deadline | None = None) -> T:
        """Await a backend call that holds no caller's memory, at most for the tier's deadline; never cancel it.

        A caller's own `deadline` may end the wait earlier.

        Raises:
            BackendTimeoutError: it did not answer in time; it goes on unheard.
            BackendError: as the backend raised it.
        """
        job = self.services.supervisor.spawn(_with_error(call), name=f"{self.name} call")
        seconds = self.settings.deadline_seconds
        done, _ = await asyncio.wait({job}, timeout=min(seconds, deadline.remaining()) if deadline else seconds)
        if not done:
            raise BackendTimeoutError(f"tier {self.name!r} did not answer in time")
        if job.cancelled():
            raise BackendUnavailableError(f"tier {self.name!r} was closed meanwhile")
        answer = job.result()
        if isinstance(answer, BackendError | ConfigError):
            raise answer
        if isinstance(answer, Exception):
            raise BackendError(f"tier {self.name!r}: {answer!r}") from answer
        return answer

    async def pages(self) -> AsyncIterator[Sequence[Stat]]:
        """Yield the medium's listing page by page, each within the tier's deadline.

        Raises:
            BackendError: as `bounded`.
        """
        listing = self.backend.scan()
        while (page := await self.bounded(_next_page(listing))) is not None:
            yield page

    async def pages_under(self, prefixes: Sequence[str]) -> AsyncIterator[Sequence[Stat]]:
        """Yield what the medium holds under some beginnings of names, or all of it where it cannot tell them apart.

        Raises:
            BackendError: as `bounded`.
        """
        if self.lister is None or "" in prefixes:
            async for page in self.pages():
                yield page
            return
        for prefix in prefixes:
            listing = self.lister.scan_under(prefix)
            while (found := await self.bounded(_next_page(listing))) is not None:
                yield found

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of transfers under way."""
        return self.limits.transferred.in_flight

    def failed(self, error: BaseException) -> None:
        """Tell the breaker of a failure."""
        if self.breaker.failed(error):
            self.services.events.emit("degraded", tier=self.name, reason=str(error), error=error)

    def changed(self, entry: Entry, *, came: bool) -> None:
        """Tell the journal."""
        if self.on_change is not None:
            self.on_change(entry, came)


async def _with_error(call: Coroutine[object, object, T]) -> T | Exception:
    """Return what `call` raises: it is for the one who waits, not for the supervisor to report."""
    try:
        return await call
    except Exception as exc:  # noqa: BLE001  # see above
        return exc


async def _next_page(listing: AsyncIterator[Sequence[Stat]]) -> Sequence[Stat] | None:
    return await anext(listing, None)
