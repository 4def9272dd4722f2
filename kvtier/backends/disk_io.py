"""How bytes move between files and memory: past the page cache or through it, short transfers continued."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvtier.backends.disk_layout import create_file
from kvtier.backends.disk_portable import read_at, write_at
from kvtier.backends.page_cache import is_cached
from kvtier.backends.views import total_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

IoMode: TypeAlias = Literal["direct", "buffered", "auto"]

ALIGNMENT = 4096  # of address, offset and length: what every drive takes
DIRECT_LEAST = 1 << 20  # `auto`: smaller entries gain nothing from the direct path and much from the page cache

# What is read between two looks at it. Through the page cache: what a core's own caches hold, so that the look costs
# little memory traffic, and still enough that the work per piece does not count. Directly: so much that the drive does
# not wait.
_CACHED_PIECE = 512 << 10
_DIRECT_PIECE = 4 << 20

_VECTOR = 1024  # IOV_MAX: buffers per system call
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # macOS has none
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS})


class WrongBytesError(Exception):
    """The one who watches a read says that the bytes are not what they should be."""


class Transfers:
    """Moves bytes by `preadv` and `pwritev`; counts how. Methods block; any thread may call them.

    Mode "direct": whatever is aligned goes past the page cache. "buffered": nothing does. "auto": entries of at least
    1 MiB do, except a read of what the page cache holds whole. Where the file system refuses direct transfers, at open
    or at a write, everything goes through the page cache from then on, and `refused` says why.
    """

    def __init__(self, mode: IoMode) -> None:
        self.mode = mode
        self.refused: str = "" if _O_DIRECT else "this platform has no O_DIRECT"
        self.counts: dict[str, int] = dict.fromkeys(
            ("direct_reads", "cached_reads", "buffered_reads", "direct_writes", "buffered_writes"), 0
        )
        self._mutex = threading.Lock()

    @property
    def direct(self) -> bool:
        """Whether any transfer goes past the page cache."""
        return self.mode != "buffered" and not self.refused

    def probe(self, place: int) -> None:
        """Try a direct write and read in an open directory; a refusal is noted, other failures are raised."""
        if not self.direct:
            return
        unfinished = f"{secrets.token_hex(8)}.tmp"
        os.close(create_file(place, unfinished))
        page = mmap.mmap(-1, ALIGNMENT)
        try:
            fd = os.open(unfinished, os.O_RDWR | os.O_NOFOLLOW, dir_fd=place)
            try:
                if self._set_direct(fd):
                    with memoryview(page) as view:
                        write_at(fd, [view], 0)
                        read_at(fd, [view], 0)
            finally:
                os.close(fd)
        except OSError as exc:
            if exc.errno not in _REFUSALS:
                raise
            self._refuse(exc)
        finally:
            page.close()
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=place)

    def read(
        self, fd: int, views: Sequence[memoryview], offset: int, size: int, watch: Callable[[int], bool] | None
    ) -> int:
        """Read `size` bytes at `offset` into the fronts of `views`; return how many there were.

        `watch` is told how many bytes are there, again and again, while they are in this core's cache.

        Raises:
            WrongBytesError: `watch` said that they are wrong.
            OSError: the medium failed.
        """
        pending = _first(views, size)
        direct = self._chooses_direct(pending, offset, size)
        cached = direct and self.mode == "auto" and is_cached(fd, offset, size)
        direct = direct and not cached and self._set_direct(fd)
        self._count("direct_reads" if direct else "cached_reads" if cached else "buffered_reads")
        filled = 0
        while pending:
            piece = _first(pending, _DIRECT_PIECE if direct else _CACHED_PIECE) if watch is not None else pending
            try:
                count = read_at(fd, piece[:_VECTOR], offset + filled)
            except OSError as exc:
                if not direct or exc.errno not in _REFUSALS:
                    raise
                self._refuse(exc)
                direct = self._unset_direct(fd)
                continue
            if count == 0:
                break
            filled += count
            if watch is not None and not watch(filled):
                raise WrongBytesError
            pending = _behind(pending, count)
            if direct and count % ALIGNMENT:  # the file ends here, or the rest has to go the other way
                direct = self._unset_direct(fd)
        return filled

    def write(self, fd: int, views: Sequence[memoryview]) -> int:
        """Write all of `views` to the front of the file; return how many bytes that was.

        Raises:
            OSError: the medium failed.
        """
        pending = [view for view in views if view.nbytes]
        direct = self._chooses_direct(pending, 0, total_bytes(pending)) and self._set_direct(fd)
        self._count("direct_writes" if direct else "buffered_writes")
        drained = 0
        while pending:
            try:
                count = write_at(fd, pending[:_VECTOR], drained)
            except OSError as exc:
                if not direct or exc.errno not in _REFUSALS:
                    raise
                self._refuse(exc)
                direct = self._unset_direct(fd)
                continue
            if count == 0:
                raise OSError(errno.EIO, "the medium took no bytes")
            drained += count
            pending = _behind(pending, count)
            if direct and count % ALIGNMENT:
                direct = self._unset_direct(fd)
        return drained

    def _chooses_direct(self, views: Sequence[memoryview], offset: int, size: int) -> bool:
        if not self.direct or size < (DIRECT_LEAST if self.mode == "auto" else 1) or offset % ALIGNMENT:
            return False
        return all(_is_aligned(view) for view in views)

    def _set_direct(self, fd: int) -> bool:
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _O_DIRECT)
        except OSError as exc:
            self._refuse(exc)
            return False
        return True

    def _unset_direct(self, fd: int) -> Literal[False]:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)
        return False

    def _refuse(self, exc: OSError) -> None:
        self.refused = f"direct I/O refused: {exc.strerror}"

    def _count(self, how: str) -> None:
        with self._mutex:
            self.counts[how] += 1


def _is_aligned(view: memoryview) -> bool:
    if view.nbytes % ALIGNMENT:
        return False
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT == 0
    except (TypeError, ValueError):  # read-only or empty: nobody tells where it lies
        return False


def _first(views: Sequence[memoryview], size: int) -> list[memoryview]:
    """Return the non-empty views that hold the first `size` bytes."""
    kept = []
    for view in views:
        if size <= 0:
            break
        if view.nbytes:
            kept.append(view[:size])
            size -= view.nbytes
    return kept


def _behind(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of `views` behind their first `count` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []
