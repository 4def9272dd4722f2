"""What an eviction policy is: an order over entries, knowing keys, parents, sizes and times but no values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NAMESPACE_CHARS = 16  # key text is "<namespace16>/<salt16>/<digest>"


def nothing(_key: str) -> bool:
    """Protect no key."""
    return False


def share_of(key: str) -> str:
    """Return the part of `key` that decides whose share it counts against: its namespace, "" for other keys."""
    return key[:NAMESPACE_CHARS] if key[NAMESPACE_CHARS : NAMESPACE_CHARS + 1] == "/" else ""


class Policy(ABC):
    """Decides who leaves. Synchronous, never awaits, at most O(log n) per call (amortised) at a million entries.

    Prefix-aware: an entry whose children (entries that named it as `parent`) are resident is never a victim before
    them. A parent that is not resident is legal: then the entry is a root, until its parent comes. Links that would
    close a circle are ignored. Parents and children may be inserted and touched in either order.
    `now` is monotonic seconds and never goes back between calls.
    Deterministic: equal calls give equal answers, in every process.
    """

    name: ClassVar[str]

    @abstractmethod
    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        """Take in a new entry, or replace what is known of `key`, as when its value was put again.

        `size` is in bytes. Of the entries that may go, those of the lowest `priority` go first.
        """

    @abstractmethod
    def touch(self, key: str, now: float) -> None:
        """Note a use of `key`; an unknown key is ignored."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Forget `key` (evicted, deleted or expired); an unknown key is ignored."""

    @abstractmethod
    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        """Name entries whose sizes sum to at least `need` bytes, in the order to evict them, or `[]` if they cannot.

        All or nothing, and nothing changes: the caller evicts and calls `remove` for each. No more are named than are
        needed. Keys for which `protected` is true are never named, nor are their ancestors. Keys for which
        `over_share` is true go first, whatever their priority; its answer depends on `share_of(key)` alone where that
        is not "". Both are asked lazily and must not call the policy.
        """

    def admit(self, key: str, *, size: int, now: float) -> bool:
        """Tell whether a new entry is worth the `size` bytes it takes; asked before `insert`."""
        del key, size, now
        return True

    def expect(self, key: str, *, seconds: float, now: float) -> None:
        """Take the advice that `key` is likely to be used again in about `seconds`; a policy may ignore it."""
        del key, seconds, now

    @abstractmethod
    def coldest_first(self) -> Iterator[str]:
        """Iterate all keys from the next to go to the last to go, as far as this policy orders them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...
