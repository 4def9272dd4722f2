"""The books of one tier: what it holds, who leaves next, and how many bytes are spoken for. Pure and synchronous."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from kvtier.policies.base import share_of
from kvtier.sessions import ENDED
from kvtier.tier.counters import Counters, Departure
from kvtier.tier.index import TierIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.concurrency.clock import Clock
    from kvtier.policies.base import Policy
    from kvtier.tier.index import Entry


class Ledger:
    """Index, policy, counters and capacity of one tier, changed together so that they never disagree.

    `usage` counts entries, writes under way (`reserved`) and entries that are gone from the index but perhaps not yet
    from the medium (`condemned`): it can only over-count.
    """

    def __init__(
        self,
        *,
        capacity: int,
        policy: Policy,
        clock: Clock,
        protected: Callable[[Entry], bool],
        ttl_seconds: float | None = None,
        pin_fraction: float = 1.0,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.capacity = capacity
        self._pin_fraction = pin_fraction
        self._share_caps = {share: part * capacity for share, part in (shares or {}).items()}
        self._share_bytes = dict.fromkeys(self._share_caps, 0)  # of the namespaces that have a cap
        self._ended: dict[str, int] = {}  # keys that an ended session left, with the priority they had
        self._ttl_seconds = ttl_seconds
        self.policy = policy
        self.index: TierIndex = TierIndex()
        self.counters: Counters = Counters()
        self.reserved = 0
        self.condemned = 0
        self._clock = clock
        self._protected = protected
        self._pinned: dict[str, float] = {}
        self._expiring: list[tuple[float, str]] = []
        self.on_change: Callable[[Entry, bool], None] | None = (
            None  # the store's observer: an entry came (True) or went
        )

    @property
    def usage(self) -> int:
        """Bytes spoken for."""
        return self.index.size + self.reserved + self.condemned

    def find(self, key: str) -> Entry | None:
        """Return the live entry of `key`; an expired one is as good as absent."""
        entry = self.index.find(key)
        if entry is None or (entry.expires is not None and self.expired(entry)):
            return None
        if self.index.nameless and entry.nameless:
            self.rename(entry, key)
        return entry

    def rename(self, entry: Entry, key: str) -> None:
        """Give a nameless entry its key."""
        self.index.remove(entry)
        self.policy.remove(entry.key)
        self._count_share(entry, -entry.size)
        entry.key = key
        self.index.insert(entry)
        self._enter(entry)
        self._tell(entry, came=True)

    def expired(self, entry: Entry) -> bool:
        """Tell whether the entry's time is over."""
        return entry.expires is not None and entry.expires <= self._clock.wall()

    def add(self, entry: Entry) -> None:
        """Take in an entry that is on the medium now, in place of an older one of its key."""
        older = self.index.find(entry.key)
        if older is None:
            self.counters.written += 1
        else:
            self.index.remove(older)
            self._count_share(older, -older.size)
            if older.nameless:
                self.policy.remove(older.key)  # under another key than the one that comes in its place
            self.counters.replaced += 1
        self.counters.written_bytes += entry.size
        self.index.insert(entry)
        self._enter(entry)
        if older is None or older.nameless:
            self._tell(entry, came=True)

    def discover(self, entry: Entry) -> bool:
        """Take in an entry that this store did not write; False if it is known already."""
        if self.index.find(entry.key) is not None:
            return False
        self.counters.found += 1
        self.index.insert(entry)
        self._enter(entry)
        self._tell(entry, came=True)
        return True

    def _enter(self, entry: Entry) -> None:
        self._count_share(entry, entry.size)
        self.policy.insert(entry.key, parent=entry.parent, size=entry.size, now=self.now(), priority=entry.priority)
        if entry.expires is not None:
            heapq.heappush(self._expiring, (entry.expires, entry.key))

    def depart(self, entry: Entry, how: Departure) -> bool:
        """Take an entry out of the books; tell whether it was in them. Its bytes become the caller's to credit."""
        if not self.index.remove(entry):
            return False
        self.policy.remove(entry.key)
        self._count_share(entry, -entry.size)
        self._pinned.pop(entry.key, None)
        self._ended.pop(entry.key, None)
        self.counters.leave(how)
        if how == "evicted":
            self.counters.evicted_bytes += entry.size
        self._tell(entry, came=False)
        return True

    def _tell(self, entry: Entry, *, came: bool) -> None:
        """Tell of a change, once the entry's key is known."""
        if self.on_change is not None and not entry.nameless:
            self.on_change(entry, came)

    def touch(self, key: str) -> None:
        """Note a use of `key`."""
        if key in self.index.entries:
            self.policy.touch(key, self.now())
            self.restore([key])

    def retire(self, key: str) -> bool:
        """Let `key` go before all others, until it is used again; tell whether it is here."""
        entry = self.index.entries.get(key)
        if entry is not None and key not in self._ended:
            self._ended[key] = entry.priority
            self._reprioritise(entry, ENDED)
        return entry is not None

    def restore(self, keys: Sequence[str]) -> None:
        """Take back what `retire` did: somebody uses these keys."""
        for key in keys if self._ended else ():
            before = self._ended.pop(key, None)
            entry = self.index.entries.get(key)
            if before is not None and entry is not None:
                self._reprioritise(entry, before)

    def _reprioritise(self, entry: Entry, priority: int) -> None:
        entry.remark(lossy=entry.lossy, priority=priority)
        self.policy.insert(entry.key, parent=entry.parent, size=entry.size, now=self.now(), priority=priority)

    def _count_share(self, entry: Entry, size: int) -> None:
        share = share_of(entry.key) if self._share_bytes else ""
        if share in self._share_bytes:
            self._share_bytes[share] += size

    def _over_share(self, key: str) -> bool:
        share = share_of(key)
        return share in self._share_caps and self._share_bytes[share] > self._share_caps[share]

    def capped(self, expires: float | None) -> float | None:
        """Return the expiry of what comes or is renewed now: at most the tier's own time to live from now."""
        if self._ttl_seconds is None:
            return expires
        latest = self._clock.wall() + self._ttl_seconds
        return latest if expires is None else min(expires, latest)

    def extend_life(self, entry: Entry, expires: float | None) -> bool:
        """Set the later of old and new expiry, capped; tell whether that changed anything."""
        expires = self.capped(expires)
        if entry.expires is None or (expires is not None and expires <= entry.expires):
            return False
        entry.expires = expires
        if expires is not None:
            heapq.heappush(self._expiring, (expires, entry.key))
        return True

    def pin(self, key: str, until: float) -> bool:
        """Exempt `key` from eviction until a monotonic time; False if pinned entries would take too much."""
        entry = self.index.entries.get(key)
        if entry is None or (key not in self._pinned and not self._may_pin(entry.size)):
            return False
        self._pinned[key] = max(until, self._pinned.get(key, 0.0))
        return True

    def _may_pin(self, size: int) -> bool:
        entries, now = self.index.entries, self.now()
        self._pinned = {key: until for key, until in self._pinned.items() if until > now and key in entries}
        held = sum(entries[key].size for key in self._pinned)
        return held + size <= self._pin_fraction * self.capacity

    def unpin(self, key: str) -> None:
        """Take the exemption back."""
        self._pinned.pop(key, None)

    def due(self) -> Sequence[Entry]:
        """Return entries whose time is over, each once."""
        now, over = self._clock.wall(), []
        while self._expiring and self._expiring[0][0] <= now:
            _, key = heapq.heappop(self._expiring)
            entry = self.index.entries.get(key)
            if entry is not None and self.expired(entry):
                over.append(entry)
        return over

    def seconds_to_next_expiry(self) -> float | None:
        """Return how long until `due` has something to tell, or None."""
        return max(0.0, self._expiring[0][0] - self._clock.wall()) if self._expiring else None

    def victims_for(self, size: int, *, sparing: Entry | None = None) -> Sequence[Entry] | None:
        """Name the entries to evict so that `size` more bytes fit: none, some, or None if that cannot be had.

        `sparing` is never named: it is the entry about to be replaced.
        """
        need = self.usage + size - self.capacity
        if need <= 0:
            return ()
        if size > self.capacity:
            return None
        return self.victims(need, sparing=sparing) or None

    def victims(self, need: int, *, sparing: Entry | None = None) -> Sequence[Entry]:
        """Name entries of at least `need` bytes together, or none."""
        entries = self.index.entries
        spared = sparing.key if sparing is not None else None
        over_share = self._over_share if any(map(self._exceeds, self._share_caps)) else None
        named = self.policy.victims(
            need, protected=lambda key: key == spared or self._is_protected(key), over_share=over_share
        )
        return [entries[key] for key in named]

    def _exceeds(self, share: str) -> bool:
        return self._share_bytes[share] > self._share_caps[share]

    def now(self) -> float:
        """Return monotonic seconds."""
        return self._clock.monotonic()

    def _is_protected(self, key: str) -> bool:
        until = self._pinned.get(key)
        if until is not None:
            if until > self.now():
                return True
            del self._pinned[key]
        entry = self.index.entries.get(key)
        return entry is None or self._protected(entry)  # a closed tier has a policy, but no entries any more

    @property
    def pinned_count(self) -> int:
        """How many keys have a pin that may still hold."""
        return len(self._pinned)
