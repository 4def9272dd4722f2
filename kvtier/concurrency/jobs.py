"""One blocking call on its way through a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvtier.concurrency.workers import Urgency


class Job:
    """A call, the coroutine that waits for it, and what became of it.

    `Workers` guards `ended` and `abandoned` by its lock; the rest is written by one side at a time.
    """

    __slots__ = ("_call", "_urgency", "abandoned", "ended", "error", "future", "loop", "started", "timer")

    def __init__(
        self, call: Callable[[], None], loop: asyncio.AbstractEventLoop, urgency: Urgency | None = None
    ) -> None:
        self._call = call
        self._urgency = urgency
        self.loop: asyncio.AbstractEventLoop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.started: float | None = None  # on `loop.time()`
        self.error: BaseException | None = None
        self.ended: bool = False
        self.abandoned: bool = False

    @property
    def background(self) -> bool:
        """Whether nobody waits for it, now."""
        return self._urgency is not None and self._urgency.background

    def run(self) -> None:
        """Make the call, in a thread; whatever it raises is kept for the caller."""
        try:
            self._call()
        except BaseException as exc:  # noqa: BLE001  # it belongs to the caller; the thread must live on
            self.error = exc

    def wake(self) -> None:
        """Have the waiting coroutine look again; from any thread, and harmless once its loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    async def wait_woken(self) -> None:
        """Return after the next `wake`; may be awaited again after it was cancelled."""
        if self.future.cancelled():
            self.future = self.loop.create_future()
        await self.future

    def _resolve(self) -> None:
        if not self.future.done():
            self.future.set_result(None)
