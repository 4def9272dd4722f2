"""The local-disk backend against the drive: cold and warm reads, synced writes, new and recycled files.

The reference is `fio --ioengine=psync --bs=4M` with four jobs, on the same files in the same rounds, where it is
installed; and always this page's own program, plain threads around `preadv` and `pwritev` that do the same and nothing
else. What bounds a verified read is measured too: the same plain threads that take the checksum of what they read, and
kvtier without a look at the bytes. kvtier's side is the backend with its locks, ledger and publishing, every byte
verified while it is read, into and from one arena.

Files are containers of 32 MiB with contents that no other file repeats; four are under way at any moment.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from benchmarks.harness import MIB, Case, fill, measure, parser, save, show
from kvtier.backends.base import BackendContext, Read, Write, Written
from kvtier.backends.disk_layout import ENTRIES, SHARDS, shard_of, shard_path
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.buffers.arena import Arena
from kvtier.chunk.container import Header, payload_offset, payload_size, plan_segments, seal
from kvtier.chunk.segments import SegmentSpec
from kvtier.chunk.verifier import Verifier
from kvtier.concurrency.clock import SystemClock
from kvtier.concurrency.workers import Workers
from kvtier.events import Events

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZE = 32 * MIB
BLOCK = 4 * MIB
AT_ONCE = 4
GOALS_COLD = {"kvtier direct, cold": 0.95}
GOALS_WARM = {"kvtier buffered, warm": 0.9}
GOALS_WRITE = {"kvtier new, synced": 0.95, "kvtier recycled, synced": 1.25}


def container(view: memoryview, number: int) -> str:
    """Make the memory a container that no other one repeats; return its key."""
    key = f"{'0' * 16}/{'1' * 16}/{number:032x}"
    specs = [SegmentSpec(name="", dtype="bytes", shape=(SIZE - 4 * MIB,))]
    offset = payload_offset(specs, key)
    specs = [SegmentSpec(name="", dtype="bytes", shape=(SIZE - offset,))]
    segments = plan_segments(specs, [SIZE - offset])
    fill(view[offset:], seed=number)
    header = Header(key=key, namespace="", kind="bytes", created=0.0, segments=segments)
    seal(view, header, payload_offset=offset, size=offset + payload_size(segments))
    return key


def name_of(number: int) -> str:
    """Return the entry's name."""
    return f"{'0' * 16}.{'1' * 16}.{number:032x}"


