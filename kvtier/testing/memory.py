"""A small, right backend over a dict: the control of the kit's own tests, and a medium for tests of what uses one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtier.backends.base import Backend, Read, Stat, TooLongError, Traits, Write, Written, check_name, is_name
from kvtier.backends.views import gather, host_view, scatter, total_bytes, writable_views
from kvtier.errors import BackendUnavailableError, CapacityError, ClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvtier.backends.base import BackendContext
    from kvtier.errors import BackendError

PAGE_ENTRIES = 100
DOWN = "!down"  # no entry can have this name


@dataclass(frozen=True, slots=True)
class Stored:
    """One entry of a medium; `expires` and `changed` are wall-clock seconds."""

    value: bytes
    expires: float | None
    changed: float


Medium = dict[str, Stored]


class MemoryBackend(Backend):
    """Entries in a dict that outlives the backend: give several backends one `medium` and they share it.

    Every call lets others run before it acts. Methods that begin with `_do` handle one item; broken twins replace
    them one at a time. A medium that holds `DOWN` fails, at every call that is not `aclose`.
    """

    traits: Traits = Traits(persistent=True, shared=True, ranges=True)

    def __init__(self, medium: Medium | None = None) -> None:
        self.medium: Medium = {} if medium is None else medium
        self._context: BackendContext | None = None

    async def open(self, context: BackendContext) -> None:
        """Begin to serve."""
        self._context = context
        await self._turn()

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        """As the contract says."""
        await self._turn()
        return [await self._do_read(read) for read in reads]

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        """As the contract says."""
        await self._turn()
        return [await self._do_write(write) for write in writes]

    async def delete_many(self, names: Sequence[str]) -> Sequence[bool | BackendError]:
        """As the contract says."""
        await self._turn()
        return [self._do_delete(name) for name in names]

    async def stat_many(self, names: Sequence[str]) -> Sequence[Stat | BackendError | None]:
        """As the contract says."""
        await self._turn()
        return [self._do_stat(name) for name in names]

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        """Yield pages in the order of names."""
        await self._turn()
        names = sorted(name for name in self.medium if is_name(name) and (after is None or name > after))
        for start in range(0, len(names), PAGE_ENTRIES):
            await self._turn()
            stats = [self._do_stat(name) for name in names[start : start + PAGE_ENTRIES]]
            page = [stat for stat in stats if stat is not None]
            if page:
                yield page

    async def set_expiry_many(self, items: Sequence[tuple[str, float | None]]) -> None:
        """As the contract says."""
        await self._turn()
        for name, expires in items:
            if name in self.medium:
                self.medium[name] = replace(self.medium[name], expires=expires)

    async def aclose(self) -> None:
        """Stop serving; the medium stays."""
        self._context = None

    async def _turn(self) -> BackendContext:
        await asyncio.sleep(0)
        if self._context is None:
            raise ClosedError("this memory backend is not open")
        if DOWN in self.medium:
            raise BackendUnavailableError("this medium is down")
        return self._context

    async def _do_read(self, read: Read) -> int | BackendError | None:
        into, stored = writable_views(read.into), self.medium.get(check_name(read.name))
        if stored is None:
            return None
        source = memoryview(stored.value)[read.offset :]
        if source.nbytes > total_bytes(into) and not read.partial:
            return TooLongError(len(stored.value))
        return scatter(source, into)

    async def _do_write(self, write: Write) -> Written | BackendError:
        name = check_name(write.name)
        most = self.traits.max_value_bytes
        if most is not None and total_bytes(host_view(part) for part in write.parts) > most:
            return CapacityError(f"a value of more than {most} bytes")
        if write.if_absent and name in self.medium:
            return Written(len(self.medium[name].value), stored=False)
        return self._keep(name, joined(write), write.expires)

    def _do_delete(self, name: str) -> bool:
        return self.medium.pop(check_name(name), None) is not None

    def _do_stat(self, name: str) -> Stat | None:
        stored = self.medium.get(check_name(name))
        return None if stored is None else Stat(name, len(stored.value), stored.expires, stored.changed)

    def _keep(self, name: str, value: bytes, expires: float | None) -> Written:
        now = 0.0 if self._context is None else self._context.clock.wall()
        self.medium[name] = Stored(value, expires, now)
        return Written(len(value))


class ExpiringMemoryBackend(MemoryBackend):
    """Drops expired entries by itself, and takes values of at most 1 MiB."""

    traits: Traits = Traits(native_expiry=True, max_value_bytes=1 << 20)

    async def _turn(self) -> BackendContext:
        context = await super()._turn()
        now = context.clock.wall()
        for name, stored in list(self.medium.items()):
            if stored.expires is not None and stored.expires <= now:
                del self.medium[name]
        return context


def joined(write: Write) -> bytes:
    """Return the concatenation of a write's parts."""
    parts = [host_view(part) for part in write.parts]
    value = bytearray(total_bytes(parts))
    gather(parts, memoryview(value))
    return bytes(value)
