"""A tier whose entries are arena slots: every operation is synchronous and copies nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.keys.names import name_of
from kvtier.tier.index import TierIndex, held_entry
from kvtier.tier.ledger import Ledger
from kvtier.tier.link import LinkEstimate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.backends.base import Backend, SlotBackend
    from kvtier.codecs.chain import CodecChain
    from kvtier.concurrency.clock import Clock
    from kvtier.policies.base import Policy
    from kvtier.tier.counters import Departure
    from kvtier.tier.index import Entry
    from kvtier.tier.settings import TierSettings
    from kvtier.tier.value import Value


class MemoryTier:
    """Values kept in memory under one policy and capacity.

    The tier holds one reference per entry. Entries that somebody else holds too (a lease, a reader, a queued write)
    are never victims: evicting them would free nothing.
    """

    persistent = False
    shared = False

    def __init__(
        self,
        settings: TierSettings,
        backend: Backend,
        slots: SlotBackend,
        *,
        chain: CodecChain,
        policy: Policy,
        clock: Clock,
    ) -> None:
        self.name: str = settings.name
        self.settings = settings
        self.kind: str = type(backend).__name__
        self.chain = chain
        self.link: LinkEstimate = LinkEstimate()
        self._slots = slots
        self.ledger: Ledger = Ledger(
            capacity=settings.capacity,
            policy=policy,
            clock=clock,
            protected=_shared,
            ttl_seconds=settings.ttl_seconds,
            pin_fraction=settings.pin_fraction,
            shares=settings.shares,
        )
        self.on_evict: Callable[[MemoryTier, Entry], None] | None = None  # the store demotes from here

    @property
    def up(self) -> bool:
        """Memory is always in service."""
        return True

    def find(self, key: str) -> Entry | None:
        """Return the live entry of `key`."""
        return self.ledger.find(key)

    def lend(self, entry: Entry) -> Value:
        """Return the entry's value with a reference added for the caller."""
        if entry.value is None:
            msg = f"memory entry {entry.key!r} has no value"
            raise RuntimeError(msg)
        return entry.value.retain()

    def keep(self, value: Value, *, expires: float | None = None, priority: int = 0) -> bool:
        """Take in a value (adding the tier's own reference), evicting others for room; False if it does not get in."""
        ledger, size = self.ledger, value.slot.size
        older = ledger.index.find(value.key)
        spare = older.size if older is not None else 0
        now = ledger.policy.admit(value.key, size=size, now=ledger.now())
        victims = ledger.victims_for(size - spare, sparing=older) if now else None
        if victims is None:
            ledger.counters.dropped["capacity" if now else "not-admitted"] += 1
            return False
        for victim in victims:
            self.evict(victim)
        name = name_of(value.key)
        try:
            self._slots.adopt(name, value.retain().slot)  # takes over the reference, and drops the older slot's
        except BaseException:
            value.release()
            raise
        if older is not None and older.value is not None:
            older.value.owners -= 1
        value.owners += 1
        ledger.add(held_entry(value, size=size, expires=ledger.capped(expires), priority=priority))
        return True

    def evict(self, entry: Entry) -> None:
        """Let the entry go, after offering it to the tier below."""
        if self.on_evict is not None:
            self.on_evict(self, entry)
        self.drop(entry, "evicted")

    def drop(self, entry: Entry, how: Departure) -> bool:
        """Let the entry go; tell whether it was still there."""
        if not self.ledger.depart(entry, how):
            return False
        self._slots.drop(entry.name)
        if entry.value is not None:
            entry.value.owners -= 1
        return True

    def forget_all(self) -> None:
        """Find nothing any more: the backend is about to give every slot up, and calls may still be under way."""
        self.ledger.index = TierIndex()

    def sweep(self) -> None:
        """Drop what has expired."""
        for entry in self.ledger.due():
            self.drop(entry, "expired")


def _shared(entry: Entry) -> bool:
    return entry.value is not None and entry.value.shared
