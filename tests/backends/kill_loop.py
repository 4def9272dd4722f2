"""Children that write and are killed; run as a program of its own, by `test_local_disk_kill.py`.

    python kill_loop.py ROOT CYCLES SEED (published | in-place | early | flushed | unflushed)

Prints one JSON object: what was read after the kills, what was missing of it, and what was found unfinished. Half of
the names belong to one writer each, who tells the parent what it begins to do with them and what was answered as done:
so the parent knows what each of them may hold. `flushed` is a store, whose flush is the answer. The parent never starts
a thread, so that every child forks from a clean process.
"""

import asyncio
import dataclasses
import hashlib
import json
import mmap
import os
import random
import select
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

from kvtier.backends import local_disk
from kvtier.backends.base import Read, Stat, Write, Written
from kvtier.backends.disk_layout import ENTRIES, directory, shard_of, shard_path
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.store import open_chunks  # torch too: not once per child
from kvtier.testing.context import lend_context
from kvtier.testing.subject import Subject

SHARED = [f"n{i:02}" for i in range(26)]
OWN = [[f"own{writer}{task}{i:02}" for i in range(6)] for writer in range(2) for task in range(2)]
NAMES = [*SHARED, *(name for names in OWN for name in names)]
VERIFY_EVERY = 5
MOST_BYTES = 3 << 20
RECYCLED = 1 << 20


def size_of(name, version):
    """Most of a recyclable size, so that files go from entry to entry."""
    choose = random.Random(f"{name}{version}")
    return choose.choice([1, 101, 5_001, 60_001, 300_001, MOST_BYTES - 99, RECYCLED, RECYCLED, RECYCLED])


