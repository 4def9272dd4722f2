"""A tier's entries gone through: listed page by page, looked at some at a time, every step bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.cli.tiers import within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvtier.backends.base import Backend, Stat

IN_FLIGHT_BYTES = 256 << 20


async def pages(backend: Backend, *, seconds: float, what: str) -> AsyncIterator[Sequence[Stat]]:
    """Yield the pages of a listing.

    Raises:
        BackendTimeoutError: beginning with `what`, if the medium does not give the next page within `seconds`.
    """
    listing = aiter(backend.scan())
    while True:
        try:
            page = await within(anext(listing), seconds, f"{what}: the listing stopped")
        except StopAsyncIteration:
            return
        yield page


async def every(backend: Backend, *, seconds: float, what: str) -> list[Stat]:
    """Return all entries; raises as `pages`."""
    return [stat async for page in pages(backend, seconds=seconds, what=what) for stat in page]


def batches(stats: Sequence[Stat], most: int) -> list[list[Stat]]:
    """Group entries to be looked at together, bounded in number and bytes."""
    groups: list[list[Stat]] = []
    size = 0
    for stat in stats:
        if not groups or len(groups[-1]) >= most or size + stat.size > IN_FLIGHT_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(stat)
        size += stat.size
    return groups
