"""A tier of the simulator: the books of a real one, with sizes in place of values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.sessions import ENDED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.policies.base import Policy
    from kvtier.tier.settings import TierSettings


class SimTier:
    """Keys and sizes under a policy and a capacity in bytes; counts as the store's tiers do."""

    up = True
    persistent = False

    def __init__(self, settings: TierSettings, policy: Policy) -> None:
        self.settings = settings
        self.policy = policy
        self.resident: dict[str, tuple[str | None, int]] = {}  # parent, size
        self.retired: set[str] = set()
        self.usage: int = 0
        self.hits: int = 0
        self.written: int = 0
        self.evicted: int = 0
        self.promoted: int = 0
        self.demoted: int = 0
        self.dropped: int = 0
        self.held_back: int = 0
        self.read_bytes: int = 0
        self.written_bytes: int = 0

    def take(self, key: str, parent: str | None, size: int, now: float, priority: int) -> None:
        """Take in an entry, for which there is room, if the policy admits it."""
        if self.policy.admit(key, size=size, now=now):
            self.add(key, parent=parent, size=size, now=now, priority=priority)
        else:
            self.dropped += 1

    def add(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        """Take in an entry, for which there is room."""
        self.policy.insert(key, parent=parent, size=size, now=now, priority=priority)
        self.resident[key] = (parent, size)
        self.usage += size
        self.written += 1
        self.written_bytes += size

    def drop(self, key: str) -> tuple[str | None, int]:
        """Evict an entry; return its parent and size."""
        entry = self.resident.pop(key)
        self.retired.discard(key)
        self.policy.remove(key)
        self.usage -= entry[1]
        self.evicted += 1
        return entry

    def retire(self, key: str, now: float) -> None:
        """Let the entry go before all others."""
        entry = self.resident.get(key)
        if entry is not None:
            self.policy.insert(key, parent=entry[0], size=entry[1], now=now, priority=ENDED)
            self.retired.add(key)

    def restore(self, keys: Sequence[str], now: float, priority: int) -> None:
        """Take back what `retire` did: somebody uses the entries again."""
        for key in keys:
            if key in self.retired:
                self.retired.discard(key)
                parent, size = self.resident[key]
                self.policy.insert(key, parent=parent, size=size, now=now, priority=priority)
