"""LMCache's disk backend and kvtier's on one drive, in the same rounds; see `lmcache_peer` for what it needs.

Both keep chunks of 256 tokens of an 8B model (32 MiB) on disk alone and answer the same calls: put until the tier has
it (nothing is synced), get. LMCache's get answers with objects in its staging memory: kvtier's equal is a lease, of
chunks that were checked; kvtier's get copies them into memory of the caller, whose equal is LMCache's get and a copy
behind it. Reads find the files in the page cache. The references are four plain threads around `write` and `preadv`.
At the end one bit of what each has stored is flipped, and each is asked for it.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Case, measure, parser, save, show
from benchmarks.lmcache_peer import RIGHT, SIZE, Kvtier, Leased, LMCache, bytes_of, chunks, times

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

PAIRS = {"LMCache": "kvtier, buffered", "LMCache, O_DIRECT": "kvtier"}  # the same way to the drive
AT = SIZE // 2 + 1  # the byte in which a bit is flipped


class Plain:
    """Four threads that write and read files."""

    def __init__(self, folder: pathlib.Path, values: Sequence[torch.Tensor]) -> None:
        folder.mkdir()
        self._paths = [folder / str(number) for number in range(len(values))]
        self._views = [bytes_of(value) for value in values]
        self._into = [memoryview(bytearray(SIZE)) for _ in values]
        self._threads = ThreadPoolExecutor(4)

    def put(self) -> None:
        """Write every file."""

        def one(path: pathlib.Path, view: memoryview) -> None:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            while view:
                view = view[os.write(fd, view) :]
            os.close(fd)

        list(self._threads.map(one, self._paths, self._views))

    def get(self) -> None:
        """Read every file."""

        def one(path: pathlib.Path, view: memoryview) -> None:
            fd = os.open(path, os.O_RDONLY)
            if os.preadv(fd, [view], 0) != SIZE:
                raise EOFError(path)
            os.close(fd)

        list(self._threads.map(one, self._paths, self._into))

    def forget(self) -> None:
        """Remove them."""
        for path in self._paths:
            path.unlink(missing_ok=True)


def folder_of(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return where a peer stores; LMCache takes a comma for the end of a path."""
    return folder / name.replace(", ", "-")


def opened(folder: pathlib.Path) -> dict[str, LMCache | Kvtier]:
    """Open all, each in a folder of its own."""

    def remove(peer: LMCache, keys: Sequence[Any]) -> None:
        for key in keys:
            peer.backend.remove(key)

    def theirs(name: str, *, direct: bool) -> LMCache:
        (folder_of(folder, name)).mkdir()
        return LMCache(
            "LocalDiskBackend",
            model="model",
            remove=remove,
            local_disk=str(folder_of(folder, name)),
            max_local_disk_size=8.0,
            extra_config={"use_odirect": True} if direct else None,
        )

    def ours(name: str, io: str) -> Kvtier:
        return Kvtier(backend="local-disk", path=str(folder_of(folder, name)), io=io, recycle=False)

    return {
        "LMCache": theirs("LMCache", direct=False),
        "LMCache, O_DIRECT": theirs("LMCache, O_DIRECT", direct=True),
        "kvtier": ours("kvtier", "auto"),
        "kvtier, buffered": ours("kvtier, buffered", "buffered"),
    }


def flipped(folder: pathlib.Path, peer: LMCache | Kvtier, value: torch.Tensor) -> str:
    """Say what `peer` gives for the first value once a bit in every file of its folder is flipped."""
    stored = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= SIZE]
    if not stored or peer.first(value) != RIGHT:
        raise LookupError(stored)
    for path in stored:
        with path.open("r+b") as file:
            file.seek(AT)
            (byte,) = file.read(1)
            file.seek(AT)
            file.write(bytes([byte ^ 1]))
    return peer.first(value)


def main(arguments: list[str] | None = None) -> None:
    """Run, print, and write `results/disk_lmcache.json`."""
    flags = parser(__doc__, rounds=7)
    flags.add_argument("--values", type=int, default=8)
    flags.add_argument("--folder", default=None, help="where to work; the drive under it is what is measured")
    options = flags.parse_args(arguments)
    values = chunks(options.values)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=options.folder))
    size = len(values) * SIZE
    try:
        plain = Plain(folder / "plain", values)
        peers = opened(folder)
        puts = [Case(name="plain put", call=plain.put, prepare=plain.forget, size=size)]
        gets = [Case(name="plain get", call=plain.get, size=size)]
        leased = {
            name: Leased(values, backend="local-disk", path=str(folder / f"leased-{io}"), io=io, recycle=False)
            for name, io in (("kvtier", "auto"), ("kvtier, buffered", "buffered"))
        }
        for name, peer in peers.items():
            puts.append(Case(name=f"{name} put", call=lambda p=peer: p.put(values), prepare=peer.forget, size=size))
            gets.append(Case(name=f"{name} get", call=peer.get, prepare=peer.get, size=size))
            if isinstance(peer, LMCache):
                gets.append(Case(name=f"{name} get, copied", call=peer.get_copied, prepare=peer.get, size=size))
            else:
                lender = leased[name]
                gets.append(Case(name=f"{name} lease", call=lender.get, prepare=lender.get, size=size))
        figures = measure(puts, base="plain put", rounds=options.rounds)
        figures += measure(gets, base="plain get", rounds=options.rounds)
        wrong = {name: flipped(folder_of(folder, name), peer, values[0]) for name, peer in peers.items()}
        for lender in leased.values():
            lender.close()
        for peer in peers.values():
            if isinstance(peer, Kvtier):
                peer.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(figures)
    extra = {"times as fast": times(figures, PAIRS), "a flipped bit": wrong}
    print(extra)
    if not options.no_save:
        save("disk_lmcache", figures, flags=vars(options), extra=extra)
    os._exit(0)  # LMCache's threads keep the interpreter from ending


if __name__ == "__main__":
    main()
