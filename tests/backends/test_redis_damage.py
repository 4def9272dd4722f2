"""What somebody else does to an entry on a Redis server: a miss that is counted once, and the entry goes."""

import asyncio

import pytest

from kvtier import open_chunks
from kvtier.backends.redis_layout import (
    ENVELOPE_BYTES,
    HEAD_BYTES,
    MOST_PARTS,
    SEALED_BYTES,
    UNSEALED,
    Shape,
    cut,
    open_envelope,
)
from kvtier.errors import CapacityError
from kvtier.keys.names import name_of
from kvtier.testing.servers.redis_tiers import make_redis, new_prefix
from kvtier.testing.subject import value_of

pytestmark = pytest.mark.redis

MIB = 1 << 20
VALUES = {"small": value_of("small", 100), "other": value_of("other", 70_000), "big": value_of("big", 5 * MIB)}
TOKEN = slice(4, 20)


def claiming(head, *, size, part):
    """Return a head that says something else of its value, with a checksum that fits: somebody meant it."""
    envelope = Shape(size, HEAD_BYTES, part, head[TOKEN].decode()).envelope()
    return (envelope + head[ENVELOPE_BYTES:]).ljust(ENVELOPE_BYTES + HEAD_BYTES, b"\0")


def with_a_bit_flipped(head, at):
    return head[:at] + bytes([head[at] ^ 1]) + head[at + 1 :]


HEADS = {
    "empty": lambda head: b"",
    "a pickle": lambda head: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x8c\x04eval\x93.",
    "cut": lambda head: head[:-1],
    "longer": lambda head: head + b"junk",
    "a bit of the token": lambda head: with_a_bit_flipped(head, 10),
    "a bit of the size": lambda head: with_a_bit_flipped(head, 20),
    "a bit of the part's size": lambda head: with_a_bit_flipped(head, 44),
    "a bit of the checksum": lambda head: with_a_bit_flipped(head, SEALED_BYTES),
    "a bit of the value": lambda head: with_a_bit_flipped(head, ENVELOPE_BYTES + 20),
    "more parts than there are bytes": lambda head: claiming(head, size=1 << 60, part=1),
    "longer than it is": lambda head: claiming(head, size=6 * MIB, part=2 * MIB),
}


class Server:
    """A server's keys under one prefix, in bytes."""

    def __init__(self, server, prefix):
        redis = pytest.importorskip("redis")
        self.client = redis.Redis.from_url(server.url)
        self.prefix = prefix

    def head(self, key):
        return f"{self.prefix}:{{00}}:e:{name_of(key)}"

    def parts(self, key):
        return sorted(self.client.scan_iter(f"{self.head(key)}:*"))

    def replace(self, key, content):
        self.client.set(key, content, keepttl=True)

    def plant_list(self, key):
        self.client.delete(key)
        self.client.lpush(key, b"1")


@pytest.fixture
def prefix():
    return new_prefix()


@pytest.fixture
def medium(valkey, prefix):
    medium = Server(valkey, prefix)
    yield medium
    medium.client.close()


@pytest.fixture(params=["wire", "redis-py"])
def config(request, valkey, prefix):
    backend = make_redis(valkey.url, prefix=prefix, client=request.param)
    tier = {"backend": backend, "name": "redis", "capacity": "64MiB"}
    return {"tiers": [tier], "memory": {"staging_bytes": "32MiB"}, "deadline_seconds": 60.0}


async def assert_gone_and_counted(store, key):
    """`key` is a miss, `corrupt` went up by one, nothing else was harmed, and it can be put anew."""
    before = store.stats().tiers["redis"].corrupt
    async with asyncio.timeout(30):  # one that has to be cut off by its deadline may take that long
        assert await store.get(key) is None
    assert await store.exists(key) is False
    assert await store.get(key) is None
    tier = store.stats().tiers["redis"]
    assert (tier.corrupt - before, tier.errors, tier.raced, tier.up) == (1, 0, 0, True)
    await store.put(key, VALUES[key], wait="durable")
    for each, value in VALUES.items():
        assert await store.get(each) == value


@pytest.mark.parametrize("damage", sorted(HEADS))
async def test_a_damaged_head(config, medium, damage):
    async with open_chunks(config) as store:
        for key, value in VALUES.items():
            await store.put(key, value, wait="durable")
        for key in VALUES:
            head = medium.head(key)
            medium.replace(head, HEADS[damage](medium.client.get(head)))
            await assert_gone_and_counted(store, key)


@pytest.mark.parametrize("which", ["head", "part"])
async def test_a_key_of_another_type_costs_its_entry_and_not_the_tier(config, medium, which):
    async with open_chunks(config) as store:
        for key, value in VALUES.items():
            await store.put(key, value, wait="durable")
        medium.plant_list(medium.head("big") if which == "head" else medium.parts("big")[0])
        await assert_gone_and_counted(store, "big")


@pytest.mark.parametrize(("one", "another"), [("small", "other"), ("other", "big"), ("small", "big")])
async def test_swapped_heads(config, medium, one, another):
    async with open_chunks(config) as store:
        for key, value in VALUES.items():
            await store.put(key, value, wait="durable")
        first, second = medium.client.get(medium.head(one)), medium.client.get(medium.head(another))
        medium.replace(medium.head(one), second)
        medium.replace(medium.head(another), first)
        for key in (one, another):
            assert await store.get(key) is None
            assert await store.exists(key) is False
        for key in (one, another):
            await store.put(key, VALUES[key], wait="durable")
            assert await store.get(key) == VALUES[key]


def test_no_flipped_bit_of_an_envelope_goes_unseen():
    envelope = cut(5 * MIB, MIB).envelope()
    for at in range(ENVELOPE_BYTES):
        for bit in range(8):
            assert open_envelope(envelope[:at] + bytes([envelope[at] ^ 1 << bit]) + envelope[at + 1 :]) is None


def test_an_envelope_without_a_checksum_is_an_earlier_versions():
    shape = cut(5 * MIB, MIB)
    assert open_envelope(shape.envelope()[:SEALED_BYTES] + UNSEALED) == shape


def test_no_envelope_may_claim_more_parts_than_anybody_writes():
    most = Shape(HEAD_BYTES + MOST_PARTS * MIB, HEAD_BYTES, MIB, "0" * 16)
    assert open_envelope(most.envelope()) == most
    assert open_envelope(Shape(most.size + 1, HEAD_BYTES, MIB, "0" * 16).envelope()) is None
    with pytest.raises(CapacityError, match="raise part_bytes"):
        cut(2 * most.size, MIB)
