"""Everything that needs a GPU, in a few minutes: the tests on CUDA, delayed streams, and copies against raw ones.

NOT YET RUN ON A GPU. `--device cpu` runs the same steps in host memory, to see that the script itself works; its
figures then mean nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import torch

import kvtier
from benchmarks.gpu_layerwise import layerwise
from benchmarks.harness import MIB, RESULTS, Case, Figure, measure, parser, save, show
from kvtier.backends.base import Read, Write
from kvtier.backends.cuda import CudaBackend
from kvtier.buffers.arena import Arena
from kvtier.paged import PagedLayout
from kvtier.testing.context import lend_context

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvtier.backends.base import BackendContext
    from kvtier.buffers.arena import Slot

ROOT = pathlib.Path(__file__).parents[1]
LAYERS, HEADS, DIM, TOKENS, BLOCK = 32, 8, 128, 256, 16
CHUNK = 2 * LAYERS * TOKENS * HEADS * DIM * 2
TESTS = ("tests/backends/test_cuda_conformance.py", "tests/backends/test_cuda.py", "tests/paged")
DELAY_CYCLES = 200_000_000  # of the device's clock: about a tenth of a second
GOALS = {
    "in: backend, 32 MiB": 0.95,
    "out: backend, 32 MiB": 0.95,
    "in: backend, 8 MiB": 0.95,
    "out: backend, 8 MiB": 0.95,
    "gather": 0.85,
    "scatter": 0.85,
}


class Bench:
    """One device, an arena that is registered with it, and a backend on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.cache = torch.randint(
            -(1 << 15), 1 << 15, (2, LAYERS, 4 * TOKENS // BLOCK, BLOCK, HEADS, DIM), dtype=torch.int16, device=device
        ).view(torch.bfloat16)
        self.paged = PagedLayout.from_stacked(self.cache, "2LBNHD")
        self.blocks = torch.randperm(4 * TOKENS // BLOCK)[: TOKENS // BLOCK].tolist()
        self.chunk = self.paged.gather(self.blocks)
        self.turn = itertools.cycle(range(4))

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    async def open(self) -> None:
        """Open the backend on an arena registered with CUDA, and put an entry of each size."""
        context: BackendContext = await self.stack.enter_async_context(
            lend_context(arena_bytes=16 * MIB, capacity=512 * MIB)
        )
        self.arena = Arena(256 * MIB, staging=0, pin=self.device.type == "cuda")
        self.stack.callback(self.arena.close)
        while self.device.type == "cuda" and not self.arena.pinned:  # noqa: ASYNC110  # a thread registers it
            await asyncio.sleep(0.05)
        self.backend = CudaBackend(device=str(self.device), slot_bytes=MIB)
        self.stack.push_async_callback(self.backend.aclose)
        await self.backend.open(context)
        self.slots = {size: self._slot(size * MIB) for size in (8, 32)}
        for slot in self.slots.values():
            self.stack.callback(slot.release)
        self.raw = {size: torch.empty(size * MIB, dtype=torch.uint8, device=self.device) for size in self.slots}
        for size in self.slots:
            await self._write(size)

    def _slot(self, size: int) -> Slot:
        slot = self.arena.try_allocate(size)
        if slot is None:
            raise MemoryError("the arena is too small")
        return slot

    async def _write(self, size: int) -> None:
        answer = (await self.backend.write_many([Write(f"entry-{size}", [self.slots[size].view()])]))[0]
        if isinstance(answer, Exception):
            raise answer

    def write(self, size: int) -> None:
        """Copy an entry to the device."""
        self.loop.run_until_complete(self._write(size))

    def read(self, size: int) -> None:
        """Copy an entry from the device."""
        into = self.slots[size].view()
        (answer,) = self.loop.run_until_complete(self.backend.read_many([Read(f"entry-{size}", [into])]))
        if answer != len(into):
            raise AssertionError(answer)

    def raw_copy(self, size: int, *, inwards: bool) -> None:
        """Copy as many bytes by one cudaMemcpyAsync on registered memory."""
        host = torch.frombuffer(self.slots[size].view(), dtype=torch.uint8)
        target, source = (self.raw[size], host) if inwards else (host, self.raw[size])
        target.copy_(source, non_blocking=True)
        self.wait()

    def device_copy(self) -> None:
        """Copy a chunk's bytes within the device."""
        for name in "kv":
            self.chunk[name].clone()
        self.wait()

    def gather(self) -> None:
        """Gather a chunk."""
        self.paged.gather(self.blocks, out=self.chunk)
        self.wait()

    def scatter(self) -> None:
        """Scatter a chunk."""
        self.paged.scatter(self.chunk, self.blocks)
        self.wait()

    def quantised_out(self) -> None:
        """Quantise a chunk to int8 with a scale per token and head, then copy half the bytes out."""
        for name in "kv":
            values = self.chunk[name].float()
            scale = values.abs().amax(-1, keepdim=True) / 127
            small = (values / scale).round().to(torch.int8)
            size = small.nbytes
            host = torch.frombuffer(self.slots[32].view(0, size), dtype=torch.int8).view(small.shape)
            host.copy_(small, non_blocking=True)
        self.wait()

    def plain_out(self) -> None:
        """Copy a chunk out as it is."""
        start = 0
        for name in "kv":
            size = self.chunk[name].nbytes
            view = self.slots[32].view(start, size)
            host = torch.frombuffer(view, dtype=torch.bfloat16).view(self.chunk[name].shape)
            host.copy_(self.chunk[name], non_blocking=True)
            start += size
        self.wait()


def bus(bench: Bench, rounds: int) -> list[Figure]:
    """Measure copies over the bus against raw ones of the same size."""
    figures = []
    for size in (8, 32):
        for way, call in (("in", bench.write), ("out", bench.read)):
            inwards = way == "in"
            raw = f"{way}: raw, {size} MiB"
            cases = [
                Case(name=raw, call=lambda s=size, i=inwards: bench.raw_copy(s, inwards=i), size=size * MIB),
                Case(name=f"{way}: backend, {size} MiB", call=lambda s=size, c=call: c(s), size=size * MIB),
            ]
            figures += measure(cases, base=raw, rounds=rounds, goals=GOALS)
    return figures


def kernels(bench: Bench, rounds: int) -> list[Figure]:
    """Measure gather and scatter against a copy within the device, and quantising before the bus."""
    within = [
        Case(name="device copy", call=bench.device_copy, size=CHUNK),
        Case(name="gather", call=bench.gather, size=CHUNK),
        Case(name="scatter", call=bench.scatter, size=CHUNK),
    ]
    out = [
        Case(name="copy out", call=bench.plain_out, size=CHUNK),
        Case(name="quantise, copy out", call=bench.quantised_out, size=CHUNK),
    ]
    return measure(within, base="device copy", rounds=rounds, goals=GOALS) + measure(
        out, base="copy out", rounds=rounds
    )


async def delayed_streams(device: torch.device) -> None:
    """Put blocks that a slow kernel still computes, and get into blocks that a slow kernel still reads."""
    tokens = list(range(64))
    cache = torch.zeros(2, 2, 16, BLOCK, 2, 16, device=device)
    wanted = torch.randn_like(cache)
    paged = PagedLayout.from_stacked(cache, "2LBNHD")
    config = {"chunk_tokens": 16, "tiers": [{"backend": "pinned-cpu", "capacity": "16MiB"}]}
    namespace = kvtier.Namespace(model="bench/gpu", revision="1")
    async with kvtier.open(config, namespace=namespace, layout=paged.kv_layout()) as store:
        _slow(device)
        cache.copy_(wanted)
        source = paged.source([0, 1, 2, 3])
        await store.put(tokens, source)
        cache.zero_()
        hit = await store.get(tokens)
        if hit is None or not torch.equal(hit.kv["k"], wanted[0, :, :4].flatten(1, 2).cpu()):
            raise AssertionError("a put did not wait for the stream that computes the blocks")
        _slow(device)
        before = cache[:, :, 4:8].clone()
        await store.get(tokens, out=paged.target([4, 5, 6, 7]))
        if bool(before.any()) or not torch.equal(cache[:, :, 4:8], wanted[:, :, :4]):
            raise AssertionError("a get did not wait for the blocks' last use, or was not visible")
        seen = await store.get(tokens, out=paged.target([8, 9, 10, 11], event=True))
        if seen is not None and device.type == "cuda":
            torch.cuda.current_stream().wait_event(seen.event)
        if not torch.equal(cache[:, :, 8:12], wanted[:, :, :4]):
            raise AssertionError("hit.event came before the tokens")
    print("delayed streams: every wait held")


def _slow(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(DELAY_CYCLES)  # noqa: SLF001  # torch's own tests use it: a kernel that takes its time


def run_tests(device: str) -> bool:
    """Run the conformance and race tests with their backend on the device; tell whether they passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", *TESTS]
    return not subprocess.run(
        command, cwd=ROOT, env={**os.environ, "KVTIER_TEST_DEVICE": device}, timeout=240, check=False
    ).returncode


class Report:
    """What the sections gave. It is written after each, so that one that fails or hangs loses nothing of the others."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.figures: list[Figure] = []
        self.extra: dict[str, object] = {"chunk_bytes": CHUNK, "sections": {}, "rehearsal": device.type != "cuda"}
        if device.type == "cuda":
            self.extra["gpu"] = torch.cuda.get_device_name(device)
        self.failed = False

    def section(self, name: str, work: Callable[[], None]) -> None:
        """Do one section; note its seconds, or why it failed."""
        begin, outcome = time.perf_counter(), "done"
        try:
            work()
        except Exception as exc:  # noqa: BLE001  # whatever it is, the other sections are still wanted
            traceback.print_exc()
            outcome, self.failed = f"failed: {exc!r}", True
        sections = self.extra["sections"]
        assert isinstance(sections, dict)  # noqa: S101  # made above
        sections[name] = {"outcome": outcome, "seconds": round(time.perf_counter() - begin, 1)}
        print(f"section {name}: {outcome}", flush=True)
        if self.options.no_save:
            return
        folder = RESULTS if self.device.type == "cuda" else pathlib.Path(tempfile.gettempdir())
        save("gpu", self.figures, flags=vars(self.options), extra=self.extra, folder=folder)


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/gpu.json`; with `--device cpu` the file goes to the folder for temporary ones."""
    flags = parser(__doc__, rounds=15)
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--no-tests", action="store_true", help="measure only")
    options = flags.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device; --device cpu shows that the script works, and nothing else")
    report, bench = Report(options, device), Bench(device)

    def layers() -> None:
        figures, within = layerwise(device, max(3, options.rounds // 2), bench.loop)
        report.figures += figures
        report.extra["overlap_within_bound"] = within

    def tests() -> None:
        passed = report.extra["tests_passed"] = run_tests(options.device)
        if not passed:
            raise AssertionError("tests failed; see above")

    report.section("delayed streams", lambda: asyncio.run(delayed_streams(device)))
    report.section("open", lambda: bench.loop.run_until_complete(bench.open()))
    report.section("bus", lambda: report.figures.extend(bus(bench, options.rounds)))
    report.section("kernels", lambda: report.figures.extend(kernels(bench, options.rounds)))
    report.section("layers", layers)
    report.section("close", lambda: bench.loop.run_until_complete(bench.stack.aclose()))
    if report.figures:
        show(report.figures)
    if not options.no_tests:  # last: they take the longest
        report.section("tests", tests)
    if report.failed:
        sys.exit("a section failed; what the others gave is kept")
    return report.figures


if __name__ == "__main__":
    main()
