"""Redis backends for tests: each with a prefix of its own on a server that others use too."""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvtier.backends.redis import RedisBackend
from kvtier.options import SecretUrl
from kvtier.testing.context import lend_context
from kvtier.testing.subject import Subject

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtier.backends.base import BackendContext


def new_prefix() -> str:
    """Return a prefix that nobody has used."""
    return f"t-{secrets.token_hex(6)}"


def make_redis(url: str, **options: Any) -> RedisBackend:  # noqa: ANN401  # any option of the backend
    """Return an unopened backend; it has a new prefix unless one is given."""
    return RedisBackend(url=SecretUrl(url), **{"prefix": new_prefix(), **options})


@asynccontextmanager
async def opened_redis(
    url: str,
    *,
    capacity: int = 1 << 40,
    context: BackendContext | None = None,
    **options: Any,  # noqa: ANN401  # as above
) -> AsyncIterator[Subject]:
    """Lend an open backend, in a context of its own unless one is given; no buffer is touched late."""
    async with AsyncExitStack() as stack:
        lent = context
        if lent is None:
            lent = await stack.enter_async_context(lend_context(capacity=capacity))
        backend = make_redis(url, **options)
        subject = Subject(backend)
        try:
            await backend.open(lent)
            yield subject
        finally:
            await backend.aclose()
        subject.assert_buffers_untouched()
