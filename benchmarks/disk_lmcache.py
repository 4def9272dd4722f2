"""LMCache's disk backend and kvtier's on one drive, in the same rounds; needs `lmcache` (0.5.6) beside kvtier.

Its metadata ask for CUDA packages, so it goes into an environment of its own: `pip install --no-deps lmcache==0.5.6`
behind the CPU build of torch, then what its imports lack (nvtx, py-cpuinfo, blake3, cachetools, awscrt, grpcio, ...).

Run it with `LMCACHE_TRACK_USAGE=false`: it reports home by default, and nothing here keeps it from that.

Both keep chunks of 256 tokens of an 8B model (32 MiB) on disk alone and answer the same calls: put until the tier has
it (nothing is synced), get into memory of their own. LMCache checks nothing; kvtier verifies every byte. Reads find the
files in the page cache. The references are four plain threads around `write` and `preadv`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pathlib
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from lmcache.utils import CacheEngineKey  # type: ignore[import-not-found]
from lmcache.v1.config import LMCacheEngineConfig  # type: ignore[import-not-found]
from lmcache.v1.event_manager import EventManager  # type: ignore[import-not-found]
from lmcache.v1.metadata import LMCacheMetadata  # type: ignore[import-not-found]
from lmcache.v1.storage_backend.storage_manager import StorageManager  # type: ignore[import-not-found]

import kvtier
from benchmarks.harness import MIB, Case, fill, measure, parser, save, show

if TYPE_CHECKING:
    from collections.abc import Sequence

SHAPE = (32, 2, 256, 8, 128)
SIZE = 32 * MIB
MODEL = "model"
GOALS = {"kvtier put": 1.0, "kvtier get": 1.0}


class LMCache:
    """Its storage manager with the disk as the only tier below its staging memory."""

    def __init__(self, folder: pathlib.Path, *, direct: bool) -> None:
        folder.mkdir()
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=False,
            max_local_cpu_size=2.0,
            local_disk=str(folder),
            max_local_disk_size=8.0,
            extra_config={"use_odirect": True} if direct else None,
        )
        about = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=SHAPE,
            role="worker",
        )
        self._store = StorageManager(config, about, EventManager())
        self._disk: Any = self._store.storage_backends["LocalDiskBackend"]
        self._key = lambda number: CacheEngineKey(MODEL, 1, 0, number, torch.bfloat16)
        self._numbers = itertools.count(1)
        self._keys: list[Any] = []

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Store under new keys, and wait until the disk has all."""
        self._keys = [self._key(next(self._numbers)) for _ in values]
        objects = []
        for value in values:
            held = self._store.allocate(value.shape, torch.bfloat16)
            held.tensor.copy_(value)
            objects.append(held)
        self._store.batched_put(self._keys, objects)
        while not all(not self._disk.exists_in_put_tasks(key) and self._disk.contains(key) for key in self._keys):
            time.sleep(0.0005)

    def get(self) -> None:
        """Read all that were put last."""
        for found in self._store.batched_get(self._keys, location="LocalDiskBackend"):
            found.ref_count_down()

    def forget(self) -> None:
        """Remove them."""
        for key in self._keys:
            self._disk.remove(key)
        self._keys = []


class Kvtier:
    """A store whose one tier is the disk."""

    def __init__(self, folder: pathlib.Path, *, io: str) -> None:
        self._loop = asyncio.new_event_loop()
        tiers = [{"backend": "local-disk", "path": str(folder), "capacity": "8GiB", "io": io, "recycle": False}]
        memory = {"staging_bytes": "512MiB", "results_bytes": "1GiB"}
        self._store = kvtier.open_chunks({"tiers": tiers, "deadline_seconds": 60, "memory": memory})
        self._loop.run_until_complete(self._store.__aenter__())
        self._numbers = itertools.count(1)
        self._keys: list[str] = []

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Store under new keys, and wait until the disk has all."""
        self._keys = [f"chunk {next(self._numbers)}" for _ in values]
        self._loop.run_until_complete(self._store.put_many(dict(zip(self._keys, values, strict=True)), wait="durable"))

    def get(self) -> None:
        """Read all that were put last."""
        found = self._loop.run_until_complete(self._store.get_many(self._keys))
        if len(found) != len(self._keys):
            raise LookupError(found.keys())

    def forget(self) -> None:
        """Remove them."""
        self._loop.run_until_complete(self._store.delete_many(self._keys))
        self._keys = []

    def close(self) -> None:
        """Close the store."""
        self._loop.run_until_complete(self._store.aclose())


class Plain:
    """Four threads that write and read files."""

    def __init__(self, folder: pathlib.Path, values: Sequence[torch.Tensor]) -> None:
        folder.mkdir()
        self._paths = [folder / str(number) for number in range(len(values))]
        self._views = [memoryview(value.view(torch.uint8).flatten().numpy()) for value in values]
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


def main(arguments: list[str] | None = None) -> None:
    """Run, print, and write `results/disk_lmcache.json`."""
    flags = parser(__doc__, rounds=7)
    flags.add_argument("--values", type=int, default=8)
    flags.add_argument("--folder", default=None, help="where to work; the drive under it is what is measured")
    options = flags.parse_args(arguments)
    values = [torch.empty(SHAPE, dtype=torch.bfloat16) for _ in range(options.values)]
    for number, value in enumerate(values):
        fill(memoryview(value.view(torch.uint8).flatten().numpy()), seed=number)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=options.folder))
    size = len(values) * SIZE
    try:
        plain = Plain(folder / "plain", values)
        peers: dict[str, LMCache | Kvtier] = {
            "LMCache": LMCache(folder / "lmcache", direct=False),
            "LMCache, O_DIRECT": LMCache(folder / "lmcache-direct", direct=True),
            "kvtier": Kvtier(folder / "kvtier", io="auto"),
            "kvtier, buffered": Kvtier(folder / "kvtier-buffered", io="buffered"),
        }
        puts = [Case(name="plain put", call=plain.put, prepare=plain.forget, size=size)]
        gets = [Case(name="plain get", call=plain.get, size=size)]
        for name, peer in peers.items():
            puts.append(Case(name=f"{name} put", call=lambda p=peer: p.put(values), prepare=peer.forget, size=size))
            gets.append(Case(name=f"{name} get", call=peer.get, prepare=peer.get, size=size))
        figures = measure(puts, base="plain put", rounds=options.rounds)
        figures += measure(gets, base="plain get", rounds=options.rounds)
        for peer in peers.values():
            if isinstance(peer, Kvtier):
                peer.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(figures)
    if not options.no_save:
        save("disk_lmcache", figures, flags=vars(options), extra={})
    os._exit(0)  # LMCache's threads keep the interpreter from ending


if __name__ == "__main__":
    main()
