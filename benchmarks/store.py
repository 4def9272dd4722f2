"""The store's put, get and lease on DRAM against memcpy, and what its own work costs where no bytes move.

A prompt of 8 chunks of 32 MiB (LTHD and LHTD, bfloat16) for the paths that copy; 128 and 512 small chunks for lookups
and leases, whose cost does not depend on the bytes.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import gc
import itertools
import random
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar, TypeVarTuple

import numpy
import torch

import kvtier
from benchmarks.harness import MIB, Case, Figure, fill, measure, parser, save, show
from kvtier.backends.views import host_view, writable_views
from kvtier.config import TierConfig
from kvtier.testing.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from kvtier.backends.base import Read, Write, Written
    from kvtier.errors import BackendError
    from kvtier.testing.memory import Stored

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LAYERS, HEADS, DIM, TOKENS, CHUNKS = 32, 8, 128, 256, 8
PROMPT = 2 * LAYERS * HEADS * DIM * TOKENS * CHUNKS * 2
GOALS = {
    "put LTHD": 0.95,
    "put LHTD": 0.85,
    "get out LTHD": 0.95,
    "get out LHTD": 0.85,
    "get LTHD": 0.855,
    "get LHTD": 0.765,
}
IN_A_ROW = 20
NAMESPACE = kvtier.Namespace(model="benchmark", revision="1")


class Warm:
    """One store per axis order, with warm memory everywhere before anything is timed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, axes: str) -> None:
        self.loop, self.axes = loop, axes
        layout = kvtier.KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", axes=axes)
        config = {
            "chunk_tokens": TOKENS,
            "tiers": [{"backend": "pinned-cpu", "capacity": 3 * PROMPT}],
            "memory": {"results_bytes": 3 * PROMPT},
        }
        self.store = kvtier.open(config, namespace=NAMESPACE, layout=layout)
        self.run(self.store.__aenter__())
        tokens = TOKENS * CHUNKS
        shape = (LAYERS, tokens, HEADS, DIM) if axes == "LTHD" else (LAYERS, HEADS, tokens, DIM)
        self.kv = {name: torch.empty(shape, dtype=torch.bfloat16) for name in "kv"}
        for seed, tensor in enumerate(self.kv.values()):
            fill(memoryview(tensor.view(torch.uint8).numpy()).cast("B"), seed=seed)
        self.out = {name: torch.zeros_like(tensor) for name, tensor in self.kv.items()}
        self._prompts = (array.array("i", [n] * tokens) for n in itertools.count())
        for _ in range(4):  # the whole tier has been written to once
            self.new_prompt()
            self.put()

    def run(self, call: Coroutine[object, object, object]) -> object:
        """Run one call of the store."""
        return self.loop.run_until_complete(call)

    def close(self) -> None:
        """Close the store."""
        self.run(self.store.aclose())

    def new_prompt(self) -> None:
        """Take tokens that were never put."""
        self.prompt = kvtier.Prefix(next(self._prompts))

    def put(self) -> None:
        """Store the prompt; an older one is evicted for it."""
        self.run(self.store.put(self.prompt, self.kv))

    def get_out(self) -> None:
        """Fill the caller's warm tensors."""
        self.run(self.store.get(self.prompt, out=self.out))

    def get(self) -> None:
        """Fill recycled memory."""
        self.run(self.store.get(self.prompt))

    def memcpy(self) -> None:
        """Copy the same bytes between the same warm tensors, as libc does it."""
        for name, tensor in self.kv.items():
            ctypes.memmove(self.out[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)

    def cases(self) -> list[Case]:
        """Return the timed calls."""
        return [
            Case(name=f"put {self.axes}", call=self.put, size=PROMPT, prepare=self.new_prompt),
            Case(name=f"get out {self.axes}", call=self.get_out, size=PROMPT),
            Case(name=f"get {self.axes}", call=self.get, size=PROMPT),
        ]


class Small:
    """A store of many small chunks: what is left when no bytes move."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, chunks: int, idle_tier: bool) -> None:
        self.loop = loop
        layout = kvtier.KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, dtype="bfloat16")
        tiers: list[object] = [{"backend": "pinned-cpu", "capacity": "64MiB"}]
        if idle_tier:
            tiers.append(TierConfig(backend=MemoryBackend(), name="idle", capacity=64 * MIB, write="back"))
        config = {"chunk_tokens": 16, "tiers": tiers}
        self.store = kvtier.open(config, namespace=NAMESPACE, layout=layout)
        self.run(self.store.__aenter__())
        self.prefix = kvtier.Prefix(array.array("i", range(16 * chunks)))
        kv = {name: torch.randn(2, 16 * chunks, 1, 16).bfloat16() for name in "kv"}
        self.run(self.store.put(self.prefix, kv))
        self.first = kvtier.Prefix(array.array("i", range(16)))

    def run(self, call: Coroutine[object, object, object]) -> object:
        """Run one call of the store."""
        return self.loop.run_until_complete(call)

    def close(self) -> None:
        """Close the store."""
        self.run(self.store.aclose())

    def exists(self) -> None:
        """Look all chunks up in the own index; the keys were made before."""
        self.run(self.store.exists(self.prefix))

    def lease(self) -> None:
        """Lease all chunks and touch the first tensor of each."""
        self.run(self._lease())

    async def _lease(self) -> None:
        async with self.store.lease(self.prefix) as lease:
            for chunk in lease.chunks:
                _ = chunk["k"]

    def get_one(self) -> None:
        """Get one small chunk."""
        self.run(self.store.get(self.first))


def overhead(loop: asyncio.AbstractEventLoop, *, rounds: int) -> list[Figure]:
    """Time the calls that move (almost) no bytes."""
    small, wide = Small(loop, chunks=128, idle_tier=False), Small(loop, chunks=512, idle_tier=False)
    idle = Small(loop, chunks=128, idle_tier=True)
    cases = [
        Case(name="exists of 512 chunks", call=wide.exists, calls=IN_A_ROW),
        Case(name="lease of 128 chunks", call=small.lease, calls=IN_A_ROW),
        Case(name="get of 1 small chunk", call=small.get_one, calls=IN_A_ROW),
        Case(name="get of 1, idle tier below", call=idle.get_one, calls=IN_A_ROW),
        Case(name="exists of 512 chunks, caches cold", call=wide.exists),
        Case(name="lease of 128 chunks, caches cold", call=small.lease),
        Case(name="get of 1 small chunk, caches cold", call=small.get_one),
    ]
    figures = measure(cases, base="exists of 512 chunks", rounds=rounds)
    for store in (small, wide, idle):
        store.close()
    return figures


class Shape(NamedTuple):
    """What a load beside which gets are timed looks like."""

    layers: int
    heads: int
    chunk_tokens: int
    busy_chunks: int  # of each of four prompts that are prefetched, and of each that is put
    prompts: int  # that are put in turn
    gets: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return 2 * 2 * self.layers * self.heads * 64 * self.chunk_tokens


SHAPES = {
    "chunks of 256 KiB": Shape(layers=8, heads=2, chunk_tokens=64, busy_chunks=64, prompts=24, gets=400),
    "SmolLM2-135M, 256 tokens": Shape(layers=30, heads=3, chunk_tokens=256, busy_chunks=16, prompts=5, gets=400),
}


async def beside_background(shape: Shape) -> dict[str, float]:
    """Time gets of one chunk from a slow medium, alone and beside prefetches and writes that saturate it."""
    layout = kvtier.KVLayout(num_layers=shape.layers, num_kv_heads=shape.heads, head_dim=64, dtype="bfloat16")
    chunk_tokens, busy_chunks = shape.chunk_tokens, shape.busy_chunks
    tiers = [
        {"backend": "pinned-cpu", "capacity": max(32 * MIB, 32 * shape.chunk_bytes), "promote": "never"},
        TierConfig(backend=SlowMedium(), name="medium", capacity=4 << 30, promote="never", negative_seconds=60),
    ]
    rng = random.Random(1)
    axes = (shape.heads, 64)

    def prompt(chunks: int) -> tuple[kvtier.Prefix, dict[str, torch.Tensor]]:
        tokens = [rng.randrange(1 << 30) for _ in range(chunk_tokens * chunks)]
        kv = {n: torch.randn(shape.layers, len(tokens), *axes, dtype=torch.bfloat16) for n in "kv"}
        return kvtier.Prefix(tokens), kv

    async with kvtier.open({"chunk_tokens": chunk_tokens, "tiers": tiers}, namespace=NAMESPACE, layout=layout) as store:
        wanted = [prompt(1) for _ in range(shape.gets)]
        for prefix, kv in wanted:
            await store.put(prefix, kv, wait="medium")
        busy = [prompt(busy_chunks) for _ in range(4)]
        for prefix, kv in busy:
            await store.put(prefix, kv, wait="medium", deadline_seconds=60)
        fresh = itertools.cycle(
            [prompt(busy_chunks) for _ in range(shape.prompts)]
        )  # made before: the load must not be the maker

        async def background() -> None:
            while True:
                await asyncio.gather(*(store.prefetch(prefix) for prefix, _ in busy))
                prefix, kv = next(fresh)
                await store.put(prefix, kv)

        gc.collect()
        gc.freeze()  # as a server does once it is up: a full collection of what torch has made takes 80 ms
        idle = await _timed_gets(store, [prefix for prefix, _ in wanted])
        load = asyncio.create_task(background())
        await asyncio.sleep(0.5)
        loaded = await _timed_gets(store, [prefix for prefix, _ in wanted])
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    chunk_seconds = statistics.median(idle)
    return {
        "idle p99 s": _p99(idle),
        "loaded p99 s": _p99(loaded),
        "one chunk's time s": chunk_seconds,
        "allowed s": 2 * _p99(idle) + chunk_seconds,
    }


class SlowMedium(MemoryBackend):
    """A medium whose every read and write takes a while.

    It moves its bytes in threads and without the interpreter, as the system calls of a real one do.
    """

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        """Read after a round trip."""
        await asyncio.sleep(0.005)
        return await asyncio.gather(*(self._in_thread(_copy_out, read, self.medium[read.name]) for read in reads))

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        """Write after a round trip."""
        await asyncio.sleep(0.005)
        values = await asyncio.gather(*(self._in_thread(_copy_in, write) for write in writes))
        return [self._keep(write.name, value, write.expires) for write, value in zip(writes, values, strict=True)]

    async def _in_thread(self, func: Callable[[*Ts], T], *args: *Ts) -> T:
        return await (await self._turn()).workers.run(func, *args)


def _copy_out(read: Read, stored: Stored) -> int:
    """Fill the buffers, and show what came while it is in this core's cache, as the backends do."""
    source, size = numpy.frombuffer(stored.value, numpy.uint8), 0
    for view in writable_views(read.into):
        into = numpy.frombuffer(view, numpy.uint8)[: len(source) - size]
        numpy.copyto(into, source[size : size + len(into)])
        size += len(into)
    if read.watch is not None:
        read.watch(size)
    return size


def _copy_in(write: Write) -> memoryview:
    return numpy.concatenate([numpy.frombuffer(host_view(part), numpy.uint8) for part in write.parts]).data


async def _timed_gets(store: kvtier.KVStore, prefixes: list[kvtier.Prefix]) -> list[float]:
    taken = []
    for prefix in prefixes:
        begin = time.perf_counter()
        await store.get(prefix)
        taken.append(time.perf_counter() - begin)
        await asyncio.sleep(0.005)
    return taken


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99) - 1]


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/store.json`."""
    flags = parser(__doc__, rounds=11)
    flags.add_argument("--threads", type=int, default=1, help="threads of one tensor copy; memcpy has one")
    options = flags.parse_args(arguments)
    torch.set_num_threads(options.threads)
    loop = asyncio.new_event_loop()
    lthd, lhtd = Warm(loop, "LTHD"), Warm(loop, "LHTD")
    cases = [Case(name="memcpy", call=lthd.memcpy, size=PROMPT), *lthd.cases(), *lhtd.cases()]
    figures = measure(cases, base="memcpy", rounds=options.rounds, goals=GOALS)
    show(figures)
    for store in (lthd, lhtd):
        store.close()
    costs = overhead(loop, rounds=max(options.rounds, 31))
    show(costs)
    latency = {name: asyncio.run(beside_background(shape)) for name, shape in SHAPES.items()}
    for name, seconds in latency.items():
        print(name, {what: round(value, 5) for what, value in seconds.items()})
    if not options.no_save:
        extra = {"prompt_bytes": PROMPT, "beside_background": latency}
        save("store", [*figures, *costs], flags=vars(options), extra=extra)
    return figures


if __name__ == "__main__":
    main()
