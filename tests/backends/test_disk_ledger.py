"""What a directory holds is counted once for all its users, too high at worst, and put right by a listing."""

import asyncio
import errno
import os
import random
from contextlib import suppress

import pytest

from kvtier.backends import disk_medium
from kvtier.backends.base import Write, Written
from kvtier.backends.disk_layout import shard_of
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.errors import CapacityError
from kvtier.testing.context import lend_context
from kvtier.testing.subject import Subject, value_of

KIB = 1 << 10


def counted(backend):
    with backend._opened.ledger.locked() as books:
        return books.total()


def there(root):
    return sum(path.stat().st_size for path in [*root.glob("entries/*/*/*"), *root.glob("owners/*/*.spare")])


async def write(backend, name, size):
    (answer,) = await backend.write_many([Write(name, [memoryview(value_of(name, size))])])
    return answer


@pytest.fixture
async def small():
    """A context whose tier may hold 64 KiB."""
    async with lend_context(capacity=64 * KIB) as context:
        yield context


@pytest.fixture
async def opened(root, small):
    backends = []

    async def make(**options):
        backend = LocalDiskBackend(path=root, **options)
        await backend.open(small)
        backends.append(backend)
        return backend

    yield make
    for backend in backends:
        await backend.aclose()


async def test_counts_follow_every_change(opened, root):
    backend = await opened()
    assert counted(backend) == 0
    for name, size in (("a", 1000), ("b", 5000), ("a", 30_000), ("a", 7)):
        assert isinstance(await write(backend, name, size), Written)
        assert counted(backend) == there(root)
    (answer,) = await backend.write_many([Write("b", [memoryview(b"x")], if_absent=True)])
    assert answer == Written(5000, stored=False)
    assert counted(backend) == there(root) == 5007
    assert await backend.delete_many(["a", "b", "never"]) == [True, True, False]
    assert counted(backend) == there(root) == 0


async def test_two_on_one_directory_stay_below_the_cap_together(opened, root):
    one, other = await opened(), await opened()
    answers = await asyncio.gather(*(write(one if i % 2 else other, f"n{i}", 4 * KIB) for i in range(40)))
    refused = [answer for answer in answers if isinstance(answer, CapacityError)]
    assert len(refused) == 40 - 16
    assert all(answer.need > 0 for answer in refused)
    assert counted(one) == counted(other) == there(root) == 64 * KIB
    assert isinstance(await write(one, "n-more", 1), CapacityError)
    stored = [f"n{i}" for i, answer in enumerate(answers) if isinstance(answer, Written)]
    await other.delete_many(stored[:1])
    assert isinstance(await write(one, "n-more", 4 * KIB), Written)
    assert list(root.glob("owners/*/*.tmp")) == []


async def test_replacing_needs_no_room_of_its_own(opened):
    backend = await opened()
    for _ in range(3):
        assert isinstance(await write(backend, "entry", 64 * KIB), Written)
    (answer,) = await backend.write_many([Write("entry", [memoryview(bytes(65 * KIB))])])
    assert isinstance(answer, CapacityError)
    assert answer.need == KIB
    assert await Subject(backend).get("entry", 64 * KIB) == value_of("entry", 64 * KIB)


async def test_a_lowered_cap_says_how_much_is_too_much(opened, root):
    backend = await opened()
    await write(backend, "entry", 60 * KIB)
    async with lend_context(capacity=16 * KIB) as smaller:
        again = LocalDiskBackend(path=root)
        await again.open(smaller)
        answer = await write(again, "other", 4 * KIB)
        assert isinstance(answer, CapacityError)
        assert answer.need == (60 + 4 - 16) * KIB
        await again.aclose()


async def test_spares_are_part_of_what_there_is(root):
    """A directory that is full stays full while its files go from entry to entry, and never grows beyond."""
    size, most = 1 << 20, 3 << 20
    async with lend_context(capacity=most) as context:
        backend = LocalDiskBackend(path=root)
        await backend.open(context)
        for i in range(3):
            assert isinstance(await write(backend, f"n{i}", size), Written)
        for i in range(3, 9):
            assert isinstance(await write(backend, f"n{i}", size), CapacityError)
            await backend.delete_many([f"n{i - 3}"])
            assert counted(backend) == there(root) == most
            assert isinstance(await write(backend, f"n{i}", size), Written)
            assert counted(backend) == there(root) == most
        assert backend.figures()["recycled"] == 6
        await backend.delete_many(["n8"])
        assert isinstance(await write(backend, "other", size - 1), Written)  # the spare has to go for it
        assert counted(backend) == there(root) == most - 1
        await backend.aclose()
    async with lend_context(capacity=most) as context:
        backend = LocalDiskBackend(path=root)
        await backend.open(context)
        assert counted(backend) == there(root)
        await backend.aclose()


async def test_files_of_others_are_neither_counted_nor_touched(opened, root, entry_path):
    backend = await opened()
    await write(backend, "entry", 1000)
    leaf = entry_path("entry").parent
    for foreign in (root / "notes", leaf / "UPPER", leaf / ".hidden", leaf / "elsewhere-0"):
        foreign.write_bytes(b"x" * 100_000)
    assert shard_of("elsewhere-0") != shard_of("entry")
    with (leaf / "SPARSE").open("wb") as sparse:
        sparse.truncate(1 << 40)
    os.mkfifo(leaf / "pipe")
    await Subject(backend).listing()
    assert counted(backend) == 1000
    assert isinstance(await write(backend, "more", 60 * KIB), Written)
    assert (root / "notes").stat().st_size == 100_000


