"""KV events read back by another library's decoder, in the structure that routers declare, held against the store."""

import asyncio
import time
import types

import msgspec
import pytest
import torch

import kvtier
from kvtier.keys import chunk_keys
from kvtier.metrics.kv_events import KVEvents, ZmqSink

CHUNK = 16
LAYOUT = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
NAMESPACE = kvtier.Namespace(model="org/name", revision="1")


# What routers decode into, by the public description of vLLM's events.
class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Router:
    """Keeps what it was told: per medium the blocks that are there."""

    def __init__(self):
        self.numbers, self.batches, self.held = [], [], {}

    def __call__(self, number, packed):
        self.numbers.append(number)
        self.take(DECODER.decode(packed))

    def take(self, batch):
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockStored):
                self.held.setdefault(event.medium, set()).update(event.block_hashes)
            else:
                assert self.held[event.medium].issuperset(event.block_hashes), "only what was there goes"
                self.held[event.medium].difference_update(event.block_hashes)

    @property
    def stored(self):
        return [event for batch in self.batches for event in batch.events if isinstance(event, BlockStored)]


def config(tmp_path, memory="256KiB"):
    return {
        "chunk_tokens": CHUNK,
        "tiers": [
            {"backend": "pinned-cpu", "capacity": memory},
            {"backend": "local-disk", "path": str(tmp_path / "kv"), "capacity": "64MiB"},
        ],
    }


def opened(tmp_path, observer, **options):
    return kvtier.open(config(tmp_path, **options), namespace=NAMESPACE, layout=LAYOUT, observer=observer)


def kv(tokens):
    return {name: torch.randn(2, tokens, 2, 8) for name in ("k", "v")}


def hashes(tokens):
    digest = NAMESPACE.fingerprint(layout=LAYOUT.describe(), chunk_tokens=CHUNK)
    keys = chunk_keys(kvtier.Prefix(tokens), namespace=digest, chunk_tokens=CHUNK)
    return [bytes.fromhex(key.rpartition("/")[2]) for key in keys.keys]


async def held_by(store):
    """Return what a router should think, from the store's own listing."""
    held = {}
    async for entry in store.list(""):
        for tier in entry.tiers:
            held.setdefault(tier, set()).add(bytes.fromhex(entry.key.rpartition("/")[2]))
    return held


async def test_a_prompt_is_told_chunk_by_chunk(tmp_path):
    router = Router()
    async with opened(tmp_path, KVEvents(router, chunk_tokens=CHUNK, media={"pinned-cpu": "CPU"}, rank=3)) as store:
        await store.put(range(3 * CHUNK), kv(3 * CHUNK), wait="durable")
        await store.flush()
        await asyncio.sleep(0)
        wanted = hashes(range(3 * CHUNK))
        (first,) = [event for event in router.stored if event.medium == "CPU"]
        assert (first.block_hashes, first.parent_block_hash, first.block_size) == (wanted, None, CHUNK)
        assert (first.token_ids, first.lora_id) == ([], None)
        assert router.held == {"CPU": set(wanted), "local-disk": set(wanted)}
        assert all(batch.data_parallel_rank == 3 and abs(batch.ts - time.time()) < 100 for batch in router.batches)
        await store.put(range(4 * CHUNK), kv(4 * CHUNK))
        await asyncio.sleep(0)
        last = [event for event in router.stored if event.medium == "CPU"][-1]
        assert (last.block_hashes, last.parent_block_hash) == (hashes(range(4 * CHUNK))[3:], wanted[2])
    assert router.numbers == list(range(len(router.numbers)))


async def test_a_router_knows_at_any_time_what_the_tiers_hold(tmp_path):
    router = Router()
    async with opened(tmp_path, KVEvents(router, chunk_tokens=CHUNK)) as store:
        for number in range(30):  # more than the memory tier holds
            await store.put([number, *range(2 * CHUNK - 1)], kv(2 * CHUNK), wait="durable")
        await store.get([3, *range(2 * CHUNK - 1)])  # promoted, and something else goes
        await store.delete([5, *range(2 * CHUNK - 1)])
        await store.flush()
        await asyncio.sleep(0.01)
        held = await held_by(store)
        assert router.held == held
        assert len(held["local-disk"]) == 58
        assert 0 < len(held["pinned-cpu"]) < 58, "something was evicted"
        await store.clear()
        await asyncio.sleep(0.01)
        assert not any(router.held.values())


