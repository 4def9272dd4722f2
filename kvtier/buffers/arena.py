"""The store's one block of host memory, handed out as slots."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.buffers.extents import Extents
from kvtier.buffers.memory import PAGE, Exporter, HostMemory, round_up
from kvtier.buffers.numa import place
from kvtier.buffers.pinning import PIECE, Pinning
from kvtier.buffers.slot import Slot
from kvtier.concurrency.turns import Turns, Waiter
from kvtier.errors import CapacityError, ClosedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PAGE", "Arena", "ArenaStats", "Slot", "default_staging"]

_LEAST_STAGING = 4 << 20
_log = logging.getLogger("kvtier.buffers")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStats:
    """An arena's figures at one moment; bytes unless the field says otherwise."""

    capacity: int
    used: int
    free: int
    high_water: int
    staging: int  # the reserve that entries never use, part of `capacity`
    entries: int  # used by slots that are entries
    largest_free: int  # the largest request that would succeed now
    slots: int  # how many slots are out
    waiting: int  # how many callers wait for memory
    prefaulted: bool
    pinned: bool
    locked: bool  # in RAM, by mlock
    huge_bytes: int  # in pages of 2 MiB, when all of it was backed
    numa_node: int | None  # preferred for it; None: no choice, or none made


def default_staging(capacity: int) -> int:
    """Return the reserve of an arena: 1/16 of it, but 4 MiB where that is at most a quarter."""
    return max(capacity // 16, min(_LEAST_STAGING, capacity // 4)) // PAGE * PAGE


class Arena:
    """Page-aligned host memory of fixed `capacity`, lent as `Slot`s: mapped now, backed in the background.

    Entries never use the last `staging` bytes, so that reads in flight always find room, in one piece. Other slots go
    there only when the rest is full, so that most of them can become entries where they are.

    `pin=None` registers the memory with CUDA if torch is loaded and sees a device, `True` loads torch for it, `False`
    never does; `lock` keeps it in RAM where it is not registered. On a machine with several memory nodes it lies on
    `numa_node`, or else beside the current GPU. `allocate` and `close` belong to one event loop; the
    rest is thread-safe.
    """

    def __init__(
        self,
        capacity: int,
        *,
        staging: int | None = None,
        pin: bool | None = None,
        lock: bool = False,
        huge_pages: bool = True,
        numa_node: int | None = None,
    ) -> None:
        self.capacity: int = capacity // PAGE * PAGE
        if self.capacity <= 0:
            raise ValueError(f"capacity={capacity}: an arena needs at least one page of {PAGE} bytes")
        self.staging: int = default_staging(self.capacity) if staging is None else round_up(staging)
        if not 0 <= self.staging <= self.capacity:
            raise ValueError(f"staging={staging}: must be within the capacity of {self.capacity} bytes")
        self.memory: HostMemory = HostMemory(self.capacity, huge_pages=huge_pages)
        self.lock: threading.Lock = (
            threading.Lock()
        )  # guards extents, references and the counts below; never held while user code runs
        self._border = (self.capacity - self.staging) // PAGE
        self._shared = Extents(0, self._border, barrier=PIECE // PAGE)
        self._reserve = Extents(self._border, self.staging // PAGE, barrier=PIECE // PAGE)
        self._gone: deque[Slot] = deque()  # slots of owned views that died; finalizers only append here
        self._turns: Turns[Slot] = Turns(Slot.release)  # entries are the patient ones: reads must get on
        self._high_water = self._entries = self._slots = 0
        self._prefaulted = self._closed = False
        self._huge_bytes = 0
        self._wanted_node = numa_node
        self._numa_node: int | None = None
        self._pinning = Pinning(self.memory.address, self.capacity, wanted=pin, lock=lock)
        self._thread = threading.Thread(target=self._prepare, name="kvtier-arena", daemon=True)
        self._thread.start()

    @property
    def free(self) -> int:
        """Bytes in no slot."""
        self.drain()
        return (self._shared.free + self._reserve.free) * PAGE

    @property
    def used(self) -> int:
        """Bytes in slots."""
        return self.capacity - self.free

    @property
    def high_water(self) -> int:
        """The most bytes ever in slots at one time."""
        return self._high_water

    @property
    def pinned(self) -> bool:
        """True once all of it is registered with CUDA."""
        return self._pinning.done

    def stats(self) -> ArenaStats:
        """Return all figures at once."""
        self.drain()
        with self.lock:
            free = (self._shared.free + self._reserve.free) * PAGE
            return ArenaStats(
                capacity=self.capacity,
                used=self.capacity - free,
                free=free,
                high_water=self._high_water,
                staging=self.staging,
                entries=self._entries,
                largest_free=max(self._shared.largest, self._reserve.largest, self._joint()) * PAGE,
                slots=self._slots,
                waiting=self._turns.ahead(patient=True),
                prefaulted=self._prefaulted,
                pinned=self.pinned,
                locked=self._pinning.locked,
                huge_bytes=self._huge_bytes,
                numa_node=self._numa_node,
            )

    def try_allocate(self, size: int, *, entry: bool = False) -> Slot | None:
        """Return a slot of at least `size` bytes; None if there is no room, or if somebody waits for it already.

        With `entry` the staging reserve is left alone.

        Raises:
            ClosedError: after `close`.
        """
        if self._turns.ahead(patient=entry):
            return None
        return self._attempt(size, entry=entry)

    async def allocate(self, size: int, *, timeout: float, entry: bool = False) -> Slot:
        """Return a slot of at least `size` bytes once everybody who came earlier has theirs.

        Raises:
            As `line_up` and `wait`.
        """
        return await self.wait(self.line_up(size, entry=entry), timeout=timeout)

    def line_up(self, size: int, *, entry: bool = False, background: bool = False) -> Waiter[Slot]:
        """Return a place in line for `wait`. Entries and background reads wait behind all others, until `hurry`.

        Raises:
            CapacityError: the arena can never hold `size` bytes in one slot of this kind.
        """
        most = min(PIECE, self._border * PAGE if entry else self.capacity)
        if size > most:
            raise CapacityError(f"{size} bytes asked of an arena whose largest slot is {most}")
        return Waiter(functools.partial(self._attempt, size, entry=entry), patient=entry or background)

    async def wait(self, waiter: Waiter[Slot], *, timeout: float) -> Slot:
        """Return the slot once those ahead have theirs. A cancelled wait holds nothing and passes its turn on.

        Raises:
            TimeoutError: no room within `timeout` seconds.
            ClosedError: after `close`, also if it comes while waiting.
        """
        return await self._turns.wait(waiter, timeout=timeout)

    def hurry(self, waiter: Waiter[Slot]) -> None:
        """Have a background read wait among the others, where it would be had it come as one of them."""
        self._turns.hurry(waiter)

    def close(self) -> bool:
        """Give the memory back to the system; False if a slot or a view is alive.

        Then the memory stays mapped until the process ends, so that whoever still writes to it hurts nobody, and a
        later call may succeed. Either way nothing can be allocated afterwards. Waits for the current step of the
        background preparation: tens of milliseconds, seconds while CUDA registers.
        """
        self._closed = True
        self._turns.fail(ClosedError("the arena was closed"))
        self._thread.join()
        self.drain()
        if self._slots:
            self.memory.leak()
        else:
            self._pinning.undo()
            if self.memory.close():
                return True
        _log.warning("arena of %d bytes stays mapped: %d slots or their views are in use", self.capacity, self._slots)
        return False

    def lend(self, slot: Slot) -> Exporter:
        """Return an owner of the slot's bytes; one reference of `slot` is given up when it and its views are gone."""
        return self.memory.lend(slot.offset, slot.offset + slot.size, functools.partial(self._note_gone, slot))

    def owned_view(self, slots: Sequence[Slot]) -> memoryview:
        """Return the arena's bytes as one view that keeps all of `slots` until it, its slices and tensors are gone.

        For many slots with one life, at a fraction of the cost of a view each. Only their bytes may be looked at.

        Raises:
            RuntimeError: one of them has gone back; then none is kept.
        """
        held = tuple(slots)
        with self.lock:
            for count, slot in enumerate(held):
                try:
                    slot.hold_owned()
                except RuntimeError:
                    for kept in held[:count]:
                        kept.drop_owned()
                    raise
        exporter = self.memory.lend(0, self.capacity, functools.partial(self._note_all_gone, held))
        return memoryview(exporter).cast("B")

    def take_back(self, offset: int, size: int, *, entry: bool) -> None:
        """Free bytes of a slot; the caller holds the lock."""
        start, stop = offset // PAGE, (offset + size) // PAGE
        if start < self._border:
            self._shared.give(start, min(stop, self._border) - start)
        if stop > self._border:
            first = max(start, self._border)
            self._reserve.give(first, stop - first)
        if entry:
            self._entries -= size

    def forget_slot(self) -> None:
        """Count one slot less; the caller holds the lock."""
        self._slots -= 1

    def adopt(self, offset: int, size: int) -> bool:
        """Count bytes as an entry's unless they touch the reserve; the caller holds the lock."""
        if offset + size > self._border * PAGE:
            return False
        self._entries += size
        return True

    def serve_soon(self) -> None:
        """Have waiters look again, on their loop; from any thread, and from finalizers."""
        self._turns.poke()

    def _note_gone(self, slot: Slot) -> None:
        self._gone.append(slot)  # no lock here: a finalizer may run while this very thread holds it
        self.serve_soon()

    def _note_all_gone(self, slots: tuple[Slot, ...]) -> None:
        self._gone.extend(slots)
        self.serve_soon()

    def drain(self) -> None:
        """Give up the references of owned views that are gone."""
        while self._gone:
            with self.lock:
                try:
                    slot = self._gone.popleft()
                except IndexError:  # another thread was faster
                    return
                slot.drop_owned()

    def _attempt(self, size: int, *, entry: bool) -> Slot | None:
        if self._closed:
            raise ClosedError("the arena is closed")
        if size <= 0:
            raise ValueError(f"size={size}: a slot has at least one byte")
        self.drain()
        pages = round_up(size) // PAGE
        with self.lock:
            start = self._take(pages, entry=entry)
            if start is None:
                return None
            self._slots += 1
            if entry:
                self._entries += pages * PAGE
            used = self.capacity - (self._shared.free + self._reserve.free) * PAGE
            self._high_water = max(self._high_water, used)
        return Slot(self, start * PAGE, pages * PAGE, entry=entry)

    def _take(self, pages: int, *, entry: bool) -> int | None:
        start = self._shared.take(pages)
        if start is not None or entry:
            return start
        start = self._reserve.take(pages)
        if start is None and self._joint() >= pages:
            before = min(self._shared.free_at_end, pages)
            start = self._border - before
            self._shared.take_at(start, before)
            self._reserve.take_at(self._border, pages - before)
        return start

    def _joint(self) -> int:
        """Return the pages that are free on both sides of the reserve's border, as one extent."""
        if self._border % (PIECE // PAGE) == 0:
            return 0
        return self._shared.free_at_end + self._reserve.free_at_start

    def _prepare(self) -> None:
        device = self._pinning.device
        self._numa_node = place(self.memory.address, self.capacity, wanted=self._wanted_node, device=device)
        self._prefaulted = self.memory.prefault(self._is_closed)
        self._huge_bytes = self.memory.huge_bytes()
        self._pinning.run(self._is_closed)

    def _is_closed(self) -> bool:
        return self._closed
