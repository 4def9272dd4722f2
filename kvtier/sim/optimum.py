"""The most that any policy could hit with one tier of a given size: Belady's rule for prefixes."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_NEVER: Final = 1 << 60


def next_uses(requests: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return for each block of each request the number of the next request that uses it."""
    last: dict[str, int] = {}
    uses: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        uses.append([last.get(key, _NEVER) for key in requests[number]])
        last.update(dict.fromkeys(requests[number], number))
    return uses[::-1]


def optimal_hits(requests: Sequence[Sequence[str]], capacity: int) -> int:
    """Return the greatest possible number of hit blocks with room for `capacity` blocks between requests.

    A hit is a block of the longest leading resident run. What is used farthest in the future goes first, and of one
    request's blocks the deepest; what is never used again is not kept. A prefix is used whenever what follows it is,
    so that this never leaves a gap: it is the exact bound, which brute force over all choices confirms in the tests.
    """
    resident: dict[str, int] = {}
    farthest: list[tuple[int, int, str]] = []
    hits = 0
    for keys, uses in zip(requests, next_uses(requests), strict=True):
        for key in keys:
            if key not in resident:
                break
            hits += 1
        for depth, (key, use) in enumerate(zip(keys, uses, strict=True)):
            if use == _NEVER:
                resident.pop(key, None)
            else:
                resident[key] = use
                heapq.heappush(farthest, (-use, -depth, key))
        while len(resident) > capacity:
            use, _, key = heapq.heappop(farthest)
            if resident.get(key) == -use:
                del resident[key]
    return hits


def endless_hits(requests: Sequence[Sequence[str]]) -> int:
    """Return the hit blocks of a cache that never evicts."""
    seen: set[str] = set()
    hits = 0
    for keys in requests:
        for key in keys:
            if key not in seen:
                break
            hits += 1
        seen.update(keys)
    return hits
