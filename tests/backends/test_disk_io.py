"""Direct transfers where they are possible, buffered ones where not; both whole, both told apart."""

import errno
import fcntl
import mmap
import os
import random

import pytest

from kvtier.backends import disk_io, disk_portable
from kvtier.backends.base import Read, Write
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.backends.page_cache import is_cached
from kvtier.errors import RacedError
from kvtier.testing.context import lend_context

MIB = 1 << 20


class Notes:
    def __init__(self):
        self.events = []

    def on_event(self, event):
        self.events.append(event)


def memory(content):
    """Page-aligned memory, as an arena's slots are."""
    block = mmap.mmap(-1, max(len(content), 1))
    block[: len(content)] = content
    return memoryview(block)


def noise(size, seed=1):
    return random.Random(seed).randbytes(size)


async def put(backend, name, view):
    (answer,) = await backend.write_many([Write(name, [view])])
    assert getattr(answer, "stored", False), answer


async def get(backend, name, size, **options):
    into = memory(bytes(size))
    (answer,) = await backend.read_many([Read(name, [into], **options)])
    return answer if not isinstance(answer, int) else bytes(into[:answer])


@pytest.fixture
def notes():
    return Notes()


@pytest.fixture
async def lent(notes):
    async with lend_context(observer=notes) as context:
        yield context


@pytest.fixture
def opened(root, lent):
    """Open a backend on `root`; the test closes it."""

    async def make(**options):
        backend = LocalDiskBackend(path=root, **options)
        await backend.open(lent)
        return backend

    return make


@pytest.fixture
async def direct(opened):
    backend = await opened(io="direct")
    if backend.figures()["io_refused"]:
        pytest.skip("the file system of the temporary directory takes no direct I/O")
    yield backend
    await backend.aclose()


def counts(backend):
    return {name: count for name, count in backend.figures().items() if name.endswith(("reads", "writes")) and count}


async def test_aligned_entries_go_past_the_page_cache(direct, entry_path):
    value = noise(2 * MIB)
    await put(direct, "entry", memory(value))
    fd = os.open(entry_path("entry"), os.O_RDONLY)
    assert not is_cached(fd, 0, 4096)
    os.close(fd)
    assert await get(direct, "entry", 2 * MIB) == value
    assert await get(direct, "entry", MIB, offset=4096, partial=True) == value[4096 : 4096 + MIB]
    assert counts(direct) == {"direct_writes": 1, "direct_reads": 2}


@pytest.mark.parametrize(("size", "shift"), [(4097, 0), (4096, 1), (10_000, 7), (3, 0)])
async def test_what_is_not_aligned_goes_through_it(direct, size, shift):
    value = noise(size)
    await put(direct, "entry", memory(bytes(shift) + value)[shift:])
    assert await get(direct, "entry", size + 5) == value
    assert await get(direct, "entry", size, offset=1, partial=True) == value[1:]
    assert counts(direct)["buffered_writes"] == 1
    assert counts(direct)["buffered_reads"] == (1 if size == 4096 else 2)  # memory and length of one read are aligned


async def test_auto_is_direct_from_a_mebibyte_on_unless_cached(opened, entry_path):
    backend = await opened(io="auto")
    small, large = noise(MIB - 4096), noise(2 * MIB)
    await put(backend, "small", memory(small))
    await put(backend, "large", memory(large))
    assert await get(backend, "small", len(small)) == small
    if backend.figures()["io_refused"]:
        pytest.skip("no direct I/O here")
    assert await get(backend, "large", len(large)) == large
    assert counts(backend) == {"buffered_writes": 1, "direct_writes": 1, "buffered_reads": 1, "direct_reads": 1}
    entry_path("large").read_bytes()
    fd = os.open(entry_path("large"), os.O_RDONLY)
    known = is_cached(fd, 0, 2 * MIB)
    os.close(fd)
    assert await get(backend, "large", len(large)) == large
    assert counts(backend)["cached_reads" if known else "direct_reads"] == (1 if known else 2)
    await backend.aclose()


async def test_buffered_never_is(opened):
    backend = await opened(io="buffered")
    await put(backend, "entry", memory(noise(MIB)))
    assert await get(backend, "entry", MIB) == noise(MIB)
    assert counts(backend) == {"buffered_writes": 1, "buffered_reads": 1}
    assert backend.figures()["io_refused"] == ""
    await backend.aclose()


def refuse_direct_transfers(monkeypatch, call):
    real = getattr(os, call)

    def refuse(fd, views, *rest):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, views, *rest)

    monkeypatch.setattr(f"os.{call}", refuse)


@pytest.mark.parametrize("call", ["fcntl", "pwritev", "preadv"])
async def test_file_system_that_refuses_at_open_is_used_buffered(opened, notes, monkeypatch, call):
    if call == "fcntl":

        def refuse(fd, command, *rest):
            if command == fcntl.F_SETFL:
                raise OSError(errno.EINVAL, "Invalid argument")
            return 0

        monkeypatch.setattr(disk_io.fcntl, "fcntl", refuse)
    else:
        refuse_direct_transfers(monkeypatch, call)
    backend = await opened(io="direct")
    await put(backend, "entry", memory(noise(MIB)))
    assert await get(backend, "entry", MIB) == noise(MIB)
    assert counts(backend) == {"buffered_writes": 1, "buffered_reads": 1}
    assert backend.figures()["io"] == "buffered"
    assert "Invalid argument" in backend.figures()["io_refused"]
    assert [event.kind for event in notes.events] == ["buffered"]
    await backend.aclose()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