async def test_what_vanishes_behind_our_back_is_missed_in_time(opened, root):
    """By a removal, by a read, or by nothing but a listing; never is the tier full of what is not there."""
    backend = await opened()
    disk = Subject(backend)

    async def fill_and_lose():
        for i in range(16):
            assert isinstance(await write(backend, f"n{i}", 4 * KIB), Written)
        for path in root.glob("entries/*/*/*"):
            path.unlink()

    await fill_and_lose()
    assert await backend.delete_many([f"n{i}" for i in range(16)]) == [False] * 16
    await fill_and_lose()
    for i in range(16):
        assert await disk.get(f"n{i}", 4 * KIB) is None
    await fill_and_lose()
    assert await disk.listing() == []
    assert counted(backend) == 0


async def test_a_process_that_dies_while_publishing_has_counted_too_much(opened, root, monkeypatch):
    backend = await opened()
    await write(backend, "entry", 10_000)

    class Died(BaseException):
        pass

    pwrite, writes = os.pwrite, []

    def die_at(number):
        def counting(*args):
            writes.append(args)
            if len(writes) > number:
                raise Died
            return pwrite(*args)

        return counting

    for number in range(4):
        writes.clear()
        with monkeypatch.context() as patched:
            patched.setattr("os.pwrite", die_at(number))
            with suppress(Died):
                await write(backend, "entry", 5_000 + number)
        assert counted(backend) >= there(root), f"after {number} steps"
        await Subject(backend).listing()
        assert counted(backend) == there(root)


@pytest.mark.parametrize("damage", ["removed", "emptied", "foreign", "link", "cut"])
async def test_a_ledger_that_is_damaged_is_made_anew(opened, root, tmp_path, damage):
    backend = await opened()
    await write(backend, "entry", 1000)
    ledger = root / "ledger"
    if damage == "emptied":
        ledger.write_bytes(b"")
    elif damage == "cut":
        os.truncate(ledger, 5000)
    else:
        ledger.unlink()
    if damage == "foreign":
        ledger.write_bytes(b"something else" * 10_000)
    elif damage == "link":
        (tmp_path / "outside").write_bytes(b"precious")
        ledger.symlink_to(tmp_path / "outside")
    again = await opened()
    assert isinstance(await write(again, "other", 500), Written)
    await Subject(again).listing()
    assert counted(again) == 1500
    if damage == "link":
        assert (tmp_path / "outside").read_bytes() == b"precious"


async def test_listings_and_changes_at_once_leave_the_right_count(opened, root):
    one, other = await opened(), await opened()
    choose = random.Random(3)

    async def change(backend):
        for i in range(150):
            name = f"n{choose.randrange(30)}"
            await backend.delete_many([name]) if i % 3 == 0 else await write(backend, name, choose.randrange(3000))

    async def list_often(backend):
        for _ in range(4):
            await Subject(backend).listing()

    await asyncio.gather(change(one), change(other), list_often(one), list_often(other))
    assert counted(one) == there(root)


async def test_no_drift_over_many_operations_and_reopens(root, small):
    """5,000 of them, of all kinds, on a directory that is full most of the time."""
    choose, alive = random.Random(11), {}
    for _ in range(10):
        backend = LocalDiskBackend(path=root)
        await backend.open(small)
        for _ in range(50):
            batch = [(f"n{choose.randrange(60)}", choose.randrange(4000)) for _ in range(10)]
            if choose.random() < 0.3:
                names = [name for name, _ in batch]
                await backend.delete_many(names)
                for name in names:
                    alive.pop(name, None)
                continue
            answers = await asyncio.gather(*(write(backend, name, size) for name, size in dict(batch).items()))
            for (name, size), answer in zip(dict(batch).items(), answers, strict=True):
                if isinstance(answer, Written):
                    alive[name] = size
        assert counted(backend) == there(root) == sum(alive.values()) <= 64 * KIB
        await backend.aclose()
    backend = LocalDiskBackend(path=root)
    await backend.open(small)
    await backend.delete_many(list(alive))
    assert counted(backend) == 0
    await backend.aclose()


async def test_without_locks_the_directory_is_used_all_the_same(opened, root, monkeypatch):
    backend = await opened()
    ledger = backend._opened.ledger

    def unsupported(*args):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("kvtier.backends.disk_ledger.fcntl.flock", unsupported)
    assert isinstance(await write(backend, "entry", 50_000), Written)
    assert isinstance(await write(backend, "other", 50_000), Written)  # the tier's own books are all there is
    assert not ledger.works
    assert await backend.delete_many(["entry"]) == [True]
    monkeypatch.undo()


@pytest.mark.parametrize("min_free", [None, 1000 * KIB])
async def test_the_volume_keeps_its_free_space(opened, monkeypatch, min_free):
    backend = await opened(min_free=min_free)
    real, free = os.fstatvfs, 1_000_000

    def volume(fd):
        fields = list(real(fd))
        fields[1], fields[2], fields[4] = 1, 50_000_000, free  # of a volume of 50 MB, so many bytes are free
        return os.statvfs_result(fields)

    monkeypatch.setattr(disk_medium.os, "fstatvfs", volume)
    floor = 500_000 if min_free is None else min_free
    free = floor + 10_000
    assert isinstance(await write(backend, "entry", 10_000), Written)
    answer = await write(backend, "other", 10_001)
    assert isinstance(answer, CapacityError)
    assert answer.need == 1
    free += 1
    assert isinstance(await write(backend, "other", 10_001), Written)


@pytest.mark.parametrize("call", ["open", "pwritev", "rename", "mkdir"])
async def test_a_full_volume_says_how_much_has_to_go(opened, monkeypatch, call):
    backend = await opened()

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"os.{call}", fail)
    answer = await write(backend, "entry", 5000)
    assert isinstance(answer, CapacityError)
    assert answer.need == 5000
    assert isinstance(answer.__cause__, OSError)
