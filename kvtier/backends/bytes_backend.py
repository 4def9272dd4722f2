"""The easy way to a backend: fill in a few methods on plain bytes, and get the whole contract."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from kvtier.backends.base import Backend, Read, Stat, TooLongError, Traits, Write, Written, check_name, is_name
from kvtier.backends.batches import answer_each
from kvtier.backends.foreign import COMMON, translate
from kvtier.backends.listing import stat_pages
from kvtier.backends.views import BIG_BYTES, host_view, scatter, total_bytes, writable_views
from kvtier.concurrency.key_locks import KeyLocks
from kvtier.errors import BackendError, CapacityError, ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeVar

    from kvtier.backends.base import BackendContext
    from kvtier.backends.foreign import ForeignErrors

    T = TypeVar("T")


class BytesBackend(Backend):
    """A `Backend` made of `get`, `put`, `delete` and `names`, which an author fills in.

    Everything else has a default to override where the medium can do better: `stat` reads the value, `connect` and
    `disconnect` do nothing, `put_if_absent` looks first. Whatever exception these methods raise becomes a
    `BackendError`; `foreign` says which one. It costs one copy of every value, as `bytes`; a medium that can fill
    given buffers is better served by `Backend` itself.
    """

    traits: Traits = Traits()
    parallel: ClassVar[int] = 16  # items of one batch under way at once
    foreign: ClassVar[ForeignErrors] = {}

    _context: BackendContext | None = None
    _writing: KeyLocks | None = None  # an author's `__init__` need not call ours

    @abstractmethod
    async def get(self, name: str) -> bytes | None:
        """Return the value, or `None` if there is none."""

    @abstractmethod
    async def put(self, name: str, value: bytes, expires: float | None) -> None:
        """Store the value whole, replacing an older one; `expires` is wall-clock seconds (ignore it if you must)."""

    @abstractmethod
    async def delete(self, name: str) -> bool:
        """Remove the value; tell whether it was there."""

    @abstractmethod
    async def names(self) -> Iterable[str]:
        """Return the names of all values."""

    async def stat(self, name: str) -> Stat | None:
        """Return size and expiry; the default fetches the value and knows no expiry."""
        value = await self.get(name)
        return None if value is None else Stat(name, len(value))

    async def put_if_absent(self, name: str, value: bytes, expires: float | None) -> bool:
        """Store the value unless there is one; tell whether it was stored. The default is right within one process.

        `expires` is wall-clock seconds, as in `put`.
        """
        if await self.stat(name) is not None:
            return False
        await self.put(name, value, expires)
        return True

    async def connect(self) -> None:
        """Get ready for use; `self.context` is there."""

    async def disconnect(self) -> None:
        """Release what `connect` acquired; also called when it failed half-way."""

    @property
    def context(self) -> BackendContext:
        """What the store lends this backend while it is open."""
        if self._context is None:
            raise ClosedError(f"{type(self).__name__} is not open")
        return self._context

    async def open(self, context: BackendContext) -> None:
        """Connect."""
        if self._context is not None:
            raise ConfigError(f"{type(self).__name__} is open already; one backend belongs to one tier")
        self._context = context
        self._writing = KeyLocks()
        with self._translating():
            await self.connect()

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        """Get each value and copy it into the buffers."""
        self._use()
        for read in reads:
            check_name(read.name)
            writable_views(read.into)
        return await answer_each(self._read, reads, limit=self.parallel)

    async def _read(self, read: Read) -> int | None:
        with self._translating():
            value = await self.get(read.name)
            if value is None:
                return None
            source = memoryview(value)[read.offset :]
        into = writable_views(read.into)
        if source.nbytes > total_bytes(into) and not read.partial:
            raise TooLongError(len(value))
        return await self._copying(source.nbytes, lambda: scatter(source, into))

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        """Join each entry's parts and put them; writes and deletes of one name take turns."""
        self._use()
        for write in writes:
            check_name(write.name)
            for part in write.parts:
                host_view(part)
        return await answer_each(self._write, writes, limit=self.parallel)

    async def _write(self, write: Write) -> Written:
        parts = [host_view(part) for part in write.parts]
        size = total_bytes(parts)
        most = self.traits.max_value_bytes
        if most is not None and size > most:
            raise CapacityError(f"{size} bytes, {type(self).__name__} takes at most {most}")
        value = await self._copying(size, lambda: b"".join(parts))
        async with self._use().hold(write.name):
            with self._translating():
                if not write.if_absent:
                    await self.put(write.name, value, write.expires)
                    return Written(size)
                stored = await self.put_if_absent(write.name, value, write.expires)
                return Written(size, stored=stored)

    async def delete_many(self, names: Sequence[str]) -> Sequence[bool | BackendError]:
        """Delete each value."""
        self._use()
        for name in names:
            check_name(name)
        return await answer_each(self._delete, names, limit=self.parallel)

    async def _delete(self, name: str) -> bool:
        async with self._use().hold(name):
            with self._translating():
                return await self.delete(name)

    async def stat_many(self, names: Sequence[str]) -> Sequence[Stat | BackendError | None]:
        """Look at each value."""
        self._use()
        for name in names:
            check_name(name)
        return await answer_each(self._stat, names, limit=self.parallel)

    async def _stat(self, name: str) -> Stat | None:
        with self._translating():
            return await self.stat(name)

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        """Yield pages in the order of names; each value is looked at by `stat`."""
        self._use()
        with self._translating():
            names = {name for name in await self.names() if is_name(name)}
        async for page in stat_pages(names, after, self.stat_many):
            yield page

    async def aclose(self) -> None:
        """Disconnect."""
        if self._context is None:
            return
        try:
            with self._translating():
                await self.disconnect()
        finally:
            self._context = self._writing = None

    def _use(self) -> KeyLocks:
        if self._writing is None:
            raise ClosedError(f"{type(self).__name__} is not open")
        return self._writing

    def _translating(self) -> AbstractContextManager[None]:
        # What an author's method raises is a fault of the medium, whatever it is.
        return translate({**self.foreign, **COMMON, Exception: BackendError}, medium=type(self).__name__)

    async def _copying(self, size: int, copy: Callable[[], T]) -> T:
        if size <= BIG_BYTES:
            return copy()
        return await self.context.workers.run(copy)