async def test_file_system_that_refuses_later_is_used_buffered_from_then_on(direct, notes, monkeypatch, call):
    await put(direct, "before", memory(noise(MIB)))
    refuse_direct_transfers(monkeypatch, call)
    for seed in range(3):
        await put(direct, "entry", memory(noise(MIB, seed)))
        assert await get(direct, "entry", MIB) == noise(MIB, seed)
    assert await get(direct, "before", MIB) == noise(MIB)
    assert [event.kind for event in notes.events] == ["buffered"]
    assert direct.figures()["io"] == "buffered"


async def test_other_failures_are_no_refusal(direct, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.pwritev", fail)
    (answer,) = await direct.write_many([Write("entry", [memory(noise(MIB))])])
    assert "Input/output error" in str(answer)
    assert direct.figures()["io"] == "direct"


@pytest.mark.parametrize("step", [512, 4096, 100_000, 1000])
async def test_short_direct_transfers_are_continued(direct, monkeypatch, step):
    value, write, read = noise(MIB // 2), os.pwritev, os.preadv
    monkeypatch.setattr("os.pwritev", lambda fd, views, offset: write(fd, [views[0][:step]], offset))
    if step % 512:  # the kernel would refuse: what came of a direct call is cut short instead
        monkeypatch.setattr("os.pwritev", lambda fd, views, offset: min(step, write(fd, views, offset)))
    await put(direct, "entry", memory(value))
    monkeypatch.undo()
    assert await get(direct, "entry", len(value)) == value
    monkeypatch.setattr("os.preadv", lambda fd, views, offset: min(step, read(fd, views, offset)))
    assert await get(direct, "entry", len(value)) == value


@pytest.mark.parametrize("io", ["direct", "buffered"])
async def test_a_read_is_watched_piece_by_piece(opened, io):
    backend = await opened(io=io)
    value = noise(9 * MIB)
    await put(backend, "entry", memory(value))
    into, seen = memory(bytes(9 * MIB)), []

    def watch(count):
        seen.append((count, bytes(into[max(0, count - 16) : count]) == value[max(0, count - 16) : count]))
        return True

    assert await backend.read_many([Read("entry", [into], watch=watch)]) == [9 * MIB]
    ends = [count for count, _ in seen]
    assert ends == sorted(ends)
    assert ends[0] == 0
    assert ends[-1] == 9 * MIB
    assert len(ends) > 3
    assert all(right for _, right in seen)
    await backend.aclose()


async def test_wrong_bytes_of_the_right_file_are_answered_as_they_are(disk):
    await disk.put("entry", b"x" * 5000)
    calls = []
    reads = [Read("entry", [memoryview(bytearray(5000))], watch=lambda count: calls.append(count) or not count)]
    assert await disk.backend.read_many(reads) == [5000]
    assert calls == [0, 5000]


async def test_wrong_bytes_of_another_file_are_read_again(disk, entry_path):
    """A file that was replaced while it was read: the reader looks for the new one, once."""
    await disk.put("entry", b"x" * 5000)
    into, calls = bytearray(5000), []

    def replace_once(count):
        calls.append(count)
        if count and len(calls) == 2:
            spare = entry_path("entry").with_name("other")
            spare.write_bytes(b"y" * 5000)
            spare.rename(entry_path("entry"))
            return False
        return True

    assert await disk.backend.read_many([Read("entry", [memoryview(into)], watch=replace_once)]) == [5000]
    assert calls == [0, 5000, 0, 5000]
    assert into == b"y" * 5000

    def replace_always(count):
        if count:
            spare = entry_path("entry").with_name("other")
            spare.write_bytes(b"z" * 5000)
            spare.rename(entry_path("entry"))
        return not count

    (answer,) = await disk.backend.read_many([Read("entry", [memoryview(into)], watch=replace_always)])
    assert isinstance(answer, RacedError)


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
async def test_a_platform_without_vectors_moves_the_same_bytes(opened, monkeypatch, io):
    monkeypatch.setattr(disk_portable, "HAS_VECTORS", False)
    for call in ("preadv", "pwritev"):
        monkeypatch.delattr(f"os.{call}")
    backend = await opened(io=io)
    for name, size, pieces in (("large", 2 * MIB, 1), ("small", 5_000, 3), ("empty", 0, 1), ("many", 100_000, 7)):
        value = noise(size)
        parts = [memory(value[size * i // pieces : size * (i + 1) // pieces]) for i in range(pieces)]
        views = [part[: size * (i + 1) // pieces - size * i // pieces] for i, part in enumerate(parts)]
        (answer,) = await backend.write_many([Write(name, views)])
        assert answer.size == size
        assert await get(backend, name, size + 1) == value
        assert await get(backend, name, 1_000, offset=300, partial=True) == value[300:1_300]
    await backend.aclose()
