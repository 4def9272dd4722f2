"""How much of an arena stays usable when sizes mix and entries go in random order (docs/design/0003-arena.md)."""

import math
import random

import pytest

from kvtier.buffers.extents import Extents

MIB = 256  # pages


def chunk_sizes(rng, large, small):
    """Two layouts' chunks (payload and one header page), and blobs of 4 KiB to 16 MiB."""
    kind = rng.random()
    if kind < 0.2:
        return large + 1
    if kind < 0.5:
        return small + 1
    return int(math.exp(rng.uniform(0, math.log(16 * MIB))))


def churn(extents, rng, sizes, steps, victim):
    """Allocate for `steps` steps; on failure drop entries until it fits. Return the usage at each failure."""
    live, used, at_failure = [], 0, []
    for _ in range(steps):
        pages = sizes(rng)
        start = extents.take(pages)
        if start is None:
            at_failure.append(used / (extents.end - extents.first))
        while start is None:
            old, old_pages = live.pop(victim(rng, live))
            extents.give(old, old_pages)
            used -= old_pages
            start = extents.take(pages)
        live.append((start, pages))
        used += pages
    return at_failure[len(at_failure) // 4 :]  # the first quarter fills a fresh arena


@pytest.mark.parametrize(
    "victim", [lambda rng, live: rng.randrange(len(live)), lambda rng, live: 0], ids=["random", "lru"]
)
@pytest.mark.parametrize(("large", "small"), [(32 * MIB, 9 * MIB), (8 * MIB, 9 * MIB // 4)])
def test_nine_tenths_stay_usable(victim, large, small):
    rng = random.Random(7)
    extents = Extents(0, 4096 * MIB, barrier=1 << 40)
    usable = churn(extents, rng, lambda rng: chunk_sizes(rng, large, small), 4000, victim)
    assert sum(usable) / len(usable) >= 0.90
    assert min(usable) >= 0.80
