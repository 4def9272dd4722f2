"""The listing of a backend that knows all its names: sorted, page by page."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from kvtier.backends.base import Stat, check_name
from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

PAGE_ENTRIES = 256


async def stat_pages(
    names: Iterable[str],
    after: str | None,
    stat_many: Callable[[Sequence[str]], Awaitable[Sequence[Stat | BackendError | None]]],
) -> AsyncIterator[Sequence[Stat]]:
    """Yield what `scan` has to: the entries behind `after` in the order of their names, as they are when looked at.

    Raises:
        BackendError: what `stat_many` answered for one of them.
    """
    ordered = sorted(names)
    start = 0 if after is None else bisect_right(ordered, check_name(after))
    for first in range(start, len(ordered), PAGE_ENTRIES):
        page = []
        for answer in await stat_many(ordered[first : first + PAGE_ENTRIES]):
            if isinstance(answer, BackendError):
                raise answer
            if answer is not None:
                page.append(answer)
        if page:
            yield page
