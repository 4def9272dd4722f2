"""Exact counts of what one tier did, as plain integers; the sums always balance (the contract's K5)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from kvtier.tier.latency import Latency

Departure = Literal["evicted", "deleted", "expired", "corrupt", "vanished"]


@dataclass(slots=True)
class Counters:
    """Per tier; the unit is a chunk unless the name says bytes.

    `lookups = hits + misses + corrupt + raced + timeouts + errors + skipped`, and
    `found + written - evicted - deleted - expired - corrupt - vanished` = entries the tier holds.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0  # failed verification; the entry was dropped
    raced: int = 0  # replaced, recycled or deleted while it was read
    timeouts: int = 0
    errors: int = 0
    skipped: int = 0  # not asked, because the tier is down or the memory for the read was not to be had
    joined: int = 0  # readers who shared a read that was under way; not lookups

    found: int = 0  # entries on the medium at open, or added by another process and met later
    written: int = 0
    replaced: int = 0  # writes over an entry that was there; not counted as written
    evicted: int = 0
    deleted: int = 0
    expired: int = 0
    vanished: int = 0  # removed from the medium by somebody else

    written_bytes: int = 0
    read_bytes: int = 0
    evicted_bytes: int = 0
    write_errors: int = 0
    write_timeouts: int = 0
    promoted: int = 0  # copied up into this tier
    demoted: int = 0  # moved down into this tier
    held_back: int = 0  # values that the tier's write filter kept away: used only once so far
    abandoned: int = 0  # jobs written off past their deadline
    dropped: Counter[str] = field(default_factory=Counter)  # writes given up, by reason
    read_latency: Latency = field(default_factory=Latency)  # byte tiers: backend and verification
    write_latency: Latency = field(default_factory=Latency)  # byte tiers: encoding, eviction and backend

    def leave(self, how: Departure) -> None:
        """Count one entry that left the tier."""
        if how != "corrupt":  # counted by the read that found it
            setattr(self, how, getattr(self, how) + 1)

    def plain(self) -> dict[str, int | dict[str, int]]:
        """Return all counts as plain values."""
        counts: dict[str, int | dict[str, int]] = {}
        for name in self.__dataclass_fields__:
            value: object = getattr(self, name)
            if isinstance(value, int):
                counts[name] = value
        counts["dropped"] = dict(self.dropped)
        return counts
