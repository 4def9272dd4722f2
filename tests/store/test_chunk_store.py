"""ChunkStore: any blob under any key, through every shape of hierarchy."""

import asyncio
import contextlib
import itertools
import random

import pytest
import torch

from kvtier.errors import CapacityError, InvalidKeyError, InvalidValueError
from kvtier.testing.clock import FrozenClock
from kvtier.testing.kv_values import same_bits

SHAPES = ["memory", "memory-disk", "disk", "medium"]


@pytest.fixture(params=SHAPES)
def tiers(request, kit):
    return {
        "memory": [kit.memory()],
        "memory-disk": [kit.memory(), kit.disk()],
        "disk": [kit.disk()],
        "medium": [kit.medium()],
    }[request.param]


@pytest.fixture
async def store(kit, tiers, opened):
    return await opened(kit.open_chunks(*tiers))


BLOBS = {
    "tensor": torch.arange(12, dtype=torch.float32).view(3, 4),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty tensor": torch.empty(0, 4),
    "strided": torch.arange(24, dtype=torch.int16).view(4, 6).t()[::2],
    "mapping": {"k": torch.ones(2, 2, dtype=torch.bfloat16), "": torch.zeros(3, dtype=torch.bool)},
    "empty mapping": {},
    "bytes": b"\0\xff" * 5000,
    "no bytes": b"",
    "bytearray": bytearray(b"abc"),
    "memoryview": memoryview(bytearray(range(100)))[10:20],
}


