"""What the tests of the store share: small stores of every shape, and sums that must always hold."""

import asyncio
import contextlib
import gc
import os
import threading
from pathlib import Path

import pytest
import torch

import kvtier
from kvtier.backends.disk_layout import ENTRIES
from kvtier.config import load_config
from kvtier.store import opening
from kvtier.store.chunks import ChunkFace
from kvtier.store.engine import Engine
from kvtier.store.kv import KVStore
from kvtier.testing.memory import MemoryBackend

MEMORY = {"backend": "pinned-cpu", "capacity": "16MiB"}


class Events:
    """An observer that keeps everything it hears of."""

    def __init__(self):
        self.all = []

    def on_event(self, event):
        self.all.append(event)

    def count(self, kind):
        return sum(event.kind == kind for event in self.all)


class Kit:
    """One fixture in place of imports, which test folders without packages do not have."""

    chunk_tokens = 4
    layout = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    namespace = kvtier.Namespace(model="org/model", revision="1")
    Events = Events

    def __init__(self, path):
        self.path = path

    def memory(self, **options):
        return {**MEMORY, **options}

    def disk(self, **options):
        return {"backend": "local-disk", "path": str(self.path / "disk"), "capacity": "64MiB", **options}

    def medium(self, backend=None, **options):
        """A byte tier in a dict; give a backend to share its medium or to make it misbehave."""
        return {"backend": backend or MemoryBackend(), "name": "medium", "capacity": "64MiB", **options}

    def config(self, *tiers, staging="4MiB", results="32MiB", **options):
        memory = {"staging_bytes": staging, "results_bytes": results}
        # a deadline that no stall of a busy machine reaches; tests of deadlines give their own
        defaults = {"chunk_tokens": self.chunk_tokens, "deadline_seconds": 60.0}
        return {**defaults, "tiers": list(tiers), "memory": memory, **options}

    def open_chunks(self, *tiers, observer=None, clock=None, make_workers=None, **options):
        return ChunkFace(self.engine(*tiers, observer=observer, clock=clock, make_workers=make_workers, **options))

    def open(self, *tiers, layout=None, namespace=None, observer=None, clock=None, make_workers=None, **options):
        engine = self.engine(*tiers, observer=observer, clock=clock, make_workers=make_workers, **options)
        return KVStore(
            engine,
            namespace=namespace or self.namespace,
            layout=layout or self.layout,
            chunk_tokens=options.get("chunk_tokens", self.chunk_tokens),
        )

    def engine(self, *tiers, observer=None, clock=None, make_workers=None, strict=None, lossless=None, **options):
        """As `kvtier.open` makes it, but for the clock and the threads, which only tests choose."""
        checked = load_config(self.config(*tiers, **options))
        made = opening._engine(checked, observer=observer, strict=strict, lossless=lossless, chunk_bytes=0)
        extra = {"make_workers": make_workers} if make_workers is not None else {}
        return Engine(made.settings, made._parts, observer=observer, clock=clock, **extra)

    def kv(self, tokens, *, take=0, layout=None):
        """KV that no other tokens have, nor another take of the same."""
        from kvtier.testing.kv_values import Prompt, kv_of

        prompt = Prompt(((tuple(tokens), ""),))
        kv = kv_of(layout or self.layout, prompt, chunk_tokens=self.chunk_tokens, take=take)
        return next(iter(kv.values())) if len(kv) == 1 else kv

    def assert_kv(self, hit, tokens, *, take=0, start=0):
        from kvtier.testing.kv_values import same_bits

        wanted = self.kv(tokens, take=take)
        for name, tensor in wanted.items():
            assert same_bits(hit.kv[name], tensor[:, start : hit.num_tokens]), f"{name} holds other values"

    def files(self):
        """Every entry's file on the disk tier."""
        return sorted(path for path in (self.path / "disk" / ENTRIES).rglob("*") if path.is_file())

    @staticmethod
    def overwrite(path, content):
        """Damage an entry's file, if it is still there; its modification time, which is its expiry, stays."""
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
            before = os.fstat(file.fileno())
            file.truncate()
            file.write(content)
            file.flush()
            os.utime(file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))

    @staticmethod
    def tensor(seed, size=2048):
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))

    @staticmethod
    def assert_books_balance(store):
        for name, tier in store.stats().tiers.items():
            came = tier.found + tier.written
            went = tier.evicted + tier.deleted + tier.expired + tier.corrupt + tier.vanished
            assert came - went == tier.entries, f"{name}: {came} came, {went} went, {tier.entries} are there"
            ends = tier.hits + tier.misses + tier.corrupt + tier.raced + tier.timeouts + tier.errors + tier.skipped
            assert tier.lookups == ends, f"{name}: {tier.lookups} lookups with {ends} outcomes: {tier.counters}"
            assert tier.bytes >= 0, name

    @staticmethod
    async def until(true, *, seconds=45.0):
        """Wait for something that other tasks or threads bring about; generous, because machines are busy."""
        async with asyncio.timeout(seconds):
            while not true():
                await asyncio.sleep(0.005)

    @staticmethod
    def resources(store):
        """What must be back to where it was once all work has ended."""
        gc.collect()
        engine, stats = store._engine, store.stats()
        return {
            "tasks": stats.tasks,
            "reads": stats.reads_under_way,
            "claims": engine.generations.in_flight,
            "changes": engine.generations.remembered,
            "key locks": sum(len(tier.locks) for tier in engine.stored_tiers),
            "in flight": sum(tier.in_flight_bytes for tier in stats.tiers.values()),
            "queued": sum(tier.queued_bytes for tier in stats.tiers.values()),
            "arena beside entries": stats.memory.arena_used
            - sum(
                entry.value.slot.size for tier in engine.memory_tiers for entry in tier.ledger.index.entries.values()
            ),
            "results lent": engine.results.stats().lent,
            "leased": stats.memory.leased,
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
        }


@pytest.fixture
def kit(tmp_path):
    return Kit(tmp_path)


@pytest.fixture
def events():
    return Events()


@pytest.fixture
async def opened():
    """Open stores that are closed at the end, whatever happened: `store = await opened(kit.open(...))`."""
    async with contextlib.AsyncExitStack() as stack:

        async def enter(store):
            return await stack.enter_async_context(store)

        yield enter


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.fspath).parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(90))
