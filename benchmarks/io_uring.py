"""io_uring against threads: the same direct reads, by one thread that keeps several under way, and by several threads.

The ring is driven through `ctypes` and the kernel's own system calls, as a program would that depends on no library.
Every case reads the same files in pieces of 4 MiB past the page cache; the verified ones also take the xxh3 of each
piece as soon as it is there, in the thread that waits for it. Where a ring is refused, it says so.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import pathlib
import shutil
import struct
import tempfile
import threading
from functools import partial

import xxhash

from benchmarks.harness import MIB, Case, fill, measure, parser, save, show

PIECE = 4 * MIB
FILE = 32 * MIB
THREADS = 4

_SETUP, _ENTER = 425, 426
_READ, _GET_EVENTS = 22, 1
_SQ, _CQ, _SQES = 0, 0x8000000, 0x10000000
_PARAMS, _ENTRY, _DONE = 120, 64, 16
_U32 = struct.Struct("<I")


class Ring:
    """As much of an io_uring as reads need: `submit` some, then `wait` for one."""

    def __init__(self, depth: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        params = ctypes.create_string_buffer(_PARAMS)
        self.fd: int = self._libc.syscall(_SETUP, depth, params)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        entries, completions = struct.unpack_from("<II", params, 0)
        _, self._tail, self._mask_at, _, _, _, self._array = struct.unpack_from("<7I", params, 40)
        self._done_head, self._done_tail, self._done_mask_at, _, _, self._done = struct.unpack_from("<6I", params, 80)
        self._queue = mmap.mmap(self.fd, self._array + 4 * entries, offset=_SQ)
        self._answers = mmap.mmap(self.fd, self._done + _DONE * completions, offset=_CQ)
        self._entries = mmap.mmap(self.fd, _ENTRY * entries, offset=_SQES)
        self._mask = _U32.unpack_from(self._queue, self._mask_at)[0]
        self._done_mask = _U32.unpack_from(self._answers, self._done_mask_at)[0]
        self._pending = 0

    def submit(self, fd: int, address: int, size: int, offset: int, *, tag: int) -> None:
        """Queue a read; `wait` hands it to the kernel."""
        tail = _U32.unpack_from(self._queue, self._tail)[0]
        place = tail & self._mask
        fields = (_READ, 0, 0, fd, offset, address, size, 0, tag)
        struct.pack_into("<BBHiQQIIQ24x", self._entries, place * _ENTRY, *fields)
        _U32.pack_into(self._queue, self._array + 4 * place, place)
        _U32.pack_into(self._queue, self._tail, (tail + 1) & 0xFFFFFFFF)
        self._pending += 1

    def wait(self) -> tuple[int, int]:
        """Return tag and result of one that has ended."""
        head = _U32.unpack_from(self._answers, self._done_head)[0]
        ready = head != _U32.unpack_from(self._answers, self._done_tail)[0]
        if self._pending or not ready:
            flags = 0 if ready else _GET_EVENTS
            took = self._libc.syscall(_ENTER, self.fd, self._pending, int(not ready), flags, None, 0)
            if took < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            self._pending -= took
        tag, result, _ = struct.unpack_from("<QiI", self._answers, self._done + (head & self._done_mask) * _DONE)
        _U32.pack_into(self._answers, self._done_head, (head + 1) & 0xFFFFFFFF)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return tag, result

    def close(self) -> None:
        """Give the ring back."""
        for each in (self._queue, self._answers, self._entries):
            each.close()
        os.close(self.fd)


class Bench:
    """Files, and memory for as many pieces as are ever under way."""

    def __init__(self, folder: pathlib.Path, *, files: int, most: int) -> None:
        self.memory = mmap.mmap(-1, most * PIECE)
        whole = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.views = [whole[at : at + PIECE] for at in range(0, len(whole), PIECE)]
        self.paths = [folder / str(number) for number in range(files)]
        for number, path in enumerate(self.paths):
            with path.open("wb") as file:
                for piece in range(FILE // PIECE):
                    fill(self.views[0], seed=number * 100 + piece)
                    file.write(self.views[0])
        os.sync()

    def by_threads(self, *, verify: bool) -> None:
        """Let each thread take a file at a time: what the backend does."""
        waiting, mutex = iter(self.paths), threading.Lock()

        def work(view: memoryview) -> None:
            while True:
                with mutex:
                    path = next(waiting, None)
                if path is None:
                    return
                fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
                state = xxhash.xxh3_64()
                for offset in range(0, FILE, PIECE):
                    if os.preadv(fd, [view], offset) != PIECE:
                        raise OSError(errno.EIO, "short read")
                    if verify:
                        state.update(view)
                os.close(fd)

        threads = [threading.Thread(target=work, args=(view,)) for view in self.views[:THREADS]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def by_ring(self, depth: int, *, verify: bool) -> None:
        """Keep `depth` reads under way from this thread alone."""
        ring = Ring(depth)
        fds = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in self.paths]
        waiting = iter([(fd, offset) for fd in fds for offset in range(0, FILE, PIECE)])
        state = xxhash.xxh3_64()

        def begin(slot: int) -> int:
            piece = next(waiting, None)
            if piece is None:
                return 0
            ring.submit(piece[0], self.address + slot * PIECE, PIECE, piece[1], tag=slot)
            return 1

        under_way = sum(begin(slot) for slot in range(depth))
        while under_way:
            slot, size = ring.wait()
            if size != PIECE:
                raise OSError(errno.EIO, "short read")
            if verify:
                state.update(self.views[slot])
            under_way += begin(slot) - 1
        for fd in fds:
            os.close(fd)
        ring.close()


def main(arguments: list[str] | None = None) -> None:
    """Run, print, and write `results/io_uring.json`."""
    flags = parser(__doc__, rounds=7)
    flags.add_argument("--gib", type=float, default=1.0, help="GiB per case and round")
    flags.add_argument("--folder", default=None, help="where to work; the drive under it is what is measured")
    options = flags.parse_args(arguments)
    try:
        Ring(4).close()
    except OSError as exc:
        print(f"no ring to be had here: {exc}")
        return
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=options.folder))
    try:
        bench = Bench(folder, files=max(4, int(options.gib * 1024) // 32), most=16)
        size = len(bench.paths) * FILE
        cases = [Case(name="4 threads", call=lambda: bench.by_threads(verify=False), size=size)]
        cases += [Case(name="4 threads, verified", call=lambda: bench.by_threads(verify=True), size=size)]
        for depth in (4, 16):
            cases += [
                Case(name=f"ring of {depth}", call=partial(bench.by_ring, depth, verify=False), size=size),
                Case(name=f"ring of {depth}, verified", call=partial(bench.by_ring, depth, verify=True), size=size),
            ]
        figures = measure(cases, base="4 threads", rounds=options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(figures)
    if not options.no_save:
        save("io_uring", figures, flags=vars(options), extra={})


if __name__ == "__main__":
    main()
