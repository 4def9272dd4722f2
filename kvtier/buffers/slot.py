"""One extent of an arena, counted: it goes back when its last reference does."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from kvtier.buffers.memory import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.buffers.arena import Arena
    from kvtier.buffers.memory import Exporter


class Slot:
    """`size` bytes of an arena, page-aligned, held by whoever has one of its references. Made by `Arena` only.

    A new slot has one reference. Methods may be called in any thread, but not from a finalizer (`owned_view` is for
    that). Using a slot that has gone back is an internal error and raises `RuntimeError`.
    """

    __slots__ = ("_exporter", "_owned", "_references", "arena", "entry", "offset", "size")

    def __init__(self, arena: Arena, offset: int, size: int, *, entry: bool) -> None:
        self.arena: Arena = arena
        self._references = 1
        self._owned = 0  # those of the references that owned views hold
        self._exporter: weakref.ref[Exporter] | None = None  # what the living owned views share
        self.offset: int = offset
        self.size: int = size
        self.entry: bool = entry

    def __repr__(self) -> str:
        return f"<Slot offset={self.offset} size={self.size} references={self._references}>"

    @property
    def references(self) -> int:
        """How many hold it; the living owned views count as one."""
        self.arena.drain()
        return self._references

    @property
    def address(self) -> int:
        """Where the slot begins in this process, for calls that take pointers."""
        self._check()
        return self.arena.memory.address + self.offset

    def view(self, offset: int = 0, length: int | None = None) -> memoryview:
        """Return writable bytes of the slot, borrowed: valid while the caller holds a reference."""
        self._check()
        start, stop = self._range(offset, length)
        return self.arena.memory.view(self.offset + start, self.offset + stop)

    def owned_view(self, offset: int = 0, length: int | None = None) -> memoryview:
        """Return writable bytes that keep the slot until they and all slices and tensors of them are gone.

        The living owned views of a slot hold one reference together.
        """
        start, stop = self._range(offset, length)
        exporter = self._exporter() if self._exporter is not None else None
        if exporter is None:
            with self.arena.lock:
                self._check()
                self._references += 1
                self._owned += 1
            exporter = self.arena.lend(self)
            self._exporter = weakref.ref(exporter)
        return memoryview(exporter).cast("B")[start:stop]

    def retain(self) -> Slot:
        """Add one reference; return the slot."""
        with self.arena.lock:
            self.hold()
        return self

    def hold(self) -> None:
        """Add one reference, for a caller that holds the arena's lock."""
        self._check()
        self._references += 1

    def release(self) -> None:
        """Give up one reference; with the last one the memory is free for others."""
        with self.arena.lock:
            self.let_go()
        self.arena.serve_soon()

    def let_go(self) -> None:
        """Give up one reference, for a caller that holds the arena's lock and has the waiting served."""
        if 0 < self._references == self._owned:
            raise RuntimeError(f"{self!r} is released, but only views hold it")
        self._drop()

    def trim(self, size: int) -> None:
        """Give back the whole pages behind the first `size` bytes.

        The caller is the only one that holds the slot and has no view of those pages.

        Raises:
            RuntimeError: others hold the slot.
        """
        kept = round_up(size)
        if not 0 < kept <= self.size:
            raise ValueError(f"size={size}: must be between 1 and {self.size}")
        self.arena.drain()
        with self.arena.lock:
            self._check()
            if self._references > 1:
                raise RuntimeError(f"{self!r} is trimmed while others hold it")
            freed, self.size = self.size - kept, kept
            if freed:
                self.arena.take_back(self.offset + kept, freed, entry=self.entry)
        self.arena.serve_soon()

    def become_entry(self) -> bool:
        """Count the slot as an entry from now on; False if it lies in the staging reserve: copy it instead."""
        with self.arena.lock:
            self._check()
            if not self.entry:
                self.entry = self.arena.adopt(self.offset, self.size)
            return self.entry

    def hold_owned(self) -> None:
        """Add the reference of a view that the arena lends over several slots; it calls this, holding its lock."""
        self._check()
        self._references += 1
        self._owned += 1

    def drop_owned(self) -> None:
        """Give up the reference of a dead owned view; the arena calls this, holding its lock."""
        self._owned -= 1
        self._drop()

    def _drop(self) -> None:
        self._check()
        self._references -= 1
        if not self._references:
            self.arena.take_back(self.offset, self.size, entry=self.entry)
            self.arena.forget_slot()

    def _check(self) -> None:
        if self._references <= 0:
            raise RuntimeError(f"{self!r} is used after it went back")

    def _range(self, offset: int, length: int | None) -> tuple[int, int]:
        stop = self.size if length is None else offset + length
        if not 0 <= offset <= stop <= self.size:
            raise ValueError(f"bytes [{offset}, {stop}) of a slot of {self.size}")
        return offset, stop


def retain_all(slots: Sequence[Slot]) -> None:
    """Add one reference to each of an arena's slots, of which no other thread may give up the last one meanwhile."""
    if slots:
        with slots[0].arena.lock:
            for slot in slots:
                slot.hold()


def release_all(slots: Sequence[Slot]) -> None:
    """Give up one reference of each of an arena's slots."""
    if slots:
        arena = slots[0].arena
        with arena.lock:
            for slot in slots:
                slot.let_go()
        arena.serve_soon()