class Bench:
    """Backends of each mode on one directory, and the memory that both sides move."""

    def __init__(self, folder: pathlib.Path, *, files: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.root = folder / "root"
        self.plain = folder / "plain"
        self.plain.mkdir()
        self.files = files
        self.arena = Arena((AT_ONCE + 1) * SIZE, staging=0, pin=False)
        slots = [self.arena.try_allocate(SIZE) for _ in range(AT_ONCE)]
        self.slots = [slot for slot in slots if slot is not None]
        self.views = [slot.view(0, SIZE) for slot in self.slots]
        self.workers = Workers("bench", AT_ONCE)
        clock = SystemClock()
        self.context = BackendContext(
            tier="disk",
            workers=self.workers,
            clock=clock,
            events=Events(None, clock),
            arena=self.arena,
            capacity=1 << 50,
        )
        self.backends = {
            "direct": self._open(io="direct", fsync=True),
            "auto": self._open(io="auto", fsync=True),
            "buffered": self._open(io="buffered"),
            "new": self._open(io="direct", fsync=True, recycle=False),
        }
        self._fresh = itertools.count(1_000_000)
        self.written: list[int] = []

    def _open(self, **options: object) -> LocalDiskBackend:
        backend = LocalDiskBackend(path=self.root, **options)  # type: ignore[arg-type]
        self.run(backend.open(self.context))
        return backend

    def run(self, call):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Run one call of a backend."""
        return self.loop.run_until_complete(call)

    def close(self) -> None:
        """Close everything."""
        for backend in self.backends.values():
            self.run(backend.aclose())
        self.run(self.workers.aclose(10.0))

    def fill(self) -> None:
        """Write the files that are read, and make the leaf directories that a directory in use has by then."""
        for shard in range(SHARDS):
            self.root.joinpath(ENTRIES, *shard_path(shard)).mkdir(parents=True, exist_ok=True)
        for number in range(self.files):
            container(self.views[0], number)
            (answer,) = self.run(self.backends["new"].write_many([Write(name_of(number), [self.views[0]])]))
            if not isinstance(answer, Written):
                raise answer
        for number, view in enumerate(self.views):
            container(view, 500_000 + number)

    def path(self, number: int) -> pathlib.Path:
        """Return where an entry lies."""
        return self.root.joinpath(ENTRIES, *shard_path(shard_of(name_of(number))), name_of(number))

    # --- kvtier

    def read(self, mode: str) -> None:
        """Read and verify every file, four at once."""
        self.run(self._in_lanes(lambda view, number: self._read_one(mode, view, number), range(self.files)))

    def read_unverified(self, mode: str) -> None:
        """Read every file without a look at it: what the verification costs is the difference."""

        async def one(view: memoryview, number: int) -> None:
            await self.backends[mode].read_many([Read(name_of(number), [view])])

        self.run(self._in_lanes(one, range(self.files)))

    async def _read_one(self, mode: str, view: memoryview, number: int) -> None:
        key = name_of(number).replace(".", "/")
        verifier = Verifier(view, key_of=lambda _: key, codecs=(), max_raw=1 << 40)
        (size,) = await self.backends[mode].read_many([Read(name_of(number), [view], watch=verifier.advance)])
        if size != SIZE:
            raise ValueError(size)
        verifier.finish(SIZE)

    def write(self, mode: str) -> None:
        """Publish as many new entries as there are files, four at once."""
        numbers = [next(self._fresh) for _ in range(self.files)]
        self.written += numbers
        self.run(self._in_lanes(lambda view, number: self._write_one(mode, view, number), numbers))

    def turn_over(self, mode: str) -> None:
        """Publish as many, each after an older one was removed for it: what a full tier does all the time."""
        numbers = [next(self._fresh) for _ in range(self.files)]
        older, self.written = self.written, numbers

        async def one(view: memoryview, number: int) -> None:
            await self.backends[mode].delete_many([name_of(older.pop())])
            await self._write_one(mode, view, number)

        self.run(self._in_lanes(one, numbers))

    async def _write_one(self, mode: str, view: memoryview, number: int) -> None:
        (answer,) = await self.backends[mode].write_many([Write(name_of(number), [view])])
        if not isinstance(answer, Written):
            raise answer

    async def _in_lanes(self, act, numbers: Sequence[int]) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        waiting = iter(numbers)

        async def lane(view: memoryview) -> None:
            for number in waiting:
                await act(view, number)

        await asyncio.gather(*(lane(view) for view in self.views))

    def remove_written(self) -> None:
        """Take the entries of earlier writes away."""
        self.run(self.backends["new"].delete_many([name_of(number) for number in self.written]))
        self.written = []

    def prepare_turn_over(self) -> None:
        """Have as many older entries as will be replaced."""
        self.remove_written()
        self.write("new")

    # --- the reference

    def plain_threads(self, act: Callable[[memoryview, int], None]) -> None:
        """Let four plain threads work through the files."""
        waiting, mutex = iter(range(self.files)), threading.Lock()

        def work(view: memoryview) -> None:
            while True:
                with mutex:
                    number = next(waiting, None)
                if number is None:
                    return
                act(view, number)

        threads = [threading.Thread(target=work, args=(view,)) for view in self.views]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def plain_read(self, flags: int, *, block: int = BLOCK, checked: bool = False) -> None:
        """Read the very same files; `checked` takes the xxh3 of each block where it was read, and nothing else."""

        def one(view: memoryview, number: int) -> None:
            fd = os.open(self.path(number), os.O_RDONLY | flags)
            state = xxhash.xxh3_64()
            for at in range(0, SIZE, block):
                os.preadv(fd, [view[at : at + block]], at)
                if checked:
                    state.update(view[at : at + block])
            os.close(fd)

        self.plain_threads(one)

    def plain_write(self, flags: int, *, synced: bool = False) -> None:
        """Write as many files of the same size; not synced, or with a modification time as an entry's, and synced."""

        def one(view: memoryview, number: int) -> None:
            fd = os.open(self.plain / str(number), os.O_WRONLY | os.O_DIRECT | flags, 0o600)
            for at in range(0, SIZE, BLOCK):
                os.pwritev(fd, [view[at : at + BLOCK]], at)
            if synced:
                os.utime(fd, ns=(0, 0))
                os.fsync(fd)
            os.close(fd)

        self.plain_threads(one)

    def remove_plain(self) -> None:
        """Take the reference's files away."""
        for path in self.plain.iterdir():
            path.unlink()
        self.remove_written()

    def prepare_overwrite(self) -> None:
        """Have the reference's files, whole and synced."""
        self.remove_plain()
        self.plain_write(os.O_CREAT)
        os.sync()

    def drop(self) -> None:
        """Take the files out of the page cache."""
        for number in range(self.files):
            fd = os.open(self.path(number), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def warm(self) -> None:
        """Bring the files into the page cache."""
        self.plain_read(0)


def fio(paths: Sequence[pathlib.Path], *options: str) -> float:
    """Let fio work through the files in four jobs, one file after the other; return the seconds that it took."""
    command = ["fio", "--ioengine=psync", "--bs=4M", "--file_service_type=sequential", "--fallocate=none"]
    command += ["--group_reporting", "--output-format=json", f"--filesize={SIZE}", *options]
    for job in range(AT_ONCE):
        names = ":".join(str(path) for path in paths[job::AT_ONCE])
        command += [f"--name=job{job}", f"--filename={names}"]
    run = subprocess.run(command, capture_output=True, check=True)
    (job,) = json.loads(run.stdout)["jobs"]
    (way,) = (job[way] for way in ("read", "write") if job[way]["io_bytes"])
    if way["io_bytes"] != len(paths) * SIZE:
        raise ValueError(way["io_bytes"])
    return float(way["io_bytes"]) / float(way["bw_bytes"])


def fio_case(name: str, bench: Bench, prepare: Callable[[], object], *options: str, new: bool = False) -> list[Case]:
    """Return the case of fio on the files that are read, or on the reference's; none where it is not installed."""
    if shutil.which("fio") is None:
        return []
    paths = [bench.plain / str(number) if new else bench.path(number) for number in range(bench.files)]
    return [Case(name=name, call=lambda: fio(paths, *options), size=bench.files * SIZE, prepare=prepare, tells=True)]


Group = tuple[list[Case], str, dict[str, float]]


def _base(cases: Sequence[Case], *names: str) -> str:
    """Return the first of the names that is a case's."""
    return next(name for name in names if any(case.name == name for case in cases))


def cold_cases(bench: Bench) -> Group:
    """Reads of what no cache holds."""

    def case(name: str, call: Callable[[], object]) -> Case:
        return Case(name=name, call=call, size=bench.files * SIZE, prepare=bench.drop)

    cases = [
        case("plain direct", lambda: bench.plain_read(os.O_DIRECT)),
        case("plain direct, checked", lambda: bench.plain_read(os.O_DIRECT, checked=True)),
        case("kvtier direct, cold", lambda: bench.read("direct")),
        case("kvtier direct, cold, unverified", lambda: bench.read_unverified("direct")),
        case("kvtier auto, cold", lambda: bench.read("auto")),
        case("kvtier buffered, cold", lambda: bench.read("buffered")),
        *fio_case("fio direct", bench, bench.drop, "--rw=read", "--direct=1"),
    ]
    return cases, _base(cases, "fio direct", "plain direct"), GOALS_COLD


def warm_cases(bench: Bench) -> Group:
    """Reads of what the page cache holds."""

    def case(name: str, call: Callable[[], object]) -> Case:
        return Case(name=name, call=call, size=bench.files * SIZE, prepare=bench.warm)

    cases = [
        case("plain buffered", lambda: bench.plain_read(0)),
        *(
            case(
                f"plain buffered, checked each {size >> 10} KiB",
                partial(bench.plain_read, 0, block=size, checked=True),
            )
            for size in (MIB // 2, BLOCK)
        ),
        case("kvtier buffered, warm", lambda: bench.read("buffered")),
        case("kvtier buffered, warm, unverified", lambda: bench.read_unverified("buffered")),
        case("kvtier auto, warm", lambda: bench.read("auto")),
        *fio_case("fio buffered", bench, bench.warm, "--rw=read", "--invalidate=0"),
    ]
    return cases, _base(cases, "fio buffered", "plain buffered"), GOALS_WARM


def write_cases(bench: Bench) -> Group:
    """Writes that are published and synced, into new files and into those of removed entries."""
    written = ("--rw=write", "--direct=1")

    def case(name: str, call: Callable[[], object], prepare: Callable[[], object]) -> Case:
        return Case(name=name, call=call, size=bench.files * SIZE, prepare=prepare)

    cases = [
        case("plain new", lambda: bench.plain_write(os.O_CREAT), bench.remove_plain),
        case("plain overwrite", lambda: bench.plain_write(0), bench.prepare_overwrite),
        case("plain new, synced", lambda: bench.plain_write(os.O_CREAT, synced=True), bench.remove_plain),
        case("plain overwrite, synced", lambda: bench.plain_write(0, synced=True), bench.prepare_overwrite),
        case("kvtier new, synced", lambda: bench.write("new"), bench.remove_plain),
        case("kvtier recycled, synced", lambda: bench.turn_over("direct"), bench.prepare_turn_over),
        *fio_case("fio new", bench, bench.remove_plain, *written, "--create_on_open=1", new=True),
        *fio_case("fio overwrite", bench, bench.prepare_overwrite, *written, "--overwrite=1", new=True),
    ]
    return cases, _base(cases, "fio new", "plain new"), GOALS_WRITE


def main(arguments: list[str] | None = None) -> None:
    """Run, print, and write `results/disk.json`, or `results/disk_<group>.json` for one group alone."""
    flags = parser(__doc__, rounds=7)
    flags.add_argument("--gib", type=float, default=4.0, help="GiB per case and round")
    flags.add_argument("--folder", default=None, help="where to work; the drive under it is what is measured")
    flags.add_argument("--only", default="cold,warm,write", help="which groups to run")
    options = flags.parse_args(arguments)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=options.folder))
    bench = Bench(folder, files=max(AT_ONCE, int(options.gib * 1024) // 32))
    groups = {"cold": cold_cases, "warm": warm_cases, "write": write_cases}
    figures = []
    try:
        bench.fill()
        for name in options.only.split(","):
            cases, base, goals = groups[name](bench)
            more = measure(cases, base=base, rounds=options.rounds, goals=goals)
            show(more)
            figures += more
        modes = {mode: dict(backend.figures()) for mode, backend in bench.backends.items()}
    finally:
        with suppress(Exception):
            bench.close()
        shutil.rmtree(folder, ignore_errors=True)
    if not options.no_save:
        save(
            "disk" if "," in options.only else f"disk_{options.only}",
            figures,
            flags=vars(options),
            extra={"backends": modes},
        )


if __name__ == "__main__":
    main()
