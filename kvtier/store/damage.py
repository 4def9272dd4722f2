"""Values whose checksums are right but that their codecs refuse: they were written so, and no retry helps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.tier.memory import MemoryTier

if TYPE_CHECKING:
    from kvtier.errors import CodecError
    from kvtier.store.engine import Engine
    from kvtier.tier.value import Value


def drop_undecodable(engine: Engine, value: Value, error: CodecError) -> None:
    """Count and remove `value` in every tier that has it, so that nobody reads it again; a newer one stays."""
    for tier in engine.tiers:
        entry = tier.find(value.key)
        if entry is None or entry.created not in {None, value.header.created}:
            continue
        tier.ledger.counters.lookups += 1  # the read itself found nothing wrong, and was counted as a hit
        tier.ledger.counters.corrupt += 1
        engine.events.emit("corrupt", tier=tier.name, key=value.key, error=error)
        if isinstance(tier, MemoryTier):
            tier.drop(entry, "corrupt")
        else:
            tier.discard([entry], "corrupt")
