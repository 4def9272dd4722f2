"""Buffers that carry results to callers: handed out, noticed when they die, and used again."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass

from kvtier.buffers.memory import PAGE, HostMemory
from kvtier.concurrency.turns import Turns, Waiter
from kvtier.errors import CapacityError, ClosedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultStats:
    """A pool's figures at one moment; bytes unless the field says otherwise."""

    budget: int
    lent: int
    idle: int
    high_water: int  # the most ever lent and idle together
    waiting: int  # how many callers wait


def class_size(size: int) -> int:
    """Return the bytes of the buffer that serves `size`: at most 1/8 more, so that few sizes are ever made."""
    step = max(PAGE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


class ResultPool:
    """Owned memoryviews within `budget` bytes, lent and idle together.

    A view's buffer returns when the view, its slices and all tensors over them are gone, and serves the next request
    of its size class, its pages already backed. `take` and `close` belong to one event loop.
    """

    def __init__(self, budget: int) -> None:
        if budget <= 0:
            raise ValueError(f"budget={budget}: must be at least one byte")
        self.budget = budget
        self._idle: dict[int, list[HostMemory]] = {}  # by size; the class used longest ago first
        self._gone: deque[HostMemory] = deque()  # finalizers only append here
        self._turns: Turns[memoryview] = Turns(memoryview.release)
        self._total = self._high_water = self._idle_bytes = 0
        self._closed = False

    def stats(self) -> ResultStats:
        """Return all figures at once."""
        self._drain()
        return ResultStats(
            budget=self.budget,
            lent=self._total - self._idle_bytes,
            idle=self._idle_bytes,
            high_water=self._high_water,
            waiting=self._turns.ahead(patient=True),
        )

    async def take(self, size: int, *, timeout: float) -> memoryview:
        """Return `size` writable, page-aligned bytes of undefined content, in order of arrival.

        Raises:
            CapacityError: `size` is more than the budget.
            TimeoutError: the budget was not free within `timeout` seconds.
            ClosedError: after `close`, also if it comes while waiting.
        """
        if size > self.budget:
            raise CapacityError(f"{size} bytes asked of a result budget of {self.budget}")
        if size <= 0:
            return memoryview(bytearray(0))
        return await self._turns.wait(Waiter(functools.partial(self._attempt, size)), timeout=timeout)

    def close(self) -> None:
        """Unmap idle buffers and refuse requests; views that are out stay valid until their holders drop them."""
        self._closed = True
        self._turns.fail(ClosedError("the result pool was closed"))
        self._drain()
        self._drop_idle(self._idle_bytes)

    def _attempt(self, size: int) -> memoryview | None:
        if self._closed:
            raise ClosedError("the result pool is closed")
        self._drain()
        length = min(class_size(size), self.budget)
        memory = self._reuse(length) or self._make(length)
        if memory is None:
            return None
        return memoryview(memory.lend(0, size, functools.partial(self._note_gone, memory))).cast("B")

    def _reuse(self, length: int) -> HostMemory | None:
        buffers = self._idle.pop(length, None)
        if not buffers:
            return None
        memory = buffers.pop()
        if buffers:
            self._idle[length] = buffers  # to the end: used last
        self._idle_bytes -= length
        return memory

    def _make(self, length: int) -> HostMemory | None:
        missing = self._total + length - self.budget
        if missing > self._idle_bytes:
            return None
        self._drop_idle(missing)
        self._total += length
        self._high_water = max(self._high_water, self._total)
        return HostMemory(length)

    def _drop_idle(self, size: int) -> None:
        """Unmap idle buffers of at least `size` bytes together, the class used longest ago first."""
        while size > 0 and self._idle:
            length, buffers = next(iter(self._idle.items()))
            buffers.pop()  # unmapped with its last reference: a dying view in another thread may still hold one
            if not buffers:
                del self._idle[length]
            self._total -= length
            self._idle_bytes -= length
            size -= length

    def _note_gone(self, memory: HostMemory) -> None:
        self._gone.append(memory)
        self._turns.poke()

    def _drain(self) -> None:
        while self._gone:
            memory = self._gone.popleft()
            self._idle.setdefault(memory.size, []).append(memory)
            self._idle_bytes += memory.size
