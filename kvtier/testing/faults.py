"""Backends that misbehave on demand, wrapped around one that does not: slow, flaky, hanging."""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from kvtier.backends.base import Backend, Read, Stat, Write, Written
from kvtier.errors import BackendError, BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from kvtier.backends.base import BackendContext, Traits

    Item = TypeVar("Item")
    Answer = TypeVar("Answer")

VERBS = frozenset({"open", "read", "write", "delete", "stat", "scan", "sync", "expiry", "close"})


class FaultyBackend(Backend):
    """Base of the wrappers: every call goes through `before`, then on to `inner`.

    Only the contract of `Backend` is passed on: a wrapped backend has no slots and no journal.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.traits: Traits = inner.traits

    @abstractmethod
    async def before(self, verb: str) -> None:
        """Delay or fail a call as a whole; `verb` is one of `VERBS`."""

    def spoil(self, verb: str, name: str) -> BackendError | None:
        """Return an error to answer for one item, which `inner` then does not see."""
        del verb, name
        return None

    async def open(self, context: BackendContext) -> None:
        """Open the wrapped backend."""
        await self.before("open")
        await self.inner.open(context)

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        """Read what is not spoilt."""
        return await self._batch("read", reads, lambda read: read.name, self.inner.read_many)

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        """Write what is not spoilt."""
        return await self._batch("write", writes, lambda write: write.name, self.inner.write_many)

    async def delete_many(self, names: Sequence[str]) -> Sequence[bool | BackendError]:
        """Delete what is not spoilt."""
        return await self._batch("delete", names, str, self.inner.delete_many)

    async def stat_many(self, names: Sequence[str]) -> Sequence[Stat | BackendError | None]:
        """Look at what is not spoilt."""
        return await self._batch("stat", names, str, self.inner.stat_many)

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        """Yield the wrapped backend's pages; each is a call of its own."""
        await self.before("scan")
        async for page in self.inner.scan(after):
            yield page
            await self.before("scan")

    async def sync(self, names: Sequence[str]) -> None:
        """Sync the wrapped backend."""
        await self.before("sync")
        await self.inner.sync(names)

    async def set_expiry_many(self, items: Sequence[tuple[str, float | None]]) -> None:
        """Change expiry in the wrapped backend."""
        await self.before("expiry")
        await self.inner.set_expiry_many(items)

    async def aclose(self) -> None:
        """Close the wrapped backend."""
        await self.before("close")
        await self.inner.aclose()

    async def _batch(
        self,
        verb: str,
        items: Sequence[Item],
        name_of: Callable[[Item], str],
        call: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | BackendError]]],
    ) -> list[Answer | BackendError]:
        await self.before(verb)
        spoilt = [self.spoil(verb, name_of(item)) for item in items]
        rest = iter(await call([item for item, error in zip(items, spoilt, strict=True) if error is None]))
        return [next(rest) if error is None else error for error in spoilt]


class SlowBackend(FaultyBackend):
    """Every call takes its time first.

    Args:
        inner: the backend behind.
        seconds: how long, for all verbs or by verb.
        jitter: the delay is drawn from `seconds * (1 - jitter)` to `seconds * (1 + jitter)`.
        seed: of the jitter.
    """

    def __init__(
        self, inner: Backend, *, seconds: float | Mapping[str, float], jitter: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.jitter = jitter
        self._random = random.Random(seed)

    async def before(self, verb: str) -> None:
        """Sleep."""
        seconds = self.seconds.get(verb, 0.0) if isinstance(self.seconds, Mapping) else self.seconds
        await asyncio.sleep(seconds * (1 + self.jitter * self._random.uniform(-1, 1)))


class FlakyBackend(FaultyBackend):
    """Fails as told: at random, the next few times, or for good.

    Attributes:
        rate: the probability that one item is answered with an error, drawn from `seed` in the order of calls.
        down: while True every call but `close` raises.
        failures: how many items and calls have failed.

    Args:
        inner: the backend behind.
        rate: see above.
        seed: see above.
        error: makes the error; anything it makes that is no `BackendError` is raised, not answered.
        verbs: which calls may fail.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        rate: float = 0.0,
        seed: int = 0,
        error: Callable[[], BaseException] | None = None,
        verbs: frozenset[str] = frozenset({"read", "write", "delete", "stat", "scan"}),
    ) -> None:
        super().__init__(inner)
        self.rate = rate
        self.down = False
        self.failures: int = 0
        self._error = error or _unavailable
        self._verbs = verbs
        self._random = random.Random(seed)
        self._next: list[Callable[[], BaseException]] = []

    def fail_next(self, count: int = 1, *, error: Callable[[], BaseException] | None = None) -> None:
        """Raise from the next `count` calls, whatever the rate."""
        self._next += [error or self._error] * count

    async def before(self, verb: str) -> None:
        """Fail a call as a whole."""
        if verb not in self._verbs:
            return
        if self._next:
            self.failures += 1
            failure = self._next.pop(0)
            raise failure()
        if self.down:
            self.failures += 1
            raise self._error()

    def spoil(self, verb: str, name: str) -> BackendError | None:
        """Fail single items."""
        del name
        if verb not in self._verbs or self._random.random() >= self.rate:
            return None
        self.failures += 1
        error = self._error()
        if isinstance(error, BackendError):
            return error
        raise error


class HangingBackend(FaultyBackend):
    """Calls of the verbs in `hanging` do not come back until `release`.

    Args:
        inner: the backend behind.
        hanging: verbs that hang from the start; `hang` adds more.
        stubborn: a hanging call does not react to being cancelled either, like a thread stuck in the kernel.
    """

    def __init__(self, inner: Backend, *, hanging: frozenset[str] = frozenset(), stubborn: bool = False) -> None:
        super().__init__(inner)
        self.hanging: set[str] = set(hanging)
        self.stubborn = stubborn
        self.stuck: int = 0  # calls that hang now
        self._released = asyncio.Event()
        self._arrived = asyncio.Condition()

    def hang(self, *verbs: str) -> None:
        """Let calls of these verbs hang from now on; with none given, all but `open` and `close`."""
        self.hanging |= set(verbs) or VERBS - {"open", "close"}
        self._released.clear()

    def release(self) -> None:
        """Let all go on, and hang no more."""
        self.hanging.clear()
        self._released.set()

    async def wait_stuck(self, count: int = 1) -> None:
        """Return once `count` calls hang."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.stuck >= count)

    async def before(self, verb: str) -> None:
        """Hang."""
        if verb not in self.hanging:
            return
        self.stuck += 1
        try:
            async with self._arrived:
                self._arrived.notify_all()
            await self._wait()
        finally:
            self.stuck -= 1

    async def _wait(self) -> None:
        cancelled: asyncio.CancelledError | None = None
        while not self._released.is_set():
            try:
                await self._released.wait()
            except asyncio.CancelledError as exc:
                if not self.stubborn:
                    raise
                cancelled = exc
        if cancelled is not None:
            raise cancelled


def _unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("flaky: made to fail")
