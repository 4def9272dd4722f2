"""Part of benchmarks.gpu: a prefix of 32 layers loads from host memory while the device computes layer after layer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

import kvtier
from benchmarks.harness import Case, Figure, measure
from kvtier.buffers.devices import device_of
from kvtier.paged import PagedLayout

if TYPE_CHECKING:
    import asyncio

    from kvtier.store.kv import KVStore
    from kvtier.store.streaming import Part

LAYERS, GROUP, HEADS, DIM, BLOCK, CHUNK_TOKENS = 32, 4, 8, 128, 16, 256
OVER_BOUND = 1.1  # the goal: overlapped <= 1.1 x max(load, compute)


class Overlap:
    """A store in host memory with a layer group for every four layers, blocks on the device, and work for it."""

    def __init__(self, device: torch.device, *, tokens: int) -> None:
        self.device = device_of(device)
        self.at = device
        self.tokens = list(range(tokens))
        shape = (2, GROUP, tokens // BLOCK, BLOCK, HEADS, DIM)
        self.caches = [
            torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device=device).view(torch.bfloat16)
            for _ in range(LAYERS // GROUP)
        ]
        self.paged = PagedLayout.join(
            *(
                PagedLayout.from_stacked(cache, "2LBNHD", name=f"layers-{i}", layers=range(i * GROUP, (i + 1) * GROUP))
                for i, cache in enumerate(self.caches)
            )
        )
        self.blocks = list(range(tokens // BLOCK))
        self.copying = self.device.stream()
        size, dtype = (2048, torch.bfloat16) if device.type == "cuda" else (128, torch.float32)
        self.weights = torch.randn(size, size, device=device, dtype=dtype)
        self.repeats = 1

    def wait(self) -> None:
        """Wait for the device."""
        if self.at.type == "cuda":
            torch.cuda.synchronize(self.at)

    def layer_work(self) -> None:
        """Stand for the computing of a layer."""
        for _ in range(self.repeats):
            torch.mm(self.weights, self.weights)

    def load_layer(self, part: Part) -> None:
        """Copy a layer to its blocks on the copying stream."""
        chunk = {name: tensor[None] for name, tensor in part.kv.items()}

        def copy() -> None:
            moved = {name: tensor.to(self.at, non_blocking=True) for name, tensor in chunk.items()}
            self.paged.layer(part.layer or 0).scatter(moved, self.blocks)

        self.copying.run(copy)

    async def load(self, store: KVStore, *, compute: bool) -> None:
        """Bring layer after layer to the device; compute on each, if that is wanted."""
        async for part in store.stream(self.tokens, by="layer"):
            self.load_layer(part)
            if compute:
                self.device.current().wait(self.copying.record())
                self.layer_work()

    def computed(self) -> None:
        """Compute all layers."""
        for _ in range(LAYERS):
            self.layer_work()
        self.wait()

    def calibrate(self, seconds: float) -> None:
        """Let computing take about as long as loading: then overlapping is worth most, and is seen best."""
        self.computed()
        begin = time.perf_counter()
        self.computed()
        self.repeats = max(1, round(seconds / max(time.perf_counter() - begin, 1e-6)))


def layerwise(device: torch.device, rounds: int, loop: asyncio.AbstractEventLoop) -> tuple[list[Figure], bool]:
    """Measure loading, computing and both at once; tell whether both at once kept within the bound."""
    overlap = Overlap(device, tokens=4096 if device.type == "cuda" else 256)
    config = {"chunk_tokens": CHUNK_TOKENS, "tiers": [{"backend": "pinned-cpu", "capacity": "1GiB"}]}
    store = kvtier.open(
        config, namespace=kvtier.Namespace(model="bench/gpu-layers", revision="1"), layout=overlap.paged.kv_layout()
    )

    def run(*, compute: bool) -> None:
        loop.run_until_complete(overlap.load(store, compute=compute))
        overlap.wait()

    async def fill() -> None:
        await store.__aenter__()
        tables = dict.fromkeys(overlap.paged.groups, overlap.blocks)
        await store.put(overlap.tokens, overlap.paged.source(tables), deadline_seconds=60)

    loop.run_until_complete(fill())
    run(compute=False)
    begin = time.perf_counter()
    run(compute=False)
    overlap.calibrate(time.perf_counter() - begin)
    cases = [
        Case(name="layers: load", call=lambda: run(compute=False)),
        Case(name="layers: compute", call=overlap.computed),
        Case(name="layers: overlapped", call=lambda: run(compute=True)),
    ]
    figures = measure(cases, base="layers: load", rounds=rounds)
    loop.run_until_complete(store.aclose())
    seconds = {figure.name: figure.seconds for figure in figures}
    bound = OVER_BOUND * max(seconds["layers: load"], seconds["layers: compute"])
    return figures, seconds["layers: overlapped"] <= bound
