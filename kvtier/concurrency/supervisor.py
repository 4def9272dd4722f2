"""Tasks that outlive the call that began them: held, watched, and ended together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from kvtier.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class Supervisor:
    """Owner of background tasks. `on_failure(name, error)` hears of every exception but cancellation."""

    def __init__(self, on_failure: Callable[[str, BaseException], None] | None = None) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = False

    @property
    def count(self) -> int:
        """Tasks that have not ended."""
        return len(self._tasks)

    def spawn(self, coro: Coroutine[object, object, T], *, name: str) -> asyncio.Task[T]:
        """Start `coro` as a task that is held until it ends.

        Raises:
            ClosedError: after `aclose`; `coro` is closed, it never ran.
        """
        if self._closed:
            coro.close()
            raise ClosedError(f"task {name!r} not started: its supervisor is closed")
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def start(self, coro: Coroutine[object, object, object], *, name: str) -> None:
        """As `spawn`, for work that nobody waits for."""
        _ = self.spawn(coro, name=name)

    async def aclose(self, timeout: float) -> bool:
        """Cancel every task, those they start meanwhile included, and wait at most `timeout` seconds for their ends.

        Tells whether all ended; either way nothing can be started afterwards.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout
        try:
            while tasks := self._others():
                # A task cancelled before its first step never runs, and what it was given is lost: let all begin.
                # Twice, because nothing promises that this task is the last of one turn of the loop.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=max(0.0, ends - loop.time()))
                if loop.time() >= ends:
                    break
        finally:
            self._closed = True
        return not self._others()

    def _others(self) -> set[asyncio.Task[object]]:
        return self._tasks - {asyncio.current_task()}

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        try:
            if self._on_failure is not None:
                self._on_failure(task.get_name(), error)
                return
        except Exception as exc:  # noqa: BLE001  # the report failed: both errors go to the loop's handler
            exc.__context__ = error
            error = exc
        context = {"message": f"task {task.get_name()!r} failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)
