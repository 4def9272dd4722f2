"""Opening a directory of many entries: the first verified get, the whole index, a list, and the loop's lag meanwhile.

Every open is a process of its own, interleaved with a control: the same process on an empty directory, where a plain
thread takes the status of all the same files. `--freeze` and `--no-collector` show what Python's garbage collector has
to do with it: the first calls `gc.freeze()` before the open, the second switches the collector off.

Entries are containers of one page behind their header, as a store that was closed properly left them, with its journal.
Dropping caches drops those of the whole machine; it is done where that is allowed, and the result says whether it was.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from typing import TYPE_CHECKING

import kvtier
from benchmarks.harness import MIB, fill, parser, save
from kvtier.backends.disk_layout import ENTRIES, SHARDS, shard_of, shard_path
from kvtier.chunk.container import Header, payload_offset, payload_size, plan_segments, seal
from kvtier.chunk.segments import SegmentSpec
from kvtier.keys.names import name_of
from kvtier.tier.index import new_entry
from kvtier.tier.journal import snapshot
from kvtier.tier.opening import stocked

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

PAYLOAD = 4096
BEAT_SECONDS = 0.001
CHAIN = 32  # chunks of one prompt
GOALS = {"first_get": 2.0, "list": 15.0, "lag": 0.1, "bytes_per_entry": 500.0}
DROP = pathlib.Path("/proc/sys/vm/drop_caches")


def key_of(number: int, *, chained: bool) -> str:
    """Return a key as a KV store makes them, or one of free text."""
    return f"{7:016x}/{9:016x}/{number * 0x9E3779B97F4A7C15 % (1 << 128):032x}" if chained else f"document {number}"


def parent_of(number: int, *, chained: bool) -> str | None:
    """Return the key of the chunk before this one in its prompt."""
    return key_of(number - 1, chained=True) if chained and number % CHAIN else None


def fill_directory(root: pathlib.Path, count: int, *, chained: bool) -> None:
    """Lay down what a closed store left: entries in their leaves, and a journal that knows them in some order."""
    config = {"tiers": [{"backend": "local-disk", "path": str(root), "capacity": "1TiB"}]}
    asyncio.run(_open_once(config))
    for shard in range(SHARDS):
        root.joinpath(ENTRIES, *shard_path(shard)).mkdir(parents=True, exist_ok=True)
    memory = memoryview(bytearray(1 * MIB))
    entries = []
    for number in range(count):
        key, parent = key_of(number, chained=chained), parent_of(number, chained=chained)
        specs = [SegmentSpec(name="", dtype="bytes", shape=(PAYLOAD,))]
        segments = plan_segments(specs, [PAYLOAD])
        offset = payload_offset(specs, key)
        size = offset + payload_size(segments)
        memory[offset : offset + 8] = number.to_bytes(8, "little")
        if not number:
            fill(memory[offset + 8 : offset + PAYLOAD], seed=1)
        header = Header(key=key, namespace="", kind="bytes", created=1.0, segments=segments, parent=parent)
        seal(memory, header, payload_offset=offset, size=size)
        name = name_of(key)
        path = root.joinpath(ENTRIES, *shard_path(shard_of(name)), name)
        path.write_bytes(memory[:size])
        os.utime(path, ns=(0, 0))
        entries.append(new_entry(key, size, parent=parent))
    random.Random(5).shuffle(entries)
    journal = root / "journal"
    journal.mkdir(mode=0o700, exist_ok=True)
    (journal / f"{1:020d}-1-{'0' * 16}.log").write_bytes(snapshot(entries, lambda _: True))
    os.sync()


async def _open_once(config: Mapping[str, object]) -> None:
    async with kvtier.open_chunks(config):
        pass


def drop_caches() -> bool:
    """Empty the page, inode and name caches; tell whether that was allowed."""
    os.sync()
    try:
        DROP.write_text("3")
    except OSError:
        return False
    return True


class Pauses:
    """The garbage collector's runs: how many of each generation, and the longest in time and in processor time."""

    def __init__(self) -> None:
        self.count: list[int] = [0, 0, 0]
        self.longest: list[float] = [0.0, 0.0, 0.0]
        self.longest_busy: list[float] = [0.0, 0.0, 0.0]
        self._began = (0.0, 0.0)
        gc.callbacks.append(self._note)

    def _note(self, phase: str, told: dict[str, int]) -> None:
        if phase == "start":
            self._began = (time.perf_counter(), time.thread_time())
            return
        generation = told["generation"]
        self.count[generation] += 1
        self.longest[generation] = max(self.longest[generation], time.perf_counter() - self._began[0])
        self.longest_busy[generation] = max(self.longest_busy[generation], time.thread_time() - self._began[1])