def assert_same_blob(found, put):
    if isinstance(put, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert same_bits(found, put)
    elif isinstance(put, dict):
        assert isinstance(found, dict)
        assert list(found) == list(put)
        assert all(same_bits(found[name], tensor) for name, tensor in put.items())
    else:
        assert type(found) is bytes
        assert found == bytes(put)


@pytest.mark.parametrize("kind", sorted(BLOBS))
async def test_a_blob_comes_back_as_what_it_was(store, kit, kind):
    result = await store.put("key", BLOBS[kind])
    assert result.count("stored") + result.count("queued") == 1
    assert_same_blob(await store.get("key"), BLOBS[kind])
    await store.flush()
    assert_same_blob(await store.get("key"), BLOBS[kind])
    kit.assert_books_balance(store)


async def test_the_five_verbs(store):
    assert await store.get("a") is None
    assert await store.exists("a") is False
    assert await store.delete("a") is False
    await store.put("a", b"1")
    await store.put("b", b"2")
    assert await store.exists("a") is True
    assert await store.get("a") == b"1"
    assert sorted([entry.key async for entry in store.list()]) == ["a", "b"]
    assert await store.delete("a") is True
    assert await store.delete("a") is False
    assert await store.get("a") is None
    assert await store.exists("a") is False
    assert [entry.key async for entry in store.list("")] == ["b"]


async def test_the_batch_verbs(store):
    results = await store.put_many({"a": b"1", "b": torch.ones(2), "c": {"x": torch.zeros(1)}})
    assert list(results) == ["a", "b", "c"]
    found = await store.get_many(["c", "nothing", "a", "a"])
    assert found[1] is None
    assert found[2] == found[3] == b"1"
    assert_same_blob(found[0], {"x": torch.zeros(1)})
    assert list(await store.exists_many(["nothing", "b", "b"])) == [False, True, True]
    assert list(await store.delete_many(["b", "nothing", "a"])) == [True, False, True]
    assert await store.get_many([]) == []
    assert await store.put_many({}) == {}
    assert [entry.key async for entry in store.list()] == ["c"]


async def test_put_replaces(store, kit):
    for number in range(20):
        await store.put("key", kit.tensor(number, size=100 + 1000 * (number % 3)))
        if number % 4 == 0:
            await store.flush()
        assert_same_blob(await store.get("key"), kit.tensor(number, size=100 + 1000 * (number % 3)))
    await store.flush()
    assert_same_blob(await store.get("key"), kit.tensor(19, size=1100))
    assert all(tier.entries <= 1 for tier in store.stats().tiers.values())
    kit.assert_books_balance(store)


async def test_readers_beside_a_replacing_writer_see_whole_values_and_never_a_miss(store, kit):
    values = [kit.tensor(number, size=40_000) for number in range(8)]
    await store.put("key", values[0])
    ended = asyncio.Event()

    async def write():
        for number in range(60):
            await store.put("key", values[number % 8])
            if number % 7 == 0:
                await store.flush()
        ended.set()

    async def read():
        seen = 0
        while not ended.is_set():
            found = await store.get("key")
            assert found is not None, "a key that always had a value was a miss"
            assert any(same_bits(found, value) for value in values), "a mix of two values"
            seen += 1
            await asyncio.sleep(0)  # a get from memory need not wait for anything
        return seen

    seen = await asyncio.gather(read(), read(), write())
    assert seen[0] > 1
    kit.assert_books_balance(store)


async def test_a_batch_sees_the_new_value_of_a_key_replaced_while_it_looked_for_another(kit, opened):
    """The look-up of the unknown key takes a round trip; meanwhile the other one is put anew."""
    store = await opened(kit.open_chunks(kit.memory(), kit.medium()))
    await store.put("key", b"old")
    reading = asyncio.ensure_future(store.get_many(["key", "unknown"]))
    await asyncio.sleep(0)
    await store.put("key", b"new")
    assert (await reading)[0] in {b"old", b"new"}


async def test_a_blob_is_the_callers_again_once_put_returned(store, kit):
    source = kit.tensor(1)
    wanted = source.clone()
    await store.put("key", source)
    source.zero_()
    assert_same_blob(await store.get("key"), wanted)
    raw = bytearray(b"abc" * 1000)
    await store.put("raw", raw)
    raw[:] = bytes(len(raw))
    await store.flush()
    assert await store.get("raw") == b"abc" * 1000


async def test_into_fills_the_callers_tensors(store, kit):
    value = kit.tensor(3, size=60).view(3, 4, 5)
    await store.put_many({"t": value, "m": {"a": value, "b": value[0]}, "b": b"bytes"})
    whole = torch.zeros(8, 8, 8, dtype=torch.uint8)
    target = whole[1:4, 2:6, 3:8]
    assert await store.get("t", into=target) is target
    assert torch.equal(target, value)
    assert whole.sum() == value.sum()  # nothing beside it was written
    named = {"a": torch.zeros_like(value), "b": torch.zeros_like(value[0])}
    found = await store.get_many(["m", "t"], into={"m": named})
    assert found[0]["a"] is named["a"]
    assert torch.equal(named["a"], value)
    assert torch.equal(named["b"], value[0])
    assert_same_blob(found[1], value)
    for key, wrong in [
        ("t", torch.zeros(60, dtype=torch.uint8)),
        ("t", torch.zeros(3, 4, 5)),
        ("t", {"a": torch.zeros_like(value)}),
        ("m", {"a": torch.zeros_like(value)}),
        ("b", torch.zeros(5, dtype=torch.uint8)),
        ("t", torch.zeros(1, dtype=torch.uint8).expand(3, 4, 5)),
    ]:
        with pytest.raises(InvalidValueError):
            await store.get(key, into=wrong)
    assert await store.get("nothing", into=torch.zeros(1)) is None


async def test_what_is_got_is_not_the_stored_memory(store, kit):
    await store.put("key", kit.tensor(1))
    (await store.get("key")).zero_()
    assert_same_blob(await store.get("key"), kit.tensor(1))


WRONG_KEYS = ["", "a\0b", "x" * 1025, "\ud800", 5, None, b"bytes"]


@pytest.mark.parametrize("key", WRONG_KEYS, ids=repr)
async def test_a_wrong_key_is_refused_by_every_verb_alike(store, key):
    calls = [
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.exists(key),
        lambda: store.delete(key),
    ]
    for call in calls:
        with pytest.raises(InvalidKeyError):
            await call()


async def test_one_bad_item_never_fails_a_batch_of_puts(store, kit):
    sparse = torch.eye(3).to_sparse()
    huge = torch.empty(1 << 40, dtype=torch.uint8, device="meta")
    results = await store.put_many({"good": b"1", "": b"2", "sparse": sparse, "huge": huge, "list": [1], "last": b"3"})
    assert list(results) == ["good", "", "sparse", "huge", "list", "last"]
    assert isinstance(results[""], InvalidKeyError)
    assert all(isinstance(results[key], InvalidValueError) for key in ("sparse", "huge", "list"))
    assert await store.get("good") == b"1"
    assert await store.get("last") == b"3"


async def test_one_bad_key_never_fails_a_batch(store):
    await store.put_many({"good": b"1", "last": b"3"})
    keys = ["good", *WRONG_KEYS, ["no text"], "last"]
    nothing = len(keys) - 2
    assert await store.get_many(keys) == [b"1", *[None] * nothing, b"3"]
    assert await store.exists_many(keys) == [True, *[False] * nothing, True]
    assert await store.delete_many(keys) == [True, *[False] * nothing, True]
    assert await store.get_many(["good", "last"]) == [None, None]


async def test_a_value_too_large_for_every_tier_is_dropped_and_counted_and_hurts_nobody(store, kit):
    await store.put_many({f"k{i}": kit.tensor(i) for i in range(20)})
    await store.flush()
    bytes_before = {name: tier.bytes for name, tier in store.stats().tiers.items()}
    results = await store.put_many({"big": torch.zeros(80 << 20, dtype=torch.uint8), "small": b"1"})
    assert results["big"].count("dropped") == 1
    assert results["big"].chunks[0].reason
    assert results["small"].count("dropped") == 0
    assert await store.get("big") is None
    for i in range(20):
        assert_same_blob(await store.get(f"k{i}"), kit.tensor(i))
    evicted = sum(tier.evicted for tier in store.stats().tiers.values())
    assert evicted == 0, "entries were evicted in vain"
    assert all(store.stats().tiers[name].bytes >= size for name, size in bytes_before.items())
    with pytest.raises(CapacityError):
        await store.put("big", torch.zeros(80 << 20, dtype=torch.uint8), wait=next(iter(bytes_before)))


HOSTILE = [
    "a",
    "a/b",
    "a//b",
    "a%b",
    "a*",
    "a?",
    "[a]",
    "a.b",
    "A",
    "ä",
    "a\u0308",
    "\n",
    " ",
    "..",
    "/",
    "x-" + "0" * 40,
    "\\",
    "'",
]


async def test_listing_goes_by_literal_prefix(store):
    await store.put_many({key: key.encode() for key in HOSTILE})
    await store.flush()
    for prefix in ["", "a", "a/", "a%", "a*", "*", "?", "[", ".", "ä", "a\u0308", "/", "\\", "x-", "nothing"]:
        listed = [entry.key async for entry in store.list(prefix)]
        assert sorted(listed) == sorted(key for key in HOSTILE if key.startswith(prefix)), prefix
    entry = await anext(store.list("a%b"))
    assert set(entry.tiers) == set(store.stats().tiers)
    assert entry.size >= 3
    assert entry.expires is None
    assert entry.lossy is False


async def test_listing_shows_a_key_that_moves_up_meanwhile(kit, opened):
    """It stood below when the tier above was listed, and above when the one below was."""
    store = await opened(kit.open_chunks(kit.memory(), kit.medium()))
    await store.put_many({"first": b"1", "moving": b"2"})
    await store.flush()
    memory, medium = store._engine.tiers
    memory.drop(memory.find("moving"), "evicted")
    listed = []
    async for entry in store.list():
        listed.append(entry.key)
        if len(listed) == 1:
            assert await store.get("moving") == b"2"
            await kit.until(lambda: memory.find("moving") is not None)
            await medium.remove([medium.find("moving")], "evicted")
    assert sorted(listed) == ["first", "moving"]


async def test_listing_while_keys_come_and_go_shows_each_key_once_and_keeps_the_books(store, kit):
    for number in range(40):
        await store.put(f"stays{number}", b"1")
    ended = asyncio.Event()

    async def come_and_go():
        for number in range(120):
            await store.put(f"comes{number}", b"2")
            if number % 2:
                await store.delete(f"comes{number - 1}")
        ended.set()

    async def list_all():
        while not ended.is_set():
            keys = [entry.key async for entry in store.list()]
            assert len(keys) == len(set(keys)), "a key was listed twice"
            assert sum(key.startswith("stays") for key in keys) == 40
            await asyncio.sleep(0.001)  # sleep(0) would fight the worker threads for the interpreter

    await asyncio.gather(come_and_go(), list_all())
    await store.flush()
    keys = {entry.key async for entry in store.list()}
    assert keys == {f"stays{n}" for n in range(40)} | {f"comes{n}" for n in range(1, 120, 2)}
    kit.assert_books_balance(store)
    assert all(tier.entries == 100 for tier in store.stats().tiers.values())


class TestTTL:
    @pytest.fixture
    def clock(self):
        return FrozenClock()

    @pytest.fixture
    async def store(self, kit, tiers, opened, clock):
        return await opened(kit.open_chunks(*tiers, clock=clock))

    async def test_an_expired_value_is_a_miss_everywhere(self, store, clock, kit):
        await store.put_many({"short": b"1"}, ttl_seconds=10)
        await store.put("long", b"2", ttl_seconds=100)
        await store.put("ever", b"3")
        await store.flush()
        clock.advance(9.5)
        assert await store.get("short") == b"1"
        entry = await anext(store.list("short"))
        assert entry.expires == pytest.approx(1_700_000_010.0)
        clock.advance(1.0)
        assert await store.get("short") is None
        assert await store.exists("short") is False
        assert sorted([entry.key async for entry in store.list()]) == ["ever", "long"]
        assert await store.get("long") == b"2"
        clock.advance(1000)
        assert await store.get("long") is None
        assert await store.get("ever") == b"3"
        await kit.until(lambda: all(tier.expired == 2 for tier in store.stats().tiers.values()))
        kit.assert_books_balance(store)

    async def test_a_hit_does_not_extend_life(self, store, clock):
        await store.put("key", b"1", ttl_seconds=10)
        await store.flush()
        for _ in range(3):
            clock.advance(3)
            assert await store.get("key") == b"1"
        clock.advance(3)
        assert await store.get("key") is None

    async def test_replacing_sets_a_new_life(self, store, clock):
        await store.put("key", b"1", ttl_seconds=10)
        await store.flush()
        await store.put("key", b"2")
        await store.flush()
        clock.advance(1000)
        assert await store.get("key") == b"2"

    async def test_an_expired_value_that_still_waits_to_be_written_is_a_miss(self, store, clock):
        await store.put("key", b"1", ttl_seconds=10)
        clock.advance(11)
        assert await store.get("key") is None
        await store.flush()
        assert await store.get("key") is None

    @pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), True, "10"], ids=repr)
    async def test_a_senseless_ttl_is_refused(self, store, ttl):
        with pytest.raises(InvalidValueError, match="ttl_seconds"):
            await store.put("key", b"1", ttl_seconds=ttl)
        assert await store.get("key") is None


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_tiers_ttl_caps_the_life_of_what_it_holds(kit, opened, shape):
    clock = FrozenClock()
    tiers = {
        "memory": [kit.memory(ttl_seconds=60.0)],
        "memory-disk": [kit.memory(ttl_seconds=60.0), kit.disk(ttl_seconds=60.0)],
        "disk": [kit.disk(ttl_seconds=60.0)],
        "medium": [kit.medium(ttl_seconds=60.0)],
    }[shape]
    store = await opened(kit.open_chunks(*tiers, clock=clock))
    await store.put("short", b"1", ttl_seconds=10)
    await store.put("long", b"2", ttl_seconds=1000)
    await store.put("ever", b"3")
    await store.flush()
    clock.advance(11)
    assert [await store.get(key) for key in ("short", "long", "ever")] == [None, b"2", b"3"]
    clock.advance(50)
    assert [await store.get(key) for key in ("short", "long", "ever")] == [None, None, None]


