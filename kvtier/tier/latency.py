"""How long operations took, in buckets that double: enough for a p99, at the cost of one addition."""

from __future__ import annotations

import math

FIRST_BOUND_SECONDS = 2.0**-14  # 61 microseconds
BUCKETS = 22  # the last bound is 128 seconds; what takes longer counts in it
BOUNDS_SECONDS = tuple(FIRST_BOUND_SECONDS * 2.0**i for i in range(BUCKETS))


class Latency:
    """A histogram: bucket i counts operations of up to `2**i * FIRST_BOUND_SECONDS`."""

    __slots__ = ("counts", "total_seconds")

    def __init__(self) -> None:
        self.counts: list[int] = [0] * BUCKETS
        self.total_seconds: float = 0.0

    def note(self, seconds: float) -> None:
        """Count one operation."""
        self.total_seconds += seconds
        exponent = math.ceil(math.log2(max(seconds, 1e-9) / FIRST_BOUND_SECONDS))
        self.counts[min(max(exponent, 0), BUCKETS - 1)] += 1

    @property
    def count(self) -> int:
        """Operations counted."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Return the bound in seconds that at least `share` of the operations kept; 0.0 if there were none."""
        wanted, seen = share * self.count, 0
        for i, number in enumerate(self.counts):
            seen += number
            if number and seen >= wanted:
                return BOUNDS_SECONDS[i]
        return 0.0