async def beat(late: list[float]) -> None:
    """Note how late each beat is."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(BEAT_SECONDS)
        late.append(time.perf_counter() - began - BEAT_SECONDS)


async def open_and_use(root: pathlib.Path, count: int, *, chained: bool) -> dict[str, object]:
    """Open, get a random key, wait for the index, list; return seconds from the beginning for each."""
    config = {
        "deadline_seconds": 60,
        "tiers": [{"backend": "local-disk", "name": "disk", "path": str(root), "capacity": "1TiB"}],
    }
    late: list[float] = []
    heart = asyncio.create_task(beat(late))
    await asyncio.sleep(0.05)
    pauses = Pauses()
    late.clear()
    began = time.perf_counter()
    async with kvtier.open_chunks(config) as store:
        opened = time.perf_counter() - began
        key = key_of(random.SystemRandom().randrange(count), chained=chained)
        got = await store.get(key)
        if got is None:
            raise LookupError(key)
        first_get = time.perf_counter() - began
        await stocked(store._engine.stored_tiers[0])  # noqa: SLF001  # nothing public waits for it alone
        indexed = time.perf_counter() - began
        lag_opening = max(late)
        listing = time.perf_counter()
        found = 0
        async for _ in store.list():
            found += 1
        listed = time.perf_counter() - listing
        if found != count:
            raise LookupError(found)
        heart.cancel()
        return {
            "opened": opened,
            "first_get": first_get,
            "indexed": indexed,
            "list": listed,
            "lag": lag_opening,
            "lag_list": max(late),
            "collections": pauses.count,
            "longest_collection": pauses.longest,
            "longest_collection_processor": pauses.longest_busy,
        }


async def control(root: pathlib.Path) -> dict[str, object]:
    """Return the lag while one plain thread takes the status of every file."""

    def walk() -> None:
        for shard in range(SHARDS):
            with os.scandir(root.joinpath(ENTRIES, *shard_path(shard))) as found:
                for entry in found:
                    entry.stat(follow_symlinks=False)

    late: list[float] = []
    heart = asyncio.create_task(beat(late))
    thread = threading.Thread(target=walk, daemon=True)
    began = time.perf_counter()
    thread.start()
    while thread.is_alive():  # noqa: ASYNC110  # a plain thread sets no event
        await asyncio.sleep(0.01)
    heart.cancel()
    return {"lag": max(late), "indexed": time.perf_counter() - began}


async def weigh(root: pathlib.Path, count: int) -> dict[str, object]:
    """Return the bytes of Python objects that an open store keeps per entry, and the growth of the process."""
    config = {"tiers": [{"backend": "local-disk", "path": str(root), "capacity": "1TiB"}]}
    before_traced, before_tracked = tracemalloc.get_traced_memory()[0], len(gc.get_objects())
    async with kvtier.open_chunks(config) as store:
        await stocked(store._engine.stored_tiers[0])  # noqa: SLF001  # as above
        del store
        gc.collect()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before_traced
        tracked = len(gc.get_objects()) - before_tracked
    return {"bytes_per_entry": grown / count, "tracked_per_entry": tracked / count}


def child(how: str, root: pathlib.Path, count: int, *, chained: bool) -> None:
    """Be one process of the benchmark; print what it found."""
    with tempfile.TemporaryDirectory() as empty:  # everything is imported then
        asyncio.run(_open_once({"tiers": [{"backend": "local-disk", "path": empty, "capacity": "1MiB"}]}))
    gc.collect()  # what follows is owed to what the open does
    if how == "frozen":
        gc.freeze()
    if how == "uncollected":
        gc.disable()
    if how == "weigh":
        tracemalloc.start()
    made: dict[str, Callable[[], Coroutine[object, object, dict[str, object]]]] = {
        "control": lambda: control(root),
        "weigh": lambda: weigh(root, count),
    }
    run = made.get(how, lambda: open_and_use(root, count, chained=chained))
    found = asyncio.run(run())
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(found))


def main(arguments: list[str] | None = None) -> None:
    """Run, print, and write `results/disk_restart.json`."""
    flags = parser(__doc__, rounds=3)
    flags.add_argument("--entries", type=int, default=100_000)
    flags.add_argument("--folder", default=None, help="where to work; the drive under it is what is measured")
    flags.add_argument("--keep", default=None, help="a directory to make once and use again")
    flags.add_argument("--free-keys", action="store_true", help="keys of free text, without parents")
    flags.add_argument("--warm", action="store_true", help="leave the caches as they are")
    flags.add_argument("--kinds", default="control,open", help="of control, open, frozen, uncollected")
    flags.add_argument("--child", default=None, help="for the benchmark itself")
    options = flags.parse_args(arguments)
    chained = not options.free_keys
    if options.child:
        child(options.child, pathlib.Path(options.keep), options.entries, chained=chained)
        return
    folder = pathlib.Path(options.keep or tempfile.mkdtemp(prefix="kvtier-bench-", dir=options.folder))
    try:
        root = folder / "root"
        if not root.exists():
            fill_directory(root, options.entries, chained=chained)
        rounds: dict[str, list[dict[str, object]]] = {}
        dropped = False
        for _ in range(options.rounds):
            for kind in options.kinds.split(","):
                dropped = not options.warm and drop_caches()
                rounds.setdefault(kind, []).append(_run(kind, root, options.entries, chained=chained))
                print(kind, rounds[kind][-1])
        weight = _run("weigh", root, options.entries, chained=chained)
        print("weight", weight)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if not options.no_save:
        extra = {"rounds": rounds, "weight": weight, "caches_dropped": dropped, "goals": GOALS}
        save("disk_restart", [], flags=vars(options), extra=extra)


def _run(kind: str, root: pathlib.Path, count: int, *, chained: bool) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.disk_restart", "--child", kind, "--keep", str(root)]
    command += ["--entries", str(count), *([] if chained else ["--free-keys"])]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr)
    found: dict[str, object] = json.loads(run.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
