"""Patience with a server that asks for it, in the bounds of a deadline."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, TypeVar

from kvtier.backends.s3_faults import RefusedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

_TRIES = 4
_BASE_DELAY_SECONDS = 0.05
_MOST_DELAY_SECONDS = 2.0


async def retried(attempt: Callable[[], Awaitable[T]], deadline: float) -> T:
    """Await `attempt`; after a refusal that asks for patience do it again, each time after a longer random while.

    The delays are random from 0 up ("full jitter"), so that clients which were throttled together do not come back
    together. `deadline` is in seconds of `time.monotonic`: a wait that would end behind it is not begun.
    """
    for turn in range(_TRIES - 1):
        try:
            return await attempt()
        except RefusedError as exc:
            most = min(_MOST_DELAY_SECONDS, _BASE_DELAY_SECONDS * 4**turn)
            delay = exc.retry_after + random.uniform(0, most)  # noqa: S311  # not for secrets
            if not exc.throttled or time.monotonic() + delay >= deadline:
                raise
        await asyncio.sleep(delay)
    return await attempt()
