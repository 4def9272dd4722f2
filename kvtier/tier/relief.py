"""Room on a medium that says it is full: as much as it lacks is evicted, for one more try."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvtier.tier.opening import rescan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.errors import CapacityError
    from kvtier.tier.index import Entry
    from kvtier.tier.stored import StoredTier


async def relieve(tier: StoredTier, entry: Entry, full: CapacityError) -> bool:
    """Evict what the medium lacks for `entry`; tell whether all of it is gone.

    A medium that does not say how much it lacks takes no value of this kind: nothing is evicted in vain. One that
    others fill too may hold nothing that this store knows of: then it is listed first.

    Raises:
        BackendError: the medium failed.
    """
    if not full.need:
        return False
    if isinstance(full.__cause__, OSError):  # no limit of ours: the medium is full before its time
        tier.ledger.counters.write_errors += 1
        tier.services.events.emit("error", tier=tier.name, key=entry.key, reason=f"evicting: {full}", error=full)
    victims = _victims(tier, entry, full.need)
    if not victims and tier.shared and tier.backend.traits.scan_at_open:
        await rescan(tier)
        victims = _victims(tier, entry, full.need)
    if not victims:
        return False
    if tier.demote is not None:
        await tier.demote(tier, victims)
    removal = tier.remove(victims, "evicted")
    await asyncio.wait({removal})  # `await removal` would hand a cancellation on to it
    return removal.result().complete


def _victims(tier: StoredTier, entry: Entry, need: int) -> Sequence[Entry]:
    """Name entries of at least `need` bytes together; all there are, if there is not that much."""
    older = tier.ledger.index.find(entry.key)
    held = tier.ledger.index.size - (older.size if older is not None else 0)
    return tier.ledger.victims(min(need, held), sparing=older) if held > 0 else ()
