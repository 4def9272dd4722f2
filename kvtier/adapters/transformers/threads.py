"""Where a model runs while the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Self, TypeVar, TypeVarTuple

from kvtier.concurrency.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CLOSE_SECONDS = 5.0


class ModelThread:
    """One thread for one call. Cancelling sets `stopping` and waits until the running job has really ended.

    Jobs that can stop early look at `stopping`; a forward pass cannot, so a cancelled call ends after the current one.
    """

    def __init__(self) -> None:
        self.stopping: threading.Event = threading.Event()
        self._workers = Workers("model", 1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._workers.aclose(CLOSE_SECONDS)

    async def run(self, func: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call `func(*args)` in the thread; return its result or raise its exception."""
        task = asyncio.ensure_future(self._workers.run(func, *args))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.stopping.set()
            await _ended(task)
            raise


async def _ended(task: asyncio.Future[T]) -> None:
    """Wait for `task` through further cancellations; its own outcome is of no interest any more."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:  # said once already; the model still runs on the caller's memory
            continue
    if not task.cancelled():
        task.exception()
