"""What both blocking faces share: how a method becomes a call, and what an overdue call is to its caller."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar

from kvtier.blocking.call import OverdueError, takes_deadline
from kvtier.concurrency.clock import SystemClock
from kvtier.concurrency.deadline import Deadline
from kvtier.errors import CapacityError, InvalidValueError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator

    from kvtier.blocking.loop_thread import LoopThread

P = ParamSpec("P")
T = TypeVar("T")
Subject = TypeVar("Subject")

_CLOCK = SystemClock()


class BlockingFace(Generic[Subject]):
    """Runs methods of one asynchronous object on its loop's thread."""

    def __init__(self, thread: LoopThread, subject: Subject, *, deadline_seconds: float, strict: bool) -> None:
        self._thread = thread
        self._subject = subject
        self._deadline_seconds = deadline_seconds
        self._strict = strict

    def submit(
        self,
        method: Callable[Concatenate[Subject, P], Coroutine[object, object, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]:
        """Begin a call and return at once: `store.submit(kvtier.KVStore.get, tokens, max_tokens=512)`.

        The future ends by the call's deadline, with `BackendTimeoutError` if the loop is stuck. Where the queue is full
        the call is dropped: the future has failed with `CapacityError`. Cancelling a future asks the call to end; the
        future is finished once nothing touches the call's memory (`out`, the source of a put) any more.

        Args:
            method: a coroutine method of the asynchronous class that this object stands for.
            args: its arguments, as they are for the asynchronous call.
            kwargs: likewise.

        Raises:
            InvalidValueError: `method` is none, or `deadline_seconds` is not a finite number above 0.
            ClosedError: the store does not serve calls.
        """
        if not callable(method):
            raise InvalidValueError(f"submit takes a method itself, kvtier.KVStore.get for one, not {method!r}")
        try:
            return self._thread.submit(*self._prepared(method, args, kwargs))
        except CapacityError as exc:
            failed: Future[T] = Future()
            failed.set_exception(exc)
            self._thread.keep_for_poll(failed)
            return failed

    def _ask(
        self,
        otherwise: T,
        method: Callable[Concatenate[Subject, P], Coroutine[object, object, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call and wait; an overdue call is `otherwise`, a miss, unless the store is strict."""
        try:
            return self._must(method, *args, **kwargs)
        except OverdueError:
            if self._strict:
                raise
            return otherwise

    def _must(
        self,
        method: Callable[Concatenate[Subject, P], Coroutine[object, object, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call and wait; an overdue call raises."""
        return self._thread.ask(*self._prepared(method, args, kwargs))

    def _prepared(
        self,
        method: Callable[..., Coroutine[object, object, T]],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[Callable[[float], Coroutine[object, object, T]], float]:
        """Return what makes the coroutine on the loop, and the seconds it may take."""
        given = kwargs.get("deadline_seconds")
        seconds = self._deadline_seconds if given is None else checked_seconds(given)
        subject = self._subject

        def make(left: float) -> Coroutine[object, object, T]:
            if takes_deadline(method):
                return method(subject, *args, **{**kwargs, "deadline_seconds": left})
            return method(subject, *args, **kwargs)

        return make, seconds

    def _iterate(self, items: AsyncIterator[T], deadline_seconds: float | None) -> Iterator[T]:
        """Step through an asynchronous iterator until its end or the deadline of the whole iteration."""
        seconds = self._deadline_seconds if deadline_seconds is None else checked_seconds(deadline_seconds)
        steps = _Steps(items)
        deadline = Deadline.after(seconds, _CLOCK)
        try:
            while (left := deadline.remaining()) > 0:
                found = self._thread.ask(lambda _: steps.next(), left)
                if not found:
                    return
                yield found.pop()
        except OverdueError:
            if self._strict:
                raise
        finally:
            self._thread.run_later(steps.close)


class _Steps(Generic[T]):
    """An asynchronous generator, advanced by one task after the other, also if one was given up on the way."""

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._items = items
        self._turn = asyncio.Lock()

    async def next(self) -> list[T]:
        """Return the next item in a list, or an empty list behind the last one."""
        async with self._turn:
            async for item in self._items:
                return [item]
            return []

    async def close(self) -> None:
        """Let the generator clean up."""
        async with self._turn:
            close: AsyncGenerator[T, None] = self._items  # type: ignore[assignment]  # what `async def` with yield makes
            await close.aclose()


def checked_seconds(seconds: object) -> float:
    """Return a deadline in seconds; raise `InvalidValueError` if it is not a finite number above 0."""
    try:
        Deadline.after(seconds, _CLOCK)  # type: ignore[arg-type]  # it checks what a user gave
    except ValueError as exc:
        raise InvalidValueError(str(exc)) from None
    return float(seconds)  # type: ignore[arg-type]  # checked above
