"""Entries as files under one local directory, which several processes may use at once and which outlives them."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.backends.base import Backend, BackendContext, Read, Stat, Traits, Write, Written, check_name
from kvtier.backends.batches import answer_each
from kvtier.backends.disk_files import delete_entries, set_mtimes, stat_entries
from kvtier.backends.disk_format import check_format
from kvtier.backends.disk_io import IoMode, Transfers
from kvtier.backends.disk_journal import Journal
from kvtier.backends.disk_layout import SHARDS, DiskRoot, make_private, mtime_of, shard_of
from kvtier.backends.disk_ledger import DiskLedger
from kvtier.backends.disk_listing import list_shards
from kvtier.backends.disk_medium import Medium
from kvtier.backends.disk_owner import Owner
from kvtier.backends.disk_read import read_entry
from kvtier.backends.disk_spares import MOST_SPARES, Spares
from kvtier.backends.disk_write import EntryWrite, write_entry
from kvtier.backends.foreign import COMMON, ForeignErrors, translate, translated
from kvtier.backends.views import host_view, writable_views
from kvtier.errors import BackendError, BackendTimeoutError, ClosedError, ConfigError
from kvtier.options import LocalPath, Size  # noqa: TC001  # the config reads them from the signature

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from typing import TypeVar

    T = TypeVar("T")

FOREIGN: ForeignErrors = COMMON

_WRONG_PATH = frozenset(
    {errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG}
)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_PAGE_ENTRIES = 1024  # at most, per page of a listing
_SCAN_SHARDS = 4  # directories per thread job of a listing
_SCAN_AT_ONCE = 4  # such jobs at once: a cold listing waits for the medium, not for the processor
_SMALL_BATCH = 64  # names per thread job where an item is one quick system call


class LocalDiskBackend(Backend):
    """A directory of files, one per entry, each published by rename; also a `JournalBackend`.

    What a write answered as stored survives the death of the process; with `fsync` it survives power loss too. The
    expiry of an entry is the modification time of its file (0: never). Every blocking call runs in the tier's threads.

    Args:
        path: an absolute path; made, for this user alone, if it does not exist.
        fsync: write through to the medium before an entry is published.
        io: "direct": past the page cache wherever address, length and file system allow it; "buffered": through it;
            "auto": directly from 1 MiB on, except to read what the page cache holds whole.
        min_free: bytes of the volume that stay free: a write that would take them is refused. None: a hundredth of
            the volume, at most 1 GiB.
        recycle: write new entries into the files of removed ones of the same size, from 1 MiB on.
    """

    traits: Traits = Traits(persistent=True, shared=True, scan_at_open=True, ranges=True)

    def __init__(
        self,
        *,
        path: LocalPath,
        fsync: bool = False,
        io: IoMode = "auto",
        min_free: Size | None = None,
        recycle: bool = True,
    ) -> None:
        self.path: Path = Path(path)
        self.fsync = fsync
        self.io = io
        self.min_free = min_free
        self.recycle = recycle
        self._opened: Medium | None = None
        self._told = ""

    def __repr__(self) -> str:
        return f"LocalDiskBackend(path={str(self.path)!r}, fsync={self.fsync}, io={self.io!r})"

    async def open(self, context: BackendContext) -> None:
        """Take the directory into use and clear away what processes that died while writing left behind.

        Raises:
            ConfigError: the path is relative, not a directory, or not writable.
            BackendUnavailableError: the medium failed.
        """
        if not self.path.is_absolute():
            raise ConfigError(f"path={str(self.path)!r} is relative; give an absolute path")
        if self._opened is not None:
            raise ConfigError(f"{self!r} is open already; one backend belongs to one tier")
        with translate(FOREIGN, medium=str(self.path)):
            await context.workers.run(self._open, context)
        self._context = context
        self._tell_of_refusal()

    def _open(self, context: BackendContext) -> None:
        try:
            make_private(self.path)
            root = DiskRoot(self.path)
            owner = Owner(root)
            self._opened = Medium(
                root=root,
                owner=owner,
                journal=Journal(root, owner, fsync=self.fsync),
                ledger=DiskLedger(root, owner, context.capacity),
                spares=Spares(owner, most=MOST_SPARES if self.recycle else 0),
                transfers=Transfers(self.io),
                workers=context.workers,
                fsync=self.fsync,
                min_free=self.min_free,
            )
            owner.claim()
            check_format(root, owner)
            self._opened.begin()
        except OSError as exc:
            if exc.errno in _FULL and self._opened is not None:  # it can be read; the first write claims again
                return
            if exc.errno in _WRONG_PATH:
                raise ConfigError(f"path={str(self.path)!r}: {exc.strerror}; give a directory to write to") from exc
            raise

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        """As the contract says; one thread job per entry."""
        medium = self._use()
        jobs = [
            partial(
                read_entry,
                medium,
                check_name(read.name),
                writable_views(read.into),
                read.offset,
                part=read.partial,
                watch=read.watch,
            )
            for read in reads
        ]
        answers = await answer_each(self._run, jobs)
        self._tell_of_refusal()
        return answers

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        """As the contract says; one thread job per entry, which ends in the rename."""
        medium = self._use()
        jobs = [
            partial(
                write_entry,
                medium,
                EntryWrite(
                    name=check_name(write.name),
                    views=[host_view(part) for part in write.parts],
                    mtime=mtime_of(write.expires),
                    if_absent=write.if_absent,
                ),
            )
            for write in writes
        ]
        answers = await answer_each(self._run, jobs)
        self._tell_of_refusal()
        return answers

    async def delete_many(self, names: Sequence[str]) -> Sequence[bool | BackendError]:
        """As the contract says; a file that is gone already answers False."""
        return await self._by_names(delete_entries, names)

    async def stat_many(self, names: Sequence[str]) -> Sequence[Stat | BackendError | None]:
        """As the contract says; `changed` is when content or expiry were last set."""
        return await self._by_names(stat_entries, names)

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        """Yield pages of entries, ordered by directory, then by name; several directories are read at once."""
        medium = self._use()
        shard, behind = (0, "") if after is None else (shard_of(check_name(after)), after)
        while shard < SHARDS:
            starts = range(shard, min(shard + _SCAN_AT_ONCE * _SCAN_SHARDS, SHARDS), _SCAN_SHARDS)
            jobs = [
                partial(
                    list_shards,
                    medium.root,
                    medium.ledger,
                    range(start, min(start + _SCAN_SHARDS, SHARDS)),
                    behind if start == shard else "",
                )
                for start in starts
            ]
            for found in await answer_each(self._run, jobs):
                if isinstance(found, BackendError):
                    raise found
                for start in range(0, len(found), _PAGE_ENTRIES):
                    yield found[start : start + _PAGE_ENTRIES]
            shard, behind = shard + _SCAN_AT_ONCE * _SCAN_SHARDS, ""

    async def sync(self, names: Sequence[str]) -> None:
        """Return at once: with `fsync` an entry is synced before it is published, without it never."""
        del names
        self._use()

    async def set_expiry_many(self, items: Sequence[tuple[str, float | None]]) -> None:
        """Set the files' modification times."""
        medium = self._use()
        moments = [(check_name(name), mtime_of(expires)) for name, expires in items]
        await self._run(partial(set_mtimes, medium, moments))

    async def append_journal(self, records: bytes) -> None:
        """Append to this process's log; on failure nothing of `records` stays."""
        await self._run(partial(self._use().journal.append, records))

    async def read_journals(self) -> Sequence[bytes]:
        """Return this log and those of processes that are gone, oldest first."""
        return await self._run(self._use().journal.read)

    async def follow_journals(self) -> Mapping[str, bytes]:
        """See `JournalBackend`."""
        return await self._run(self._use().journal.follow)

    async def replace_journals(self, records: bytes) -> None:
        """Compact: one new file takes the place of the logs that were read."""
        await self._run(partial(self._use().journal.replace, records))

    async def aclose(self) -> None:
        """Close; a job that still runs keeps its own descriptors until it ends."""
        opened = self._opened
        if opened is None:
            return
        try:
            await opened.workers.run(opened.close)
        except ClosedError:  # the threads are gone, so nobody is inside
            opened.close()
        except BackendTimeoutError:  # all threads hang; what they hold goes with the process
            opened.root.close()
        self._opened = None

    def figures(self) -> Mapping[str, int | float | str]:
        """Tell how bytes move, how many the directory holds as of the last look, and how many files were recycled."""
        opened = self._opened
        if opened is None:
            return {}
        transfers = opened.transfers
        return {
            "io": self.io if transfers.direct else "buffered",
            "io_refused": transfers.refused if self.io != "buffered" else "",
            **transfers.counts,
            "directory_bytes": opened.ledger.known,
            "recycled": opened.spares.used,
            "spare_bytes": opened.spares.size,
        }

    def _tell_of_refusal(self) -> None:
        """Report once that this file system takes no direct I/O."""
        refused = self._opened.transfers.refused if self._opened is not None and self.io != "buffered" else ""
        if refused and not self._told:
            self._told = refused
            self._context.events.emit("buffered", tier=self._context.tier, reason=f"{self.path}: {refused}")

    def _use(self) -> Medium:
        if self._opened is None:
            raise ClosedError(f"{self!r} is not open")
        return self._opened

    async def _run(self, job: Callable[[], T]) -> T:
        with translate(FOREIGN, medium=str(self.path)):
            return await self._use().workers.run(job)

    async def _by_names(
        self, act: Callable[[Medium, Sequence[str]], list[T | OSError]], names: Sequence[str]
    ) -> list[T | BackendError]:
        medium = self._use()
        for name in names:
            check_name(name)
        pieces = [names[start : start + _SMALL_BATCH] for start in range(0, len(names), _SMALL_BATCH)]
        outcomes = await answer_each(self._run, [partial(act, medium, piece) for piece in pieces])
        answers: list[T | BackendError] = []
        for piece, outcome in zip(pieces, outcomes, strict=True):
            of_piece = [outcome] * len(piece) if isinstance(outcome, BackendError) else outcome
            answers += [self._ours(answer) if isinstance(answer, OSError) else answer for answer in of_piece]
        return answers

    def _ours(self, fault: OSError) -> BackendError:
        return translated(fault, FOREIGN, medium=str(self.path)) or BackendError(str(fault))
