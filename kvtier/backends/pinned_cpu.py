"""Entries kept in the store's own host memory: each one is a slot of the arena."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtier.backends.base import Backend, Read, Stat, TooLongError, Traits, Write, Written, check_name
from kvtier.backends.batches import answer_each
from kvtier.backends.listing import stat_pages
from kvtier.backends.views import BIG_BYTES, gather, host_view, scatter, total_bytes, writable_views
from kvtier.errors import CapacityError, ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from typing import TypeVar

    from kvtier.backends.base import BackendContext
    from kvtier.buffers.arena import Slot
    from kvtier.errors import BackendError

    T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry:
    slot: Slot
    size: int  # of the value: the slot has whole pages
    expires: float | None
    changed: float


class PinnedCpuBackend(Backend):
    """A tier in the arena: page-aligned host memory, registered with CUDA where there is a device.

    It is a `SlotBackend`: a tier that works with slots copies nothing. Through the methods of `Backend` entries are
    copied in and out, in threads where that is more than 64 KiB. Entries live as long as the backend is open.
    """

    traits: Traits = Traits(ranges=True)

    def __init__(self) -> None:
        self._context: BackendContext | None = None
        self._entries: dict[str, _Entry] = {}

    async def open(self, context: BackendContext) -> None:
        """Start with no entries."""
        if self._context is not None:
            raise ConfigError("this pinned-cpu backend is open already; one backend belongs to one tier")
        self._context = context

    def adopt(self, name: str, slot: Slot) -> None:
        """Keep `slot` as the entry; it counts with its whole size and no expiry."""
        self._keep(check_name(name), slot, slot.size, None)

    def lend(self, name: str) -> Slot | None:
        """Return the entry's slot with one reference added for the caller, or `None`."""
        self._use()
        entry = self._entries.get(name)
        return None if entry is None else entry.slot.retain()

    def drop(self, name: str) -> bool:
        """Give up the entry's reference; tell whether it was there."""
        self._use()
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        entry.slot.release()
        return True

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        """As the contract says; an entry that is replaced meanwhile is copied out whole all the same."""
        self._use()
        for read in reads:
            check_name(read.name)
            writable_views(read.into)
        return await answer_each(self._read, reads)

    async def _read(self, read: Read) -> int | None:
        entry = self._entries.get(read.name)
        if entry is None:
            return None
        into = writable_views(read.into)
        wanted, room = max(0, entry.size - read.offset), total_bytes(into)
        if wanted > room and not read.partial:
            raise TooLongError(entry.size)
        wanted = min(wanted, room)
        slot = entry.slot.retain()  # a drop while the copy runs must not free the memory
        try:
            source = slot.view(min(read.offset, entry.size), wanted)
            return await self._copying(wanted, lambda: scatter(source, into))
        finally:
            slot.release()

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        """As the contract says; an entry for which the arena has no room now is answered with `CapacityError`."""
        self._use()
        for write in writes:
            check_name(write.name)
            for part in write.parts:
                host_view(part)
        return await answer_each(self._write, writes)

    async def _write(self, write: Write) -> Written:
        present = self._entries.get(write.name)
        if write.if_absent and present is not None:
            return Written(present.size, stored=False)
        parts = [host_view(part) for part in write.parts]
        size = total_bytes(parts)
        slot = self._use().arena.try_allocate(max(1, size), entry=True)
        if slot is None:
            raise CapacityError(f"no room in the arena for an entry of {size} bytes")
        try:
            into = slot.view(0, size)
            await self._copying(size, lambda: gather(parts, into))
            present = self._entries.get(write.name)  # another write may have come first
            if write.if_absent and present is not None:
                slot.release()
                return Written(present.size, stored=False)
            self._keep(write.name, slot, size, write.expires)
        except BaseException:
            slot.release()
            raise
        return Written(size)

    async def delete_many(self, names: Sequence[str]) -> Sequence[bool | BackendError]:
        """As the contract says; memory goes back once nobody holds the slot any more."""
        return [self.drop(check_name(name)) for name in names]

    async def stat_many(self, names: Sequence[str]) -> Sequence[Stat | BackendError | None]:
        """As the contract says."""
        self._use()
        return [self._stat(check_name(name)) for name in names]

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        """Yield pages of entries in the order of their names."""
        self._use()
        async for page in stat_pages(self._entries, after, self.stat_many):
            yield page

    async def set_expiry_many(self, items: Sequence[tuple[str, float | None]]) -> None:
        """Note the expiry, which `stat_many` and `scan` report."""
        now = self._use().clock.wall()
        for name, expires in items:
            entry = self._entries.get(check_name(name))
            if entry is not None:
                self._entries[name] = replace(entry, expires=expires, changed=now)

    async def aclose(self) -> None:
        """Give up every entry."""
        entries, self._entries = self._entries, {}
        self._context = None
        for entry in entries.values():
            entry.slot.release()

    def _use(self) -> BackendContext:
        if self._context is None:
            raise ClosedError("this pinned-cpu backend is not open")
        return self._context

    def _keep(self, name: str, slot: Slot, size: int, expires: float | None) -> None:
        entry = _Entry(slot, size, expires, self._use().clock.wall())
        older = self._entries.get(name)
        self._entries[name] = entry
        if older is not None:
            older.slot.release()

    def _stat(self, name: str) -> Stat | None:
        entry = self._entries.get(name)
        return None if entry is None else Stat(name, entry.size, entry.expires, entry.changed)

    async def _copying(self, size: int, copy: Callable[[], T]) -> T:
        if size <= BIG_BYTES:
            return copy()
        return await self._use().workers.run(copy)