async def test_what_is_found_at_open_is_told(tmp_path):
    async with opened(tmp_path, None) as store:
        await store.put(range(CHUNK), kv(CHUNK), wait="durable")
    router = Router()
    events = KVEvents(router, chunk_tokens=CHUNK, hashes="int")
    async with opened(tmp_path, events) as store:
        await store.exists(range(CHUNK))
        await asyncio.sleep(0.01)
        assert router.held == {"local-disk": {int.from_bytes(hashes(range(CHUNK))[0][-8:], "big")}}
    events.cleared()
    assert router.held == {}


async def test_token_ids_if_somebody_has_them(tmp_path):
    router = Router()
    by_hash = dict(zip(hashes(range(2 * CHUNK)), (range(CHUNK), range(CHUNK, 2 * CHUNK)), strict=True))
    events = KVEvents(router, chunk_tokens=CHUNK, tokens_of=lambda key: by_hash[bytes.fromhex(key.rpartition("/")[2])])
    async with opened(tmp_path, events) as store:
        await store.put(range(2 * CHUNK), kv(2 * CHUNK), wait="durable")
        await asyncio.sleep(0)
    assert [token for event in router.stored if event.medium == "pinned-cpu" for token in event.token_ids] == list(
        range(2 * CHUNK)
    )


async def test_blobs_are_no_kv_and_other_events_go_on(tmp_path):
    class Inner:
        def __init__(self):
            self.seen = []

        def on_event(self, event):
            self.seen.append(event.kind)

    router, inner = Router(), Inner()
    async with opened(tmp_path, KVEvents(router, chunk_tokens=CHUNK, observer=inner)) as store:
        await store.chunks.put("a blob", b"1", wait="durable")
        await store.chunks.put("too large", bytes(100 << 20))
        await asyncio.sleep(0)
    assert not router.batches
    assert "dropped" in inner.seen


async def test_a_wrapped_observer_hears_of_requests_and_changes_if_it_listens(tmp_path):
    class Inner:
        def __init__(self):
            self.requests, self.changes = [], []

        def on_event(self, event):
            pass

        def on_request(self, request):
            self.requests.append(request)

        def on_change(self, change):
            self.changes.append(change)

    router, inner = Router(), Inner()
    async with opened(tmp_path, KVEvents(router, chunk_tokens=CHUNK, observer=inner)) as store:
        await store.put(range(CHUNK), kv(CHUNK), wait="durable")
        await store.get(range(CHUNK))
        await store.chunks.put("a blob", b"1", wait="durable")
        await asyncio.sleep(0)
    ((asked, tokens),) = [(request.keys, request.num_tokens) for request in inner.requests]
    assert ([bytes.fromhex(key.rpartition("/")[2]) for key in asked], tokens) == (hashes(range(CHUNK)), CHUNK)
    assert {"a blob"} < {change.key for change in inner.changes}, "blobs too: only routers are not told of them"
    assert {block for event in router.stored for block in event.block_hashes} == set(hashes(range(CHUNK)))


@pytest.mark.parametrize("inner", [None, types.SimpleNamespace(on_event=lambda event: None)])
async def test_nobody_who_hears_requests_costs_nothing(tmp_path, inner):
    async with opened(tmp_path, KVEvents(Router(), chunk_tokens=CHUNK, observer=inner)) as store:
        assert not store._engine.events.hears_requests


async def test_over_a_socket(tmp_path):
    zmq = pytest.importorskip("zmq.asyncio")
    sink = ZmqSink("tcp://127.0.0.1:*", topic="kv")
    context = zmq.Context()
    subscriber = context.socket(pytest.importorskip("zmq").SUB)
    subscriber.connect(sink.endpoint)
    subscriber.subscribe("kv")
    try:
        async with asyncio.timeout(60), opened(tmp_path, KVEvents(sink, chunk_tokens=CHUNK)) as store:
            number = 0
            while not await subscriber.poll(50):  # until the subscription has arrived
                number += 1
                await store.put([number, *range(CHUNK - 1)], kv(CHUNK))
            topic, sent, packed = await subscriber.recv_multipart()
        assert (topic, len(sent)) == (b"kv", 8)
        batch = DECODER.decode(packed)
        assert int.from_bytes(sent, "big") >= 0
        assert {type(event) for event in batch.events} == {BlockStored}
    finally:
        subscriber.close(0)
        context.term()
        sink.close()


async def test_without_such_an_observer_nothing_is_done(tmp_path):
    class Plain:
        def on_event(self, event):
            pass

    async with opened(tmp_path, Plain()) as store:
        assert all(tier.ledger.on_change is None for tier in store._engine.tiers)
    async with opened(tmp_path, KVEvents(Router())) as store:
        assert all(tier.ledger.on_change is not None for tier in store._engine.tiers)
