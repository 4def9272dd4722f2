"""Every system call of a run fails once: entries are old, new or missing, and the next open finds all in order."""

import errno
import fcntl
import os
import tempfile
import threading
from pathlib import Path

import pytest

from kvtier.backends.base import Read, Write, Written
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.errors import BackendError, ConfigError
from kvtier.testing.context import lend_context

CALLS = "chmod fchmod fstat fstatvfs fsync ftruncate link mkdir open pread preadv pwrite pwritev read rename rmdir"
CALLS += " scandir stat unlink utime write"
CREATING = {"open", "mkdir", "write", "pwrite", "pwritev", "link", "rename"}
LARGE = 1 << 20  # recyclable
STEP = int(os.environ.get("KVTIER_SWEEP_STEP", "7"))  # `make kill` asks for every call

VALUES = {
    "a": [b"A" * LARGE, b"a" * LARGE],
    "b": [b"B" * LARGE],
    "c": [b"C" * LARGE],
    "d": [b"D" * 5000, b"d" * 300],
}


class Fault:
    """Fails the `number`-th of the watched calls, made from whichever thread."""

    def __init__(self, monkeypatch, kind):
        self.number, self.count, self.kind, self.struck = 0, 0, kind, ""
        self._mutex = threading.Lock()
        for name in CALLS.split():
            if kind == errno.EIO or name in CREATING:
                monkeypatch.setattr(f"os.{name}", self._failing(name, getattr(os, name)))
        if kind == errno.EIO:
            for name in ("flock", "fcntl"):
                monkeypatch.setattr(f"fcntl.{name}", self._failing(name, getattr(fcntl, name)))

    def _failing(self, name, real):
        def call(*args, **kwargs):
            with self._mutex:
                self.count += 1
                strikes = self.count == self.number
            if not strikes:
                return real(*args, **kwargs)
            if self.kind != "short" or name in {"write", "pwritev"}:
                self.struck = name
            if self.kind == "short":
                if name in {"write", "pwritev"}:
                    part = args[1][:1] if name == "write" else [args[1][0][: max(1, len(args[1][0]) // 3)]]
                    return real(args[0], part, *args[2:])
                return real(*args, **kwargs)
            raise OSError(self.kind, os.strerror(self.kind))

        return call

    def arm(self, number):
        self.number, self.count, self.struck = number, 0, ""

    def disarm(self):
        self.number = 0


async def attempt(call):
    """Return the single answer; the backend's own errors are answers too."""
    try:
        (answer,) = await call
    except BackendError as exc:
        return exc
    return answer


async def run(backend, context):
    """Do everything once; return what each entry may hold now."""
    legal = {name: {None} for name in VALUES}
    try:
        await backend.open(context)
        for name, values in [("a", 0), ("b", 0), ("d", 0), ("a", 1), ("d", 1)]:
            value = VALUES[name][values]
            answer = await attempt(backend.write_many([Write(name, [memoryview(value)])]))
            legal[name] = {value} if isinstance(answer, Written) else legal[name] | {value}
        answer = await attempt(backend.delete_many(["b"]))
        legal["b"] = {None} if answer is True else legal["b"] | {None}
        value = VALUES["c"][0]
        answer = await attempt(backend.write_many([Write("c", [memoryview(value)], if_absent=True)]))
        legal["c"] = {value} if isinstance(answer, Written) and answer.stored else {None, value}
        await attempt(_wrapped(backend.set_expiry_many([("c", 4e9)])))
        await attempt(_wrapped(backend.append_journal(b"record")))
        for name in VALUES:
            found = await read(backend, name)
            assert isinstance(found, BackendError) or found is None or found in legal[name], name
    except (BackendError, ConfigError):
        pass
    await backend.aclose()
    return legal


async def _wrapped(call):
    await call
    return [None]


async def read(backend, name):
    into = bytearray(LARGE)
    answer = await attempt(backend.read_many([Read(name, [memoryview(into)])]))
    return bytes(into[:answer]) if isinstance(answer, int) else answer


def leftovers(root):
    return sorted(path.name for path in root.glob("owners/*/*") if path.name != "lock")


@pytest.fixture
def fast_path(tmp_path):
    """A directory in memory where there is one: a sweep syncs thousands of times."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.mark.parametrize("kind", [errno.EIO, errno.ENOSPC, errno.EMFILE, "short"])
async def test_every_call_may_fail_once(fast_path, monkeypatch, kind):
    fault, struck, number = Fault(monkeypatch, kind), set(), 0
    while True:
        number += STEP if number else 1
        root = fast_path / f"root{number}"
        async with lend_context(arena_bytes=4096) as context:
            fault.arm(number)
            legal = await run(LocalDiskBackend(path=root, fsync=True, min_free=1), context)
            fault.disarm()
            if not fault.struck and fault.count < number:
                break
            struck.add(fault.struck)
            again = LocalDiskBackend(path=root)
            await again.open(context)
            assert leftovers(root) == [], f"call {number}, {fault.struck}"
            for name in VALUES:
                assert await read(again, name) in legal[name], f"{name} after call {number}, {fault.struck}"
            sizes = {stat.name: stat.size async for page in again.scan() for stat in page}
            with again._opened.ledger.locked() as books:
                assert books.total() == sum(sizes.values()), f"call {number}, {fault.struck}"
            await again.aclose()
        remove(root)
    assert number > (150 if kind == errno.EIO else 30)
    assert struck - {""}, "nothing ever failed"


def remove(root: Path):
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