async def test_expiry_survives_a_restart(kit, tmp_path):
    clock = FrozenClock()
    async with kit.open_chunks(kit.disk(), clock=clock) as store:
        await store.put("short", b"1", ttl_seconds=10)
        await store.put("long", b"2", ttl_seconds=100)
        assert (await store.flush()).complete
    clock.advance(20)
    async with kit.open_chunks(kit.disk(), clock=clock) as store:
        assert await store.get("short") is None
        assert await store.get("long") == b"2"
        clock.advance(100)
        assert await store.get("long") is None
    assert not kit.files() or len(kit.files()) <= 1


class TestCapacity:
    async def test_usage_is_what_lies_on_the_medium(self, kit, opened):
        store = await opened(kit.open_chunks(kit.memory(), kit.disk()))
        drawn = random.Random(7)
        for number in range(60):
            await store.put(f"k{drawn.randrange(20)}", kit.tensor(number, size=drawn.randrange(1, 20_000)))
            if number % 3 == 0:
                await store.delete(f"k{drawn.randrange(20)}")
        await store.flush()
        assert store.stats().tiers["local-disk"].bytes == sum(path.stat().st_size for path in kit.files())
        assert store.stats().tiers["local-disk"].entries == len(kit.files())
        for key in [entry.key async for entry in store.list()]:
            await store.delete(key)
        assert store.stats().bytes == 0
        assert kit.files() == []
        kit.assert_books_balance(store)

    @pytest.mark.parametrize("shape", ["memory", "disk", "medium"])
    async def test_no_more_than_the_capacity_is_held_and_the_newest_stay(self, kit, opened, shape):
        tier = {"memory": kit.memory, "disk": kit.disk, "medium": kit.medium}[shape](capacity="256KiB")
        store = await opened(kit.open_chunks(tier))
        for number in range(60):
            await store.put(f"k{number}", kit.tensor(number, size=10_000))
            await store.flush()
            stats = next(iter(store.stats().tiers.values()))
            assert stats.bytes <= 256 << 10
        kept = [number for number in range(60) if await store.get(f"k{number}") is not None]
        assert kept == list(range(60 - len(kept), 60))
        assert len(kept) >= 8
        assert stats.evicted == 60 - len(kept)
        for number in kept:
            assert_same_blob(await store.get(f"k{number}"), kit.tensor(number, size=10_000))
        kit.assert_books_balance(store)

    async def test_putting_one_key_again_and_again_evicts_nobody(self, kit, opened):
        store = await opened(kit.open_chunks(kit.memory(capacity="1MiB"), kit.disk(capacity="256KiB")))
        await store.put("other", kit.tensor(0, size=50_000))
        for number in range(100):
            await store.put("key", kit.tensor(number, size=50_000))
            if number % 5 == 0:
                await store.flush()
        await store.flush()
        assert await store.exists("other")
        assert_same_blob(await store.get("key"), kit.tensor(99, size=50_000))
        for tier in store.stats().tiers.values():
            assert tier.evicted == 0
            assert tier.entries == 2
        kit.assert_books_balance(store)

    async def test_a_capacity_lowered_at_reopen_holds_from_the_start(self, kit):
        async with kit.open_chunks(kit.disk()) as store:
            for number in range(30):
                await store.put(f"k{number}", kit.tensor(number, size=10_000))
                await store.flush()
        async with kit.open_chunks(kit.disk(capacity="200KiB")) as store:
            stats = store.stats().tiers["local-disk"]
            assert stats.bytes <= 200 << 10
            assert sum(path.stat().st_size for path in kit.files()) <= 200 << 10
            assert stats.entries == len(kit.files()) > 8
            kept = {entry.key async for entry in store.list()}
            assert kept == {f"k{number}" for number in range(30 - len(kept), 30)}
            kit.assert_books_balance(store)


