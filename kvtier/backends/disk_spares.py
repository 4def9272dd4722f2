"""Files of removed entries that the next entries of the same size are written into: no allocation, no unlink."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.backends.disk_layout import OWNERS, directory, names_in, unlock_and_close
from kvtier.backends.disk_ledger import SPARES

if TYPE_CHECKING:
    from kvtier.backends.disk_ledger import LockedLedger
    from kvtier.backends.disk_owner import Owner

RECYCLED_LEAST = 1 << 20  # smaller files are made anew: faster than the locks, and read without any
MOST_SPARES = 4  # what a tier's writers use at once

_SPARE = re.compile(r"[0-9a-f]{16}\.spare")
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Spare:
    """A file in the owner's place, locked against readers; `end` its lock once its new content is complete."""

    fd: int
    name: str
    size: int

    def end(self) -> None:
        """Let readers in, and close."""
        unlock_and_close(self.fd)


class Spares:
    """A few spares, oldest first. Who reads an entry holds a shared lock on it, so no reader sees it overwritten."""

    def __init__(self, owner: Owner, *, most: int = MOST_SPARES) -> None:
        self.works: bool = most > 0
        self.used: int = 0
        self._owner = owner
        self._most = most
        self._held: list[Spare] = []
        self._mutex = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all that are held."""
        with self._mutex:
            return sum(spare.size for spare in self._held)

    def keep(self, books: LockedLedger, leaf: int, name: str) -> bool:
        """Take an entry's file out of its leaf and keep it; False if it is to be unlinked instead.

        The caller holds the ledger's lock, so that the name stands for the same file all the while.
        """
        if not self.works or not books.counts:
            return False
        try:
            fd = os.open(name, _OPEN, dir_fd=leaf)
        except OSError:
            return False
        kept = False
        try:
            status = os.fstat(fd)
            suits = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size >= RECYCLED_LEAST
            kept = suits and status.st_blocks * 512 >= status.st_size and self._take_over(books, leaf, name, fd)
        finally:
            if not kept:
                os.close(fd)
        return kept

    def _take_over(self, books: LockedLedger, leaf: int, name: str, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody reads it
            return False
        except OSError:  # a file system without locks: nothing is ever recycled there
            self.works = False
            return False
        spare = Spare(fd, f"{secrets.token_hex(8)}.spare", os.fstat(fd).st_size)
        try:
            with self._owner.place() as place:
                os.rename(name, spare.name, src_dir_fd=leaf, dst_dir_fd=place)
        except OSError:  # the caller closes the file, and its lock goes with it
            return False
        books.add(SPARES, spare.size)
        with self._mutex:
            self._held.append(spare)
            surplus = self._held[: -self._most]
            del self._held[: -self._most]
        self._remove(books, surplus)
        return True

    def take(self, size: int) -> Spare | None:
        """Hand out a spare of exactly this size; it stays counted among the spares until it is published or dropped."""
        with self._mutex:
            for index, spare in enumerate(self._held):
                if spare.size == size:
                    self.used += 1
                    return self._held.pop(index)
        return None

    def drop(self, books: LockedLedger) -> bool:
        """Remove all that are held; tell whether there were any."""
        with self._mutex:
            held, self._held = self._held, []
        self._remove(books, held)
        return bool(held)

    def close(self) -> None:
        """Let go of them all: their files go with the owner's place."""
        with self._mutex:
            held, self._held = self._held, []
        for spare in held:
            with suppress(OSError):
                spare.end()

    def _remove(self, books: LockedLedger, spares: list[Spare]) -> None:
        for spare in spares:
            with suppress(OSError), self._owner.place() as place:
                os.unlink(spare.name, dir_fd=place)
                books.add(SPARES, -spare.size)
            spare.end()


def count_spares(top: int) -> int:
    """Return the bytes of all spares under a root, of whichever owner."""
    size = 0
    with suppress(OSError), directory(top, OWNERS) as owners:
        for owner in names_in(owners):
            with suppress(OSError), directory(owners, owner) as place:
                for name in names_in(place):
                    if _SPARE.fullmatch(name):
                        with suppress(OSError):
                            size += os.stat(name, dir_fd=place, follow_symlinks=False).st_size
    return size