def value_of(name, version):
    """A value that says what it is, and of which any part is wrong in any other place or value."""
    head = f"{name}:{version}:".encode()
    block = hashlib.sha256(head).digest()
    size = size_of(name, version)
    body = b"".join((i ^ int.from_bytes(block[:4], "little")).to_bytes(4, "little") for i in range(2_000))
    return (head + body * (size // len(body) + 1))[: max(size, len(head))]


def is_whole(name, found):
    try:
        owner, version, _ = found.split(b":", 2)
        return owner.decode() == name and value_of(name, int(version)) == found
    except ValueError:
        return False


def write_in_place(medium, write):
    """The control: what a backend without a temporary file does."""
    name = write.name
    with medium.root.in_use() as top, directory(top, ENTRIES, *shard_path(shard_of(name)), create=True) as leaf:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=leaf)
        with os.fdopen(fd, "wb", buffering=0) as file:
            for view in write.views:
                file.write(view)
    return Written(write.size)


def write_early(medium, write):
    """Another control: what a backend does that answers before anything is published."""
    copy = dataclasses.replace(write, views=[memoryview(bytes(view)) for view in write.views])
    threading.Timer(0.005, published, [medium, copy]).start()
    return Written(write.size)


published = local_disk.write_entry


def aligned(value):
    """The value in memory that direct transfers take."""
    memory = mmap.mmap(-1, len(value))
    memory[:] = value
    return memoryview(memory)


async def write_for_ever(root, seed, writer, report):
    """Write and delete shared names and own ones; of the own ones tell what is begun, and what is done."""
    choose = random.Random(seed)
    async with lend_context(arena_bytes=4096) as context:
        backend = LocalDiskBackend(path=root)
        await backend.open(context)
        disk = Subject(backend)  # for deletes

        async def act(name, version):
            if version is None:
                await disk.delete(name)
            else:
                (answer,) = await backend.write_many([Write(name, [aligned(value_of(name, version))])])
                assert isinstance(answer, Written)

        async def one(own):
            while True:
                version = choose.randrange(1_000)
                if version % 4 == 0:
                    await act(choose.choice(SHARED), None)
                await act(choose.choice(SHARED), version)
                name, version = choose.choice(own), None if version % 5 == 0 else version
                report(f"begun {name} {version}")
                await act(name, version)
                report(f"done {name} {version}")
                await backend.append_journal(b"record")

        await asyncio.gather(*(one(own) for own in OWN[2 * writer : 2 * writer + 2]))


async def put_for_ever(root, seed, writer, report, *, flushed):
    """Put and delete own names in a store of memory and disk, and tell what is begun, and what was flushed."""
    choose = random.Random(seed)
    tiers = [{"backend": "pinned-cpu", "capacity": "32MiB"}, disk_tier(root)]
    async with open_chunks({"tiers": tiers}) as store:
        while True:
            names = choose.sample([name for names in OWN[2 * writer : 2 * writer + 2] for name in names], 3)
            versions = {name: choose.choice([None, *range(1, 1000, 250)]) for name in names}
            for name, version in versions.items():
                report(f"begun {name} {version}")
            await store.put_many({name: value_of(name, v) for name, v in versions.items() if v is not None})
            await store.delete_many([name for name, version in versions.items() if version is None])
            if not flushed or (await store.flush()).complete:
                for name, version in versions.items():
                    report(f"done {name} {version}")


def disk_tier(root):
    return {"backend": "local-disk", "path": str(root), "capacity": "1GiB"}


async def verify_store(root, may_hold):
    """Look for everything through a store that has the disk alone."""
    seen = {"read": 0, "lost": 0, "unfinished": 0}
    async with open_chunks({"tiers": [disk_tier(root)]}) as store:
        seen["unfinished"] = len(list(Path(root).glob("owners/*/*.tmp")))
        for name, versions in may_hold.items():
            got = await store.get(name)
            seen["read"] += got is not None
            held = None if got is None else bytes(got)
            seen["lost"] += held not in [v if v is None else value_of(name, v) for v in versions]
    return seen


class Expected:
    """What each own name may hold: what was done last, or anything begun since.

    A store forgets what a put replaces before the new value is below (`forgets`): nobody may get the old one any more.
    """

    def __init__(self, *, forgets):
        self.forgets = forgets
        self.may_hold = {name: {None} for names in OWN for name in names}
        self.done = 0

    def hear(self, told):
        for line in told.decode().split("\n")[:-1]:
            how, name, version = line.split()
            version = None if version == "None" else int(version)
            if how == "begun":
                self.may_hold[name].update({version, None} if self.forgets else {version})
            else:
                self.may_hold[name] = {version}
                self.done += 1


async def verify(root, may_hold):
    seen = {"read": 0, "torn": 0, "lost": 0, "recyclable": 0, "foreign": 0, "unfinished": 0, "owners": 0}
    async with lend_context(arena_bytes=4096) as context:
        backend = LocalDiskBackend(path=root)
        await backend.open(context)
        seen["unfinished"] = len(list(Path(root).glob("owners/*/*.tmp")))
        seen["owners"] = len(list(Path(root).glob("owners/*"))) - 1
        into = bytearray(MOST_BYTES + 100)
        for name in NAMES:
            (size,) = await backend.read_many([Read(name, [memoryview(into)])])
            if size is not None:
                seen["read"] += 1
                seen["torn"] += not is_whole(name, bytes(into[:size]))
                seen["recyclable"] += size == RECYCLED
            if name in may_hold:
                held = None if size is None else bytes(into[:size])
                seen["lost"] += held not in [v if v is None else value_of(name, v) for v in may_hold[name]]
        async for page in backend.scan():
            for stat in page:
                assert isinstance(stat, Stat)
                seen["foreign"] += stat.name not in NAMES
        with backend._opened.ledger.locked() as books:
            there = [*Path(root).glob("entries/*/*/*"), *Path(root).glob("owners/*/*.spare")]
            seen["miscounted"] = abs(books.total() - sum(path.stat().st_size for path in there))
        await backend.read_journals()
        await backend.replace_journals(b"compact")
        await backend.aclose()
    return seen


def in_child(work):
    """Fork; return the child's pid and what it reports through. It exits without unwinding."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        asyncio.run(work(lambda line: os.write(writer, f"{line}\n".encode())))
        os._exit(0)
    os.close(writer)
    return child, reader


def heard(reader):
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read()


async def report_on(look, root, may_hold, report):
    report(json.dumps(await look(root, may_hold)))


WORK = {
    "flushed": (partial(put_for_ever, flushed=True), verify_store, published),
    "unflushed": (partial(put_for_ever, flushed=False), verify_store, published),
    "published": (write_for_ever, verify, published),
    "in-place": (write_for_ever, verify, write_in_place),
    "early": (write_for_ever, verify, write_early),
}


def main():
    root, cycles, seed, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    write, look, local_disk.write_entry = WORK[how]
    moments, longest = random.Random(seed), 0.06 if look is verify else 0.5
    expected, total = Expected(forgets=look is verify_store), {}
    for cycle in range(1, cycles + 1):
        writers = [
            in_child(lambda report, i=i, cycle=cycle: write(root, f"{seed}-{cycle}-{i}", i, report)) for i in range(2)
        ]
        if cycle % 2:  # else they may be killed before they have opened the directory
            select.select([writers[0][1]], [], [], 20.0)
        for child, reader in writers:
            time.sleep(moments.uniform(0.001, longest))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            expected.hear(heard(reader))
        if cycle % VERIFY_EVERY == 0:
            child, reader = in_child(lambda report: report_on(look, root, expected.may_hold, report))
            seen = json.loads(heard(reader))
            assert os.waitpid(child, 0)[1] == 0
            for what, count in seen.items():
                total[what] = total.get(what, 0) + count
    print(json.dumps({**total, "done": expected.done}))


if __name__ == "__main__":
    main()