class TestNamesAfterARestart:
    async def fill(self, kit, keys):
        async with kit.open_chunks(kit.disk()) as store:
            await store.put_many({key: key.encode() for key in keys})
            assert (await store.flush()).complete

    async def check(self, kit, keys, **options):
        async with kit.open_chunks(kit.disk(), **options) as store:
            stats = store.stats().tiers["local-disk"]
            assert stats.entries == len(keys)
            assert stats.bytes == sum(path.stat().st_size for path in kit.files())
            assert sorted([entry.key async for entry in store.list()]) == sorted(keys)
            for key in keys:
                assert await store.get(key) == key.encode()
            kit.assert_books_balance(store)
        async with kit.open_chunks(kit.disk(), **options) as store:
            for key in keys:  # asked for by name, before anybody listed
                assert await store.exists(key)
                assert await store.get(key) == key.encode()
            kit.assert_books_balance(store)

    async def test_with_the_journal(self, kit):
        await self.fill(kit, HOSTILE)
        await self.check(kit, HOSTILE)

    @pytest.mark.parametrize("damage", ["deleted", "emptied", "torn", "garbage", "flipped", "huge length"])
    async def test_with_a_damaged_journal(self, kit, damage):
        await self.fill(kit, HOSTILE)
        journals = [path for path in (kit.path / "disk" / "journal").iterdir() if path.is_file()]
        assert journals
        for path in journals:
            content = path.read_bytes()
            assert content
            if damage == "deleted":
                path.unlink()
            else:
                path.write_bytes(
                    {
                        "emptied": b"",
                        "torn": content[: len(content) * 2 // 3],
                        "garbage": random.Random(1).randbytes(len(content)),
                        "flipped": bytes([*content[:40], content[40] ^ 4, *content[41:]]),
                        "huge length": b"\xff\xff\xff\xff" + content[4:],
                    }[damage]
                )
        await self.check(kit, HOSTILE)

    async def test_an_entry_whose_header_does_not_fit_its_name_is_dropped_by_the_listing(self, kit):
        await self.fill(kit, ["a", "b", "c"])
        for path in (kit.path / "disk" / "journal").iterdir():
            path.unlink()
        first, second, third = kit.files()
        kit.overwrite(first, second.read_bytes())
        kit.overwrite(third, b"x" * 9000)
        async with kit.open_chunks(kit.disk()) as store:
            keys = [entry.key async for entry in store.list()]
            assert len(keys) == 1
            assert await store.get(keys[0]) == keys[0].encode()
            assert store.stats().tiers["local-disk"].corrupt == 2
            kit.assert_books_balance(store)
            await kit.until(lambda: len(kit.files()) == 1)


async def test_after_a_restart_leaves_are_evicted_before_their_parents(kit):
    """Only the journal knows the parents; without it, order is lost, and nothing else."""
    chains = [[chain * 100 + token for token in range(4 * 6)] for chain in range(3)]
    async with kit.open(kit.disk()) as store:
        for tokens in chains:
            await store.put(tokens, kit.kv(tokens))
        assert (await store.flush()).complete
        for tokens in chains:
            await store.get(tokens, start=20)  # a use of the last chunk alone
        full = store.stats().tiers["local-disk"].bytes
    async with kit.open(kit.disk(capacity=full * 2 // 3)) as store:
        left = store.stats().tiers["local-disk"].entries
        assert left == 12
        usable = [await store.exists(tokens) for tokens in chains]
        assert sum(usable) == left * 4, f"chunks without their parents were kept: {usable}"
        for tokens in chains:
            hit = await store.get(tokens)
            if hit is not None:
                kit.assert_kv(hit, tokens)
        kit.assert_books_balance(store)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
async def test_the_books_balance_after_anything(kit, opened, shape, seed):
    """Random operations on little room, several at a time, with damage done to the medium meanwhile."""
    clock, drawn = FrozenClock(), random.Random(f"{shape} {seed}")
    tiers = {
        "memory": [kit.memory(capacity="256KiB")],
        "memory-disk": [kit.memory(capacity="128KiB"), kit.disk(capacity="512KiB")],
        "disk": [kit.disk(capacity="256KiB")],
        "medium": [kit.medium(capacity="256KiB", write_queue_bytes="64KiB")],
    }[shape]
    store = await opened(kit.open_chunks(*tiers, clock=clock))
    takes, held = itertools.count(), {f"k{i}": [] for i in range(12)}

    async def act(key):
        what = drawn.random()
        if what < 0.35:
            value = kit.tensor(next(takes), size=drawn.choice([1, 5_000, 20_000, 60_000]))
            held[key].append(value)
            await store.put(key, value, ttl_seconds=drawn.choice([None, None, 50]))
        elif what < 0.75:
            found = await store.get(key)
            assert found is None or any(same_bits(found, value) for value in held[key])
        elif what < 0.85:
            await store.delete(key)
        elif what < 0.9:
            await store.exists(key)
        elif what < 0.93:
            keys = [entry.key async for entry in store.list("k")]
            assert len(keys) == len(set(keys))
        elif what < 0.95 and "disk" in shape and (files := kit.files()):
            path = drawn.choice(files)
            with contextlib.suppress(FileNotFoundError):
                with_damage = bytearray(path.read_bytes())
                with_damage[drawn.randrange(len(with_damage))] ^= 8
                kit.overwrite(path, with_damage)
        else:
            clock.advance(5)

    for _ in range(80):
        await asyncio.gather(*(act(drawn.choice(sorted(held))) for _ in range(3)))
        for tier in store.stats().tiers.values():  # and one value per writer in flight
            assert tier.bytes <= tier.capacity + 4 * 68 * 1024
    await store.flush()
    kit.assert_books_balance(store)
    await kit.until(lambda: all(tier.bytes <= tier.capacity for tier in store.stats().tiers.values()))
    if "disk" in shape:
        await kit.until(
            lambda: store.stats().tiers["local-disk"].bytes == sum(path.stat().st_size for path in kit.files())
        )


async def test_wait_names_a_tier_and_is_checked_before_anything_is_stored(store):
    with pytest.raises(InvalidValueError, match="wait="):
        await store.put("key", b"1", wait="nowhere")
    assert await store.get("key") is None
    names = list(store.stats().tiers)
    for name in names:
        await store.put(f"to {name}", b"1", wait=name)
    if "local-disk" in names or "medium" in names:
        await store.put("durable", b"2", wait="durable")
    else:
        with pytest.raises(InvalidValueError, match="persistent"):
            await store.put("durable", b"2", wait="durable")
        with pytest.raises(InvalidValueError, match="persistent"):
            await store.put_many({"durable": b"2"}, wait="durable")
        assert await store.get("durable") is None


async def test_many_puts_of_one_key_at_once_all_succeed_and_leave_one_value(store, kit):
    wait = "durable" if len(store.stats().tiers) > 1 or "pinned-cpu" not in store.stats().tiers else None
    values = [kit.tensor(number, size=30_000) for number in range(30)]
    results = await asyncio.gather(*(store.put("key", value, wait=wait) for value in values))
    assert len(results) == 30
    found = await store.get("key")
    assert any(same_bits(found, value) for value in values)
    await store.flush()
    assert same_bits(await store.get("key"), found)
    assert all(tier.entries == 1 for tier in store.stats().tiers.values())
    kit.assert_books_balance(store)
