"""Case 3: stored bytes that changed without changing length (or by a few at the end) are misses, never values."""

import os

import pytest
import torch

import kvtier
from kvtier.store import open_chunks
from kvtier.testing.kv_values import same_bits

CODECS = ["raw", "zstd"]
SPREAD = 32


def value_of(number):
    """A blob of some kind and size that compresses somewhat."""
    chosen = torch.Generator().manual_seed(number)
    numbers = torch.randint(0, 9, (number * 150,), dtype=torch.int16, generator=chosen)
    match number % 4:
        case 0:
            return numbers
        case 1:
            return {"k": numbers.view(3, -1).to(torch.float32), "v": numbers.to(torch.bfloat16)}
        case 2:
            return bytes(numbers.to(torch.uint8).tolist())
        case _:
            return {"codes": numbers.to(torch.uint8), "scales": numbers[:7].to(torch.float16)}


VALUES = {f"entry/{number}": value_of(number) for number in range(20)}


def same(found, put):
    if isinstance(put, bytes):
        return type(found) is bytes and found == put
    if isinstance(put, torch.Tensor):
        return isinstance(found, torch.Tensor) and same_bits(found, put)
    return isinstance(found, dict) and list(found) == list(put) and all(same_bits(found[n], put[n]) for n in put)


class Disk:
    """A disk tier's directory, and the entries' files as they were written."""

    def __init__(self, path, codec):
        self.path = path
        codecs = [codec] if codec != "raw" else []
        tier = {"backend": "local-disk", "name": "disk", "path": str(path), "capacity": "1GiB", "codecs": codecs}
        self.config = {"deadline_seconds": 60, "memory": {"staging_bytes": "2MiB"}, "tiers": [tier]}
        self.files = {}

    def open(self):
        return open_chunks(self.config)

    def found(self):
        return {path for path in (self.path / "entries").rglob("*") if path.is_file()}

    async def fill(self):
        """Put every value, one after the other, and learn which file each is in."""
        async with self.open() as store:
            for key, value in VALUES.items():
                before = self.found()
                await store.put(key, value, wait="durable")
                (path,) = self.found() - before
                self.files[key] = path
        self.stored = {key: path.read_bytes() for key, path in self.files.items()}

    def write(self, key, content):
        """Replace what is in the key's file. The modification time says when an entry expires: here never."""
        self.files[key].parent.mkdir(parents=True, exist_ok=True)
        self.files[key].write_bytes(content)
        os.utime(self.files[key], ns=(0, 0))


@pytest.fixture(params=CODECS)
async def disk(request, tmp_path):
    disk = Disk(tmp_path, request.param)
    await disk.fill()
    return disk


def flipped(content, position):
    damaged = bytearray(content)
    damaged[position] ^= 1 << (position % 8)
    return bytes(damaged)


def spread(size, step):
    """The `step`-th of 64 offsets: both ends, the first 200 bytes closely, and evenly between."""
    if step < 16:
        return step * 13 % size
    return (size - 1) * (step - 16) // (SPREAD - 17)


async def assert_all_missing_and_counted_once(store, keys):
    for _ in range(2):  # the second time there is nothing to try again
        assert [value for value in await store.get_many(keys) if value is not None] == []
    assert store.stats().tiers["disk"].corrupt == len(keys)
    assert await store.exists_many(keys) == [False] * len(keys)


async def test_every_flipped_bit_is_a_miss_that_is_counted_once(disk):
    for step in range(SPREAD):
        for key, content in disk.stored.items():
            disk.write(key, flipped(content, spread(len(content), step)))
        async with disk.open() as store:
            await assert_all_missing_and_counted_once(store, list(VALUES))
            tier = store.stats().tiers["disk"]
            assert (tier.hits, tier.errors, tier.entries) == (0, 0, 0), f"step {step}: {tier.counters}"
        assert disk.found() == set(), "a bad entry stayed on the medium"


