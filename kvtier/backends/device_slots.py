"""Device memory in fixed slots, and the entries that lie in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.buffers.extents import Extents

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


class SlotPool:
    """Slots of `slot_bytes` in one preallocated tensor. Belongs to one event loop.

    An entry gets neighbouring slots where there are enough of them, so that it is one copy; else what is free.
    """

    def __init__(self, memory: torch.Tensor, slot_bytes: int) -> None:
        self.slot_bytes: int = slot_bytes
        self._slots = memory.view(-1, slot_bytes)
        self._extents = Extents(0, self._slots.shape[0], barrier=max(1, self._slots.shape[0]))

    @property
    def free(self) -> int:
        """Slots in no entry."""
        return self._extents.free

    def take(self, size: int) -> list[int] | None:
        """Return slots for `size` bytes, or None if there are not enough."""
        left = -(-size // self.slot_bytes)
        if left > self._extents.free:
            return None
        taken: list[int] = []
        while left:
            count = min(left, self._extents.largest)
            start = self._extents.take(count)
            if start is None:
                msg = f"no extent of {count} slots, though the largest free one has them"
                raise RuntimeError(msg)
            taken.extend(range(start, start + count))
            left -= count
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """Take slots back; no copy from or to them may be under way."""
        for start, stop in _runs(slots):
            self._extents.give(slots[start], stop - start)

    def pieces(self, slots: Sequence[int], size: int) -> list[torch.Tensor]:
        """Return the memory of an entry of `size` bytes, in order; neighbouring slots as one piece."""
        return [
            self._slots[slots[start] : slots[start] + stop - start].view(-1)[: size - start * self.slot_bytes]
            for start, stop in _runs(slots)
        ]


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the places [start, stop) in `slots` of neighbours in ascending order."""
    start = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            yield start, place
            start = place


@dataclass(slots=True)
class DeviceEntry:
    """One entry: in slots, or in a tensor that its owner gave away. Freed when nobody holds it any more."""

    pieces: Sequence[torch.Tensor]
    size: int
    expires: float | None
    changed: float
    slots: Sequence[int] = field(default_factory=tuple)
    holders: int = 1

    def retain(self) -> DeviceEntry:
        """Add a holder: the entry's memory is not used for anything else meanwhile."""
        self.holders += 1
        return self


def cut(pieces: Sequence[torch.Tensor], start: int, size: int) -> list[torch.Tensor]:
    """Return bytes [start, start + size) of the pieces' concatenation, as views."""
    found: list[torch.Tensor] = []
    for piece in pieces:
        length = piece.numel()
        if start < length and size > 0:
            part = piece[start : start + size]
            found.append(part)
            size -= part.numel()
        start = max(0, start - length)
    return found


def pairs(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (target, source) of equal lengths that together copy the sources' concatenation to the targets'."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    left = [tensor for tensor in sources if tensor.numel()]
    for target in targets:
        done = 0
        while done < target.numel() and left:
            size = min(target.numel() - done, left[0].numel())
            made.append((target[done : done + size], left[0][:size]))
            left[0] = left[0][size:]
            done += size
            if not left[0].numel():
                left.pop(0)
    return made
