"""Modelled time to first token: what was hit is loaded, the rest computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.planner import Link

if TYPE_CHECKING:
    from collections.abc import Sequence


LINKS: Final[dict[str, Link]] = {  # orders of magnitude for one node; measure your own
    "cuda": Link(latency_seconds=1e-5, bytes_per_second=1e12),
    "pinned-cpu": Link(latency_seconds=1e-4, bytes_per_second=20e9),
    "local-disk": Link(latency_seconds=5e-4, bytes_per_second=3e9),
    "redis": Link(latency_seconds=1e-3, bytes_per_second=1.5e9),
    "s3": Link(latency_seconds=3e-2, bytes_per_second=1e9),
}
OTHER_LINK: Final = Link(latency_seconds=1e-3, bytes_per_second=1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """Seconds to the first token over all requests, and their mean if all of it were computed."""

    mean: float
    p50: float
    p90: float
    p99: float
    recompute_mean: float


def first_tokens(
    runs: Sequence[Sequence[int]],
    tokens: Sequence[int],
    links: Sequence[Link],
    *,
    block_tokens: int,
    block_bytes: int,
    tokens_per_second: float,
) -> FirstTokens:
    """Return the modelled times.

    Args:
        runs: per request the blocks hit in each tier.
        tokens: per request the length of its prompt.
        links: of each tier.
        block_tokens: tokens in a block.
        block_bytes: bytes in a block.
        tokens_per_second: speed of the prefill.
    """
    times, computed = [], 0.0
    for hits, length in zip(runs, tokens, strict=True):
        load = sum(link.seconds(number * block_bytes) for link, number in zip(links, hits, strict=True))
        rest = max(length - sum(hits) * block_tokens, 1)  # the last token is always computed
        times.append(load + rest / tokens_per_second)
        computed += length / tokens_per_second
    times.sort()

    def quantile(share: float) -> float:
        return times[min(len(times) - 1, math.ceil(share * len(times)) - 1)]

    count = len(times)
    return FirstTokens(
        mean=sum(times) / count,
        p50=quantile(0.5),
        p90=quantile(0.9),
        p99=quantile(0.99),
        recompute_mean=computed / count,
    )
