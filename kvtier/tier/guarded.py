"""A tier's backend behind a guard: whatever goes wrong in it comes out as an error of this library."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtier.backends.base import Backend
from kvtier.errors import BackendError, BackendTimeoutError, KVTierError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from kvtier.backends.base import BackendContext, Read, Stat, Traits, Write, Written


class GuardedBackend(Backend):
    """Passes every call on. Foreign exceptions are `BackendError`s, and so is a `CancelledError` nobody asked for.

    Without that, a backend whose client cancels a call would end the task that awaited it, with all it still had to do.
    """

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.traits: Traits = inner.traits

    async def open(self, context: BackendContext) -> None:
        """Pass on."""
        with _faults():
            await self._inner.open(context)

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        """Pass on."""
        with _faults():
            return await self._inner.read_many(reads)

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        """Pass on."""
        with _faults():
            return await self._inner.write_many(writes)

    async def delete_many(self, names: Sequence[str]) -> Sequence[bool | BackendError]:
        """Pass on."""
        with _faults():
            return await self._inner.delete_many(names)

    async def stat_many(self, names: Sequence[str]) -> Sequence[Stat | BackendError | None]:
        """Pass on."""
        with _faults():
            return await self._inner.stat_many(names)

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        """Pass on."""
        with _faults():
            async for page in self._inner.scan(after):
                yield page

    async def sync(self, names: Sequence[str]) -> None:
        """Pass on."""
        with _faults():
            await self._inner.sync(names)

    async def set_expiry_many(self, items: Sequence[tuple[str, float | None]]) -> None:
        """Pass on."""
        with _faults():
            await self._inner.set_expiry_many(items)

    def figures(self) -> Mapping[str, int | float | str]:
        """Pass on; a backend that cannot tell tells nothing."""
        try:
            return self._inner.figures()
        except Exception:  # noqa: BLE001  # figures are no reason to fail
            return {}

    async def aclose(self) -> None:
        """Pass on."""
        with _faults():
            await self._inner.aclose()


@contextmanager
def _faults() -> Iterator[None]:
    task = asyncio.current_task()
    asked = task.cancelling() if task is not None else 0
    try:
        yield
    except KVTierError:
        raise
    except asyncio.CancelledError as exc:
        if task is None or task.cancelling() > asked:
            raise
        raise BackendError("the backend cancelled its own call") from exc
    except TimeoutError as exc:
        raise BackendTimeoutError(f"the backend raised {exc!r}") from exc
    except Exception as exc:
        raise BackendError(f"the backend raised {exc!r}") from exc
