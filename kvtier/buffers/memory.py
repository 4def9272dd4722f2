"""Anonymous host memory: kept out of forked children, prefaulted, and lent as views whose end is noticed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = 4096
_PIECE = 4 << 20  # prefaulted at a time: other threads' mmap calls wait that long, some milliseconds
_MADV_POPULATE_WRITE = 23  # Linux 5.14; changes no content, so it may run beside the memory's users
_leaked: list[mmap.mmap] = []  # memory somebody may still write to: stays mapped until the process ends


def round_up(size: int) -> int:
    """Return `size` bytes in whole pages, as bytes."""
    return -(-size // PAGE) * PAGE


Exporter: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"


@functools.lru_cache(maxsize=512)
def _exporter_type(size: int) -> type[Exporter]:
    return ctypes.c_ubyte * size


class _Watch(weakref.ref[Exporter]):
    """Calls `on_gone` when its exporter dies. What `weakref.finalize` does, at a third of the cost."""

    __slots__ = ("on_gone",)

    on_gone: Callable[[], object]


_watches: dict[int, _Watch] = {}  # by id, because hashing a reference asks its object


def _exporter_died(watch: _Watch, watches: dict[int, _Watch] = _watches) -> None:
    del watches[id(watch)]  # bound above: at interpreter exit this module may be empty already
    watch.on_gone()


class HostMemory:
    """One private anonymous mapping of `size` bytes, page-aligned, absent from forked children where the OS can.

    `huge_pages` asks the kernel for pages of 2 MiB where it has them, else for none: those waste memory where little is
    used, and may be slow to come by.

    Raises:
        MemoryError: the system refuses to map that much.
    """

    def __init__(self, size: int, *, huge_pages: bool = True) -> None:
        self.size = size
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as exc:
            raise MemoryError(f"cannot map {size} bytes of host memory: {exc}") from exc
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE"):
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):  # best effort: the kernel may lack either
                    self._map.madvise(getattr(mmap, advice))
        self.address: int = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map))
        self._whole = memoryview(self._map)

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop), writable; nobody notices when the view goes."""
        return self._whole[start:stop]

    def lend(self, start: int, stop: int, on_gone: Callable[[], object]) -> Exporter:
        """Return an owner of bytes [start, stop); `on_gone` is called once it and all views and tensors of it are gone.

        `memoryview(owner).cast("B")` is a view; its slices and casts share the owner, so any of them keeps it alive.
        `on_gone` may be called in any thread at any moment: it must take no lock and must not raise.
        """
        exporter = _exporter_type(stop - start).from_buffer(self._map, start)
        watch = _Watch(exporter, _exporter_died)
        watch.on_gone = on_gone
        _watches[id(watch)] = watch
        return exporter

    def prefault(self, stopped: Callable[[], bool]) -> bool:
        """Have the kernel back every page now, leaving contents alone; False if stopped or not possible.

        Takes 0.2 to 2 s per GiB with the GIL released: for a thread.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        for start in range(0, self.size, _PIECE):
            length = min(_PIECE, self.size - start)
            piece = ctypes.c_void_p(self.address + start)
            if stopped() or libc.madvise(piece, ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
                return False  # an older kernel: pages come as they are first used
        return True

    def huge_bytes(self) -> int:
        """Return how many bytes lie in huge pages now; 0 where the kernel does not tell. Takes milliseconds."""
        inside = False
        with contextlib.suppress(OSError), Path("/proc/self/smaps").open() as maps:
            for line in maps:
                name, *fields = line.split(maxsplit=2)
                if not name.endswith(":"):
                    begin, end = (int(number, 16) for number in name.split("-"))
                    inside = begin <= self.address < end
                elif inside and name == "AnonHugePages:":
                    return min(int(fields[0]) * 1024, self.size)  # neighbours may be shown as one mapping
        return 0

    def leak(self) -> None:
        """Keep the memory mapped until the process ends, or until `close` succeeds."""
        if not any(kept is self._map for kept in _leaked):
            _leaked.append(self._map)

    def close(self) -> bool:
        """Unmap; False if a view is alive: then the memory is leaked, and a later call may succeed."""
        self._whole.release()
        try:
            self._map.close()
        except BufferError:
            self.leak()
            return False
        _leaked[:] = [kept for kept in _leaked if kept is not self._map]
        return True
