"""Where a chunk goes: pure decisions over the tiers' order and settings; nothing here reads, writes or waits."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tier.settings import TierSettings

TOUCHES_REMEMBERED = 65_536
USES_REMEMBERED = 262_144


class PlacedTier(Protocol):
    """What placement looks at in a tier."""

    @property
    def settings(self) -> TierSettings: ...  # noqa: D102

    @property
    def persistent(self) -> bool: ...  # noqa: D102

    @property
    def up(self) -> bool: ...  # noqa: D102


class TouchMemory:
    """Keys that were used lately, so that a second use can be told from a first; bounded, oldest forgotten first."""

    def __init__(self, size: int = TOUCHES_REMEMBERED) -> None:
        self._size = size
        self._seen: OrderedDict[str, bool] = OrderedDict()  # whether more than once

    def again(self, key: str) -> bool:
        """Note a use of `key`; tell whether it was used before."""
        known = key in self._seen
        self._seen[key] = known
        self._seen.move_to_end(key)
        if len(self._seen) > self._size:
            self._seen.popitem(last=False)
        return known

    def twice(self, key: str) -> bool:
        """Tell whether `key` was used more than once."""
        return self._seen.get(key, False)


def has_filter(tiers: Sequence[PlacedTier]) -> bool:
    """Tell whether any tier takes only what was used twice, so that uses have to be watched."""
    return any(tier.settings.admit == "second-touch" for tier in tiers)


def write_targets(tiers: Sequence[PlacedTier], *, top: int, again: bool = True) -> Sequence[int]:
    """Return the tiers below `top` that a put writes to at once: those that are write-through, and take it yet."""
    return [i for i, tier in enumerate(tiers) if i > top and tier.settings.write == "through" and _takes(tier, again)]


def refill_targets(tiers: Sequence[PlacedTier], found_in: int) -> Sequence[int]:
    """Return the tiers below `found_in` that waited for the second use, which has just been seen."""
    below = enumerate(tiers[found_in + 1 :], found_in + 1)
    return [i for i, tier in below if tier.settings.write == "through" and tier.settings.admit == "second-touch"]


def _takes(tier: PlacedTier, again: bool) -> bool:  # noqa: FBT001  # one of two values of one word
    return again or tier.settings.admit == "always"


def promotion_targets(tiers: Sequence[PlacedTier], found_in: int, *, again: bool) -> Sequence[int]:
    """Return the tiers above `found_in` that should get a copy of what was read there, uppermost first."""
    return [
        i
        for i, tier in enumerate(tiers[:found_in])
        if tier.settings.promote == "always" or (tier.settings.promote == "second-touch" and again)
    ]


def demotion_target(tiers: Sequence[PlacedTier], evicted_from: int, *, again: bool = True) -> int | None:
    """Return the tier that takes what `evicted_from` lets go: the next below, if it is write-back and in service.

    `again` tells whether that was used twice, for which some tiers wait.
    """
    below = evicted_from + 1
    if below < len(tiers) and tiers[below].settings.write == "back" and tiers[below].up and _takes(tiers[below], again):
        return below
    return None


def flush_target(tiers: Sequence[PlacedTier]) -> int | None:
    """Return the first persistent tier in service: where flush saves what stands on no persistent tier."""
    return next((i for i, tier in enumerate(tiers) if tier.persistent and tier.up), None)


def demotion_memory(above: TierSettings, below: TierSettings) -> int:
    """Return the memory that values on their way down to a write-back tier need beside the tier they left.

    Without it, evicting would free nothing until the write is done, and every put into a full tier would wait for it.
    """
    return min(below.write_queue_bytes, above.capacity // 4) if below.write == "back" else 0
