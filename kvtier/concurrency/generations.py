"""The order of changes: which operations on a key have been overtaken by a later put, delete or clear."""

from __future__ import annotations

from collections import OrderedDict


class Claim:
    """One operation on one key; `end` it exactly once."""

    __slots__ = ("_generation", "_generations", "key")

    def __init__(self, generations: Generations, key: str, generation: int) -> None:
        self.key: str = key
        self._generations = generations
        self._generation = generation

    @property
    def stale(self) -> bool:
        """Whether the key was put anew, deleted or cleared since the operation began."""
        return self._generations.stale(self.key, self._generation)

    def end(self) -> None:
        """Let the changes be forgotten that only this operation could still run into."""
        self._generations.end(self._generation)


class Generations:
    """One counter for the whole store; a change is remembered only while an older operation is in flight.

    Every operation that will publish something later (a queued write, a read that may promote) claims its key, and
    ends the claim when nothing of it can be published any more.
    """

    def __init__(self) -> None:
        self._now = 0
        self._flying: OrderedDict[int, None] = OrderedDict()  # ascending: generations only grow
        self._changed: OrderedDict[str, int] = OrderedDict()  # ascending by generation
        self._cleared: OrderedDict[str, int] = OrderedDict()  # literal key prefixes, ascending by generation

    def claim(self, key: str) -> Claim:
        """Start an operation on `key`; what changes the key from here on makes it stale."""
        self._now += 1
        self._flying[self._now] = None
        return Claim(self, key, self._now)

    def end(self, generation: int) -> None:
        """End the operation of this generation."""
        del self._flying[generation]
        oldest = next(iter(self._flying), None)
        for changes in (self._changed, self._cleared):
            while changes and (oldest is None or next(iter(changes.values())) < oldest):
                changes.popitem(last=False)

    def change(self, key: str) -> None:
        """Note that `key` was put anew or deleted now."""
        self._note(self._changed, key)

    def clear(self, prefix: str) -> None:
        """Note that every key under `prefix` was deleted now."""
        self._note(self._cleared, prefix)

    def _note(self, changes: OrderedDict[str, int], what: str) -> None:
        self._now += 1
        if self._flying:
            changes[what] = self._now
            changes.move_to_end(what)

    def stale(self, key: str, generation: int) -> bool:
        """Tell whether `key` changed after the operation began."""
        if self._changed.get(key, 0) > generation:
            return True
        return any(since > generation and key.startswith(prefix) for prefix, since in self._cleared.items())

    @property
    def remembered(self) -> int:
        """Changes that are still remembered."""
        return len(self._changed) + len(self._cleared)

    @property
    def in_flight(self) -> int:
        """Operations that have not ended."""
        return len(self._flying)
