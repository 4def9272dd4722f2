"""What a store would lend a backend, for tests of a backend alone."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvtier.backends.base import BackendContext
from kvtier.buffers.arena import Arena
from kvtier.concurrency.clock import SystemClock
from kvtier.concurrency.workers import Workers
from kvtier.events import Events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtier.concurrency.clock import Clock
    from kvtier.events import Observer


@asynccontextmanager
async def lend_context(
    *,
    arena_bytes: int = 4 << 20,
    capacity: int = 1 << 40,
    threads: int = 4,
    clock: Clock | None = None,
    observer: Observer | None = None,
    tier: str = "kit",
) -> AsyncIterator[BackendContext]:
    """Lend a `BackendContext` of `capacity` bytes with threads and an arena of its own.

    At the end every thread must come back within ten seconds and every slot must be back in the arena, which an
    assertion checks.
    """
    clock = clock or SystemClock()
    workers = Workers(tier, threads)
    arena = Arena(arena_bytes, pin=False)
    context = BackendContext(
        tier=tier, workers=workers, clock=clock, events=Events(observer, clock), arena=arena, capacity=capacity
    )
    try:
        yield context
    finally:
        ended = await workers.aclose(10.0)
        used = arena.used
        arena.close()
    assert ended, "a thread job of the backend never ended"
    assert used == 0, f"the backend kept {used} bytes of the arena's slots"
