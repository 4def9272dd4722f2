"""What the jobs of one open disk tier share: the root, who owns what, how bytes move and how many there may be."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.backends.disk_layout import remove_empty_leaves
from kvtier.backends.disk_ledger import SPARES
from kvtier.backends.disk_listing import list_leaf
from kvtier.backends.disk_spares import count_spares
from kvtier.backends.disk_sync import GroupedSync
from kvtier.errors import CapacityError, ClosedError

if TYPE_CHECKING:
    from kvtier.backends.disk_io import Transfers
    from kvtier.backends.disk_journal import Journal
    from kvtier.backends.disk_layout import DiskRoot
    from kvtier.backends.disk_ledger import DiskLedger, LockedLedger
    from kvtier.backends.disk_owner import Owner
    from kvtier.backends.disk_spares import Spares
    from kvtier.concurrency.workers import Workers

FLOOR_SHARE = 100  # without `min_free`: a hundredth of the volume stays free, at most a GiB
FLOOR_MOST = 1 << 30
FEW_INODES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """What exists between `open` and `aclose` of a backend."""

    root: DiskRoot
    owner: Owner
    journal: Journal
    ledger: DiskLedger
    spares: Spares
    transfers: Transfers
    workers: Workers
    fsync: bool
    min_free: int | None
    syncs: GroupedSync = field(default_factory=GroupedSync)

    def begin(self) -> None:
        """Become an owner, look what the file system can do, and put the count of spares right."""
        with self.owner.place() as place:
            self.transfers.probe(place)
        with self.ledger.locked() as books, self.root.in_use() as top:
            books.set(SPARES, count_spares(top))
            books.total()
        if not self.ledger.works:  # without locks no reader can be kept out
            self.spares.works = False

    def close(self) -> None:
        """Let go of everything."""
        with suppress(OSError, ClosedError), self.ledger.locked() as books:
            self.spares.drop(books)
        self.spares.close()
        self.journal.close()
        self.ledger.close()
        self.owner.release()
        self.root.close()

    def check_room(self, books: LockedLedger, growth: int, *, reused: int = 0) -> None:
        """See whether the directory may grow by `growth` bytes, `reused` of which are a spare's; drop spares if not.

        Raises:
            CapacityError: it may not, or the volume has too little free space.
        """
        over = books.total() - reused + growth - self.ledger.capacity
        if over > 0 and self.ledger.doubtful:
            self._recount(books)
            over = books.total() - reused + growth - self.ledger.capacity
        if over > 0 and self.spares.drop(books):
            over = books.total() - reused + growth - self.ledger.capacity
        if over > 0:
            msg = f"{self.root.path} holds all but {max(0, growth - over)} bytes of its {self.ledger.capacity}"
            raise CapacityError(msg, need=over)

    def _recount(self, books: LockedLedger) -> None:
        """Count the leaves again where files were missing that somebody else removed."""
        doubtful, self.ledger.doubtful = self.ledger.doubtful, set()
        with self.root.in_use() as top:
            for shard in doubtful:
                books.set(shard, sum(stat.size for stat in list_leaf(top, shard)))

    def check_floor(self, size: int) -> None:
        """See whether the volume would still have its free space with `size` bytes more.

        Raises:
            CapacityError: it would not.
        """
        short = self._short_of(size)
        if short > 0 and self.spares.size:
            with self.ledger.locked() as books:
                self.spares.drop(books)
            short = self._short_of(size)
        if short > 0:
            msg = f"the volume of {self.root.path} is {short} bytes short of the space that stays free"
            raise CapacityError(msg, need=short) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def relieve(self, size: int) -> int:
        """Give a full volume back what no entry needs; return how many bytes of entries have to go for `size` more.

        Without inodes an entry's bytes are not what is short: it takes one for itself and up to two for directories,
        so empty directories go, and a few entries.
        """
        with suppress(OSError), self.ledger.locked() as books:
            self.spares.drop(books)
        with suppress(OSError), self.root.in_use() as top:
            if os.fstatvfs(top).f_favail < FEW_INODES:
                remove_empty_leaves(top)
                return FEW_INODES * size
        return size

    def _short_of(self, size: int) -> int:
        with self.root.in_use() as top:
            volume = os.fstatvfs(top)
        floor = self.min_free
        if floor is None:
            floor = min(FLOOR_MOST, volume.f_blocks * volume.f_frsize // FLOOR_SHARE)
        return size + floor - volume.f_bavail * volume.f_frsize if floor else 0
