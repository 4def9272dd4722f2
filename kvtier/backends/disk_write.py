"""One blocking call that publishes an entry whole: written where nobody looks, then renamed into its place."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.backends.base import Written
from kvtier.backends.disk_layout import ENTRIES, create_file, directory, shard_of, shard_path, status_of
from kvtier.backends.disk_ledger import SPARES
from kvtier.backends.disk_spares import RECYCLED_LEAST
from kvtier.backends.views import total_bytes
from kvtier.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from kvtier.backends.disk_ledger import LockedLedger
    from kvtier.backends.disk_medium import Medium
    from kvtier.backends.disk_spares import Spare

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryWrite:
    """One entry to publish; `mtime` is in ns."""

    name: str
    views: Sequence[memoryview]
    mtime: int
    if_absent: bool

    @property
    def size(self) -> int:
        """Bytes of the entry."""
        return total_bytes(self.views)


@dataclass(slots=True)
class _Unfinished:
    """A file in the owner's place, under the name it is to be renamed from."""

    fd: int
    name: str
    spare: Spare | None

    def end(self) -> None:
        """Close the file; of a spare, let readers in before it gets a name that they know."""
        if self.spare is not None:
            self.spare.end()
        else:
            os.close(self.fd)
        self.fd = -1


def write_entry(medium: Medium, write: EntryWrite) -> Written:
    """Publish an entry.

    Raises:
        CapacityError: the directory has no room for it, or the volume too little free space.
        OSError: the medium failed; what was there before still is.
    """
    shard = shard_of(write.name)
    for last_try in (False, True):
        try:
            with (
                medium.root.in_use() as top,
                directory(top, ENTRIES, *shard_path(shard), create=True, durable=medium.fsync) as leaf,
            ):
                present = status_of(leaf, write.name)
                if write.if_absent and present is not None:
                    return Written(present.st_size, stored=False)
                return _publish(medium, leaf, write, growth=write.size - (present.st_size if present else 0))
        except OSError as exc:
            if exc.errno in FULL:
                msg = f"{medium.root.path}: {exc.strerror}"
                raise CapacityError(msg, need=medium.relieve(max(1, write.size))) from exc
            if not isinstance(exc, FileNotFoundError) or last_try:
                raise
            # somebody emptied the root meanwhile: make the directories again
    raise AssertionError  # the loop returns or raises


def _publish(medium: Medium, leaf: int, write: EntryWrite, *, growth: int) -> Written:
    with medium.owner.place() as place, _unfinished(medium, place, write.size, growth=growth) as file:
        medium.transfers.write(file.fd, write.views)
        os.utime(file.fd, ns=(write.mtime, write.mtime))
        if medium.fsync:
            os.fsync(file.fd)
        file.end()
        with medium.ledger.locked() as books:
            written = _rename(medium, books, (place, file), (leaf, write))
    if medium.fsync:
        medium.syncs.sync(shard_of(write.name), leaf)
    return written


@contextmanager
def _unfinished(medium: Medium, place: int, size: int, *, growth: int) -> Generator[_Unfinished, None, None]:
    """Lend a spare of this size or a new file; if it is not published it is gone afterwards."""
    spare = medium.spares.take(size) if size >= RECYCLED_LEAST else None
    if spare is not None:
        file = _Unfinished(spare.fd, spare.name, spare)
    else:
        with medium.ledger.locked() as books:  # before anything is written in vain
            medium.check_room(books, growth)
        medium.check_floor(size)
        name = f"{secrets.token_hex(8)}.tmp"
        file = _Unfinished(create_file(place, name), name, None)
    try:
        yield file
    finally:
        if file.fd >= 0:
            file.end()
        with suppress(OSError):  # as a rule it is gone: renamed
            os.unlink(file.name, dir_fd=place)
        if file.spare is not None:
            with suppress(OSError), medium.ledger.locked() as books:
                books.add(SPARES, -file.spare.size)


def _rename(
    medium: Medium, books: LockedLedger, source: tuple[int, _Unfinished], target: tuple[int, EntryWrite]
) -> Written:
    """Give the finished file its name; what is counted while this is under way is too much, never too little."""
    (place, file), (leaf, write) = source, target
    shard, size = shard_of(write.name), write.size
    older = status_of(leaf, write.name)
    if older is not None and write.if_absent:
        return Written(older.st_size, stored=False)
    replaced = older.st_size if older is not None else 0
    reused = file.spare.size if file.spare is not None else 0
    medium.check_room(books, size - replaced, reused=reused)
    books.add(shard, size)
    try:
        present = _link(place, file.name, leaf, write.name) if write.if_absent else None
        if present is None:
            os.rename(file.name, write.name, src_dir_fd=place, dst_dir_fd=leaf)
    except BaseException:
        books.add(shard, -size)
        raise
    if present is not None and not present.stored:
        books.add(shard, -size)
        return present
    books.add(shard, -replaced)
    books.add(SPARES, -reused)
    file.spare = None
    return Written(size)


def _link(place: int, unfinished: str, leaf: int, name: str) -> Written | None:
    """Publish by a second name, which never replaces anything; return the answer, or `None` to rename instead.

    Under the ledger's lock nobody can come between, unless the file system has no locks.
    """
    try:
        os.link(unfinished, name, src_dir_fd=place, dst_dir_fd=leaf, follow_symlinks=False)
    except FileExistsError:
        present = status_of(leaf, name)
        return None if present is None else Written(present.st_size, stored=False)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        return None  # a file system without links: the last of several writers wins, whole
    return Written(os.stat(unfinished, dir_fd=place).st_size)