async def test_the_undamaged_files_are_read(disk):
    """What the other tests damage can be read in the same way if it is not."""
    for key, content in disk.stored.items():
        disk.write(key, content)
    async with disk.open() as store:
        found = await store.get_many(list(VALUES))
        assert all(same(value, VALUES[key]) for key, value in zip(VALUES, found, strict=True))
        assert store.stats().tiers["disk"].corrupt == 0


async def test_swapped_files_are_misses(disk):
    """Each file is whole and its checksums are right; it only is another key's."""
    keys = list(VALUES)
    for one, other in zip(keys[::2], keys[1::2], strict=True):
        disk.write(one, disk.stored[other])
        disk.write(other, disk.stored[one])
    async with disk.open() as store:
        await assert_all_missing_and_counted_once(store, keys)


async def test_swapped_files_show_in_no_list(disk):
    """Without the journal, which key an entry has is known from the entry alone."""
    for log in (disk.path / "journal").iterdir():
        log.unlink()
    one, other, *rest = VALUES
    disk.write(one, disk.stored[other])
    disk.write(other, disk.stored[one])
    async with disk.open() as store:
        assert sorted([entry.key async for entry in store.list()]) == sorted(rest)
        assert store.stats().tiers["disk"].corrupt == 2
        await assert_all_missing_and_counted_once(store, [one, other])


@pytest.mark.parametrize("junk", [b"\0\0\0\0", b"junk"])
async def test_bytes_behind_the_end_make_a_miss(disk, junk):
    for key, content in disk.stored.items():
        disk.write(key, content + junk)
    async with disk.open() as store:
        await assert_all_missing_and_counted_once(store, list(VALUES))


async def test_putting_anew_heals(disk):
    for key, content in disk.stored.items():
        disk.write(key, flipped(content, len(content) // 2))
    async with disk.open() as store:
        await assert_all_missing_and_counted_once(store, list(VALUES))
        for key, value in VALUES.items():
            await store.put(key, value, wait="durable")
    async with disk.open() as store:
        found = await store.get_many(list(VALUES))
        assert all(same(value, VALUES[key]) for key, value in zip(VALUES, found, strict=True))
        assert store.stats().tiers["disk"].corrupt == 0


async def test_an_entry_that_rots_while_the_store_is_open(disk):
    key = list(VALUES)[9]
    async with disk.open() as store:
        assert same(await store.get(key), VALUES[key])
        disk.write(key, flipped(disk.stored[key], 5000))
        assert await store.get(key) is None
        assert await store.get(key) is None
        assert store.stats().tiers["disk"].corrupt == 1


@pytest.mark.parametrize("codec", CODECS)
async def test_a_rotten_chunk_ends_the_prefix_before_it(tmp_path, codec):
    layout = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    disk = Disk(tmp_path, codec)
    config = {**disk.config, "chunk_tokens": 16}
    tokens = list(range(16 * 5))
    kv = {name: torch.randn(2, 16 * 5, 2, 8).to(torch.bfloat16) for name in "kv"}
    made = {"namespace": kvtier.Namespace(model="m", revision="1"), "layout": layout}
    order = []
    async with kvtier.open(config, **made) as store:
        for stop in range(16, 16 * 5 + 1, 16):
            before = disk.found()
            await store.put(tokens[:stop], {name: part[:, :stop] for name, part in kv.items()}, wait="durable")
            order += disk.found() - before
    assert len(order) == 5
    content = order[3].read_bytes()
    order[3].write_bytes(flipped(content, len(content) - 4096))
    os.utime(order[3], ns=(0, 0))
    async with kvtier.open(config, **made) as store:
        hit = await store.get(tokens)
        assert hit.num_tokens == 48
        assert all(same_bits(hit.kv[name], kv[name][:, :48]) for name in "kv")
        assert await store.exists(tokens) == 48
        assert store.stats().tiers["disk"].corrupt == 1
        await store.put(tokens, kv, wait="durable")
        assert (await store.get(tokens)).num_tokens == 80
