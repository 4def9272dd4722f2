"""LMCache (0.5.6) and kvtier behind the same calls, for the benchmarks that hold one against the other.

LMCache's metadata ask for CUDA packages, so it goes into an environment of its own: the CPU build of torch, kvtier,
`pip install --no-deps lmcache==0.5.6`, then what its imports lack (nvtx, py-cpuinfo, blake3, cachetools, awscrt, ...).
Run what uses this with `LMCACHE_TRACK_USAGE=false`: it reports home by default, and nothing here keeps it from that.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from typing import TYPE_CHECKING, Any

import torch
from lmcache.utils import CacheEngineKey  # type: ignore[import-not-found]
from lmcache.v1.config import LMCacheEngineConfig  # type: ignore[import-not-found]
from lmcache.v1.event_manager import EventManager  # type: ignore[import-not-found]
from lmcache.v1.metadata import LMCacheMetadata  # type: ignore[import-not-found]
from lmcache.v1.storage_backend.storage_manager import StorageManager  # type: ignore[import-not-found]

import kvtier
from benchmarks.harness import MIB, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.harness import Figure

LAYERS, TOKENS, HEADS, DIM = 32, 256, 8, 128  # a chunk of an 8B model
KV_SHAPE = (LAYERS, 2, TOKENS, HEADS, DIM)
SHAPE = (2, 32, 256, 1024)  # as LMCache holds them; more than four dimensions it does not store remotely
SIZE = 32 * MIB
PUT_SECONDS = 15
SERVED, MISSED, RIGHT = "the wrong bytes, as a hit", "a miss", "the right bytes"


def chunks(count: int) -> list[torch.Tensor]:
    """Return unique values that no compressor shrinks."""
    values = [torch.empty(SHAPE, dtype=torch.bfloat16) for _ in range(count)]
    for number, value in enumerate(values):
        fill(bytes_of(value), seed=number)
    return values


def bytes_of(value: torch.Tensor) -> memoryview:
    """Return a view of a value's bytes."""
    return memoryview(value.view(torch.uint8).flatten().numpy())


class LMCache:
    """Its storage manager with one tier below its staging memory.

    Args:
        tier: its name for the tier, such as `LocalDiskBackend`.
        model: stands in every key.
        remove: takes keys out of the tier.
        options: of its config.
    """

    def __init__(
        self, tier: str, *, model: str, remove: Callable[[LMCache, Sequence[Any]], None], **options: object
    ) -> None:
        config = LMCacheEngineConfig.from_defaults(chunk_size=256, local_cpu=False, max_local_cpu_size=1.0, **options)
        about = LMCacheMetadata(
            model_name=model,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=KV_SHAPE,
            role="worker",
        )
        self._store = StorageManager(config, about, EventManager())
        self._tier = tier
        self.backend: Any = self._store.storage_backends[tier]
        self._remove = remove
        self._key = lambda number: CacheEngineKey(model, 1, 0, number, torch.bfloat16)
        self._numbers = itertools.count(1)
        self._into: list[torch.Tensor] = []
        self.keys: list[Any] = []

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Store under new keys, and wait until the tier has all."""
        self.keys = [self._key(next(self._numbers)) for _ in values]
        objects = []
        for value in values:
            held = self._store.allocate(value.shape, torch.bfloat16)
            held.tensor.copy_(value)
            objects.append(held)
        self._store.batched_put(self.keys, objects)
        until = time.monotonic() + PUT_SECONDS
        for key in self.keys:  # its queues let go of some keys before the tier has them, and of failed ones as well
            while self.backend.exists_in_put_tasks(key) or not self.backend.contains(key):
                if time.monotonic() > until:
                    raise TimeoutError(key)
                time.sleep(0.0005)

    def get(self) -> None:
        """Read all that were put last; the answers are objects in its staging memory."""
        for found in self._store.batched_get(self.keys, location=self._tier):
            found.ref_count_down()

    def get_copied(self) -> None:
        """The same, and copy each answer into memory of the caller, as kvtier's `get` does."""
        self._into = self._into or [torch.zeros(SHAPE, dtype=torch.bfloat16) for _ in self.keys]
        for found, into in zip(self._store.batched_get(self.keys, location=self._tier), self._into, strict=True):
            into.copy_(found.tensor)
            found.ref_count_down()

    def first(self, value: torch.Tensor) -> str:
        """Say what a read of the first one gives, that should be `value`."""
        (found,) = self._store.batched_get(self.keys[:1], location=self._tier)
        if found is None:
            return MISSED
        same = torch.equal(found.tensor.view(torch.int16).flatten(), value.view(torch.int16).flatten())
        found.ref_count_down()
        return RIGHT if same else SERVED

    def forget(self) -> None:
        """Remove them."""
        self._remove(self, self.keys)
        self.keys = []


