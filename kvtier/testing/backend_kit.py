"""What every group of backend tests shares: the fixtures an author fills in, and opening with all checks on."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import pytest

from kvtier.testing.context import lend_context
from kvtier.testing.subject import Subject

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from kvtier.backends.base import Backend, BackendContext


@pytest.mark.asyncio
class BackendKit:
    """Base of the conformance classes. `make_backend` must be defined, the other fixtures may be.

    Class attributes set how much is moved; the defaults take seconds.
    """

    large_bytes: ClassVar[int] = 8 << 20  # the largest value put; lowered to the trait `max_value_bytes`
    race_bytes: ClassVar[int] = 4 << 20  # values that alternate under a reader
    listing_entries: ClassVar[int] = 300  # more than one page of a listing, if that can be had quickly
    arena_bytes: ClassVar[int] = 4 << 20  # the arena in the context
    watch_seconds: ClassVar[float] = 0.05  # how long buffers are watched after their call has ended

    @pytest.fixture
    def make_backend(self) -> Callable[[], Backend]:
        """Return a function that builds an unopened backend, each time on the same medium, empty at first."""
        pytest.fail("define the fixture `make_backend`: it returns a function that builds your backend")

    @pytest.fixture
    def raw_read(self) -> Callable[[str], bytes | None] | None:
        """Return a function that reads an entry's bytes from the medium without the backend."""
        return None

    @pytest.fixture
    def break_medium(self) -> Callable[[], None] | None:
        """Return a function that makes the medium of an open backend fail."""
        return None

    @pytest.fixture
    def make_unopenable(self) -> Callable[[], Backend] | None:
        """Return a function that builds a backend whose `open` fails."""
        return None

    def context(self) -> AbstractAsyncContextManager[BackendContext]:
        """Lend what a store would; one context may serve several backends."""
        return lend_context(arena_bytes=self.arena_bytes)

    @asynccontextmanager
    async def opened(self, make_backend: Callable[[], Backend]) -> AsyncIterator[Subject]:
        """Open a backend for the block; afterwards no buffer was touched late, no slot and no task is left."""
        tasks = asyncio.all_tasks()
        async with self.context() as context, self.opened_in(context, make_backend) as subject:
            yield subject
        left = asyncio.all_tasks() - tasks
        assert not left, f"tasks left running after aclose: {left}"

    @asynccontextmanager
    async def opened_in(self, context: BackendContext, make_backend: Callable[[], Backend]) -> AsyncIterator[Subject]:
        """As `opened`, in a context that others share."""
        backend = make_backend()
        subject = Subject(backend)
        try:
            await backend.open(context)
            yield subject
            await asyncio.sleep(self.watch_seconds)  # nothing tells when somebody does not touch a buffer
        finally:
            await backend.aclose()
        subject.assert_buffers_untouched()

    def large(self, backend: Backend) -> int:
        """Return how large a large value may be."""
        most = backend.traits.max_value_bytes
        return self.large_bytes if most is None else min(self.large_bytes, most)