class Kvtier:
    """A store over one tier, whose config this is but for the capacity."""

    def __init__(self, **tier: object) -> None:
        self._loop = asyncio.new_event_loop()
        memory = {"staging_bytes": "512MiB", "results_bytes": "1GiB"}
        tiers = [{"name": "tier", "capacity": "8GiB", **tier}]
        self._store = kvtier.open_chunks({"tiers": tiers, "deadline_seconds": 60, "memory": memory})
        self._loop.run_until_complete(self._store.__aenter__())
        self._numbers = itertools.count(1)
        self._keys: list[str] = []

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Store under new keys, and wait until the tier has all."""
        self._keys = [f"chunk {next(self._numbers)}" for _ in values]
        self._loop.run_until_complete(self._store.put_many(dict(zip(self._keys, values, strict=True)), wait="tier"))

    def get(self) -> None:
        """Read all that were put last."""
        found = self._loop.run_until_complete(self._store.get_many(self._keys))
        if len(found) != len(self._keys):
            raise LookupError(found.keys())

    def first(self, value: torch.Tensor) -> str:
        """Say what a read of the first one gives, that should be `value`."""
        found = self._loop.run_until_complete(self._store.get(self._keys[0]))
        if found is None:
            return MISSED
        same = isinstance(found, torch.Tensor) and torch.equal(found.view(torch.int16), value.view(torch.int16))
        return RIGHT if same else SERVED

    def forget(self) -> None:
        """Remove them."""
        self._loop.run_until_complete(self._store.delete_many(self._keys))
        self._keys = []

    def close(self) -> None:
        """Close the store."""
        self._loop.run_until_complete(self._store.aclose())


class Leased:
    """A `KVStore` over one tier, which lends its chunks where they were checked, as LMCache's get does unchecked."""

    def __init__(self, values: Sequence[torch.Tensor], **tier: object) -> None:
        self._loop = asyncio.new_event_loop()
        self._values = values
        self._tokens = array("I", range(TOKENS * len(values)))
        tiers = [{"name": "tier", "capacity": "8GiB", "promote": "never", **tier}]
        memory = {"staging_bytes": "1GiB", "lease_share": 1.0}
        self._store = kvtier.open(
            {"tiers": tiers, "deadline_seconds": 60, "memory": memory},
            namespace=kvtier.Namespace(model="benchmark", revision="1"),
            layout=kvtier.KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="bfloat16"),
        )
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        await self._store.__aenter__()
        for number in range(len(self._values)):  # a chunk at a time, so that no copy of all is needed
            stop = (number + 1) * TOKENS
            kv = dict(zip("kv", self._kv(number), strict=True))
            await self._store.put(self._tokens[:stop], kv, start=stop - TOKENS, wait="tier")
        async with self._store.lease(self._tokens) as lease:
            if not all(
                torch.equal(chunk[name].view(torch.int16), value.view(torch.int16))
                for number, chunk in enumerate(lease.chunks)
                for name, value in zip("kv", self._kv(number), strict=True)
            ):
                raise LookupError("other bytes")

    def _kv(self, number: int) -> torch.Tensor:
        return self._values[number].view(2, LAYERS, TOKENS, HEADS, DIM)

    def get(self) -> None:
        """Lease all chunks."""
        self._loop.run_until_complete(self._lease())

    async def _lease(self) -> None:
        async with self._store.lease(self._tokens) as lease:
            if lease.num_tokens != len(self._tokens) or not lease.complete:
                raise LookupError(lease.num_tokens)

    def close(self) -> None:
        """Close the store."""
        self._loop.run_until_complete(self._store.aclose())


def times(figures: Sequence[Figure], pairs: Mapping[str, str]) -> dict[str, float]:
    """Return how many times as fast ours is, for each of LMCache's ways and the one of ours like it.

    Its get is held against our lease, for neither copies; its get with a copy behind it against our get.
    """
    seconds = {figure.name: figure.seconds for figure in figures}
    verbs = {"put": "put", "get": "lease", "get, copied": "get"}
    return {
        f"{theirs} {verb}": round(seconds[f"{theirs} {verb}"] / seconds[f"{ours} {equal}"], 2)
        for theirs, ours in pairs.items()
        for verb, equal in verbs.items()
    }
