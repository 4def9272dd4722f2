"""Streams by layer: one layer group is handed out while the next ones load."""

import asyncio

import pytest
import torch

import kvtier
from kvtier.keys.names import name_of
from kvtier.store import layerwise
from kvtier.testing.memory import MemoryBackend

TOKENS = list(range(16))
SPEC = kvtier.TensorSpec(2, 8, "float32")


class Held(MemoryBackend):
    """Reads of a layer group's chunks wait until it is let go."""

    def __init__(self):
        super().__init__()
        self.begun = {name: asyncio.Event() for name in "abcd"}
        self.go = {name: asyncio.Event() for name in "abcd"}
        self.groups = {}

    def learn(self, store):
        plan = store._plan(TOKENS)
        self.groups = {name_of(plan.key(piece)): piece.group for piece in plan.run()}

    async def read_many(self, reads):
        for read in reads:
            name = self.groups[read.name]
            self.begun[name].set()
            await self.go[name].wait()
        return await super().read_many(reads)


@pytest.fixture
def layout():
    groups = [kvtier.LayerGroup(name, [2 * i, 2 * i + 1], {"k": SPEC, "v": SPEC}) for i, name in enumerate("abcd")]
    return kvtier.KVLayout(groups)


def kv_of(layout, tokens=16):
    made = {}
    for number, group in enumerate(layout.groups):
        dice = torch.Generator().manual_seed(number)
        made[group.name] = {name: torch.randn(2, tokens, 2, 8, generator=dice) for name in "kv"}
    return made


async def test_a_layer_is_there_before_the_next_group_and_that_one_loads_meanwhile(kit, layout):
    medium = Held()
    kv = kv_of(layout)
    async with kit.open(kit.medium(medium), layout=layout) as store:
        medium.learn(store)
        await store.put(TOKENS, kv, wait="medium")
        parts = store.stream(TOKENS, by="layer")
        medium.go["a"].set()
        first = await anext(parts)
        assert (first.layer, first.group, first.stop) == (0, "a", 16)
        assert torch.equal(first.kv["k"], kv["a"]["k"][0])
        await asyncio.wait_for(medium.begun["b"].wait(), 20)  # without anybody asking for it
        assert (await anext(parts)).layer == 1
        third = asyncio.ensure_future(anext(parts))
        await asyncio.wait_for(medium.begun["c"].wait(), 20)
        assert not third.done()
        for name in "bcd":
            medium.go[name].set()
        assert (await third).layer == 2
        assert [part.layer async for part in parts] == [3, 4, 5, 6, 7]
    assert kit.chunk_tokens == 4


@pytest.mark.parametrize("seconds", [1000.0, 0.0])
async def test_the_first_group_has_the_medium_to_itself_for_a_while(kit, layout, monkeypatch, seconds):
    monkeypatch.setattr(layerwise, "HEAD_START_SECONDS", seconds)
    medium = Held()
    async with kit.open(kit.medium(medium), layout=layout) as store:
        medium.learn(store)
        await store.put(TOKENS, kv_of(layout), wait="medium")
        parts = store.stream(TOKENS, by="layer")
        first = asyncio.ensure_future(anext(parts))
        await asyncio.wait_for(medium.begun["a"].wait(), 20)
        if seconds:
            for _ in range(100):
                await asyncio.sleep(0)
            assert not medium.begun["b"].is_set()
        else:
            await asyncio.wait_for(medium.begun["c"].wait(), 20)  # an answer that is long in coming holds up no other
        assert not first.done()
        for name in "abcd":
            medium.go[name].set()
        assert (await first).layer == 0
        assert [part.layer async for part in parts] == [1, 2, 3, 4, 5, 6, 7]


async def test_leaving_early_leaves_nothing_behind(kit, layout):
    medium = Held()
    async with kit.open(kit.medium(medium), layout=layout) as store:
        medium.learn(store)
        await store.put(TOKENS, kv_of(layout), wait="medium")
        await store.flush()
        before = len(asyncio.all_tasks())
        parts = store.stream(TOKENS, by="layer")
        medium.go["a"].set()
        await anext(parts)
        await parts.aclose()
        for name in "bcd":
            medium.go[name].set()
        await kit.until(lambda: len(asyncio.all_tasks()) == before and store.stats().reads_under_way == 0)
        assert [part.layer async for part in store.stream(TOKENS, by="layer")] == list(range(8))


async def test_a_chunk_that_is_gone_makes_the_stream_shorter_or_ends_it(kit, layout):
    medium = MemoryBackend()
    for lost, wanted in (("a", [(layer, 8) for layer in range(8)]), ("c", [(layer, 16) for layer in range(4)])):
        async with kit.open(kit.medium(medium), layout=layout) as store:
            await store.put(TOKENS, kv_of(layout), wait="medium")
            plan = store._plan(TOKENS)
            key = next(plan.key(piece) for piece in plan.run() if piece.group == lost and piece.span == 2)
            await medium.delete_many([name_of(key)])  # behind the store's back
            assert [(part.layer, part.stop) async for part in store.stream(TOKENS, by="layer")] == wanted
            await store.clear()


async def save_layers(store, layout, kv, order, **options):
    """Store layer by layer; return the result."""
    async with store.put_layers(TOKENS, **options) as layers:
        for layer in order:
            group = layout.group("abcd"[layer // 2])
            layers.add(layer, {name: kv[group.name][name][layer % 2] for name in "kv"})
            await asyncio.sleep(0)
    return layers.result


@pytest.mark.parametrize("axes", ["LTHD", "LHTD"])
async def test_a_prefix_saved_layer_by_layer_is_the_same_as_one_saved_at_once(kit, layout, axes):
    layout = kvtier.KVLayout(layout.groups, axes=axes)
    kv = kv_of(layout)
    if axes == "LHTD":
        kv = {group: {name: tensor.transpose(1, 2) for name, tensor in part.items()} for group, part in kv.items()}
    medium = MemoryBackend()
    async with kit.open(kit.medium(medium), layout=layout) as store:
        result = await save_layers(store, layout, kv, [3, 0, 2, 1, 7, 6, 5, 4], wait="medium")
        assert [chunk.status for chunk in result.chunks] == ["stored"] * 16 or result.count("queued") == 16
        hit = await store.get(TOKENS)
        assert hit.num_tokens == 16
        assert all(torch.equal(hit.kv[group][name], kv[group][name]) for group in "abcd" for name in "kv")
        again = await store.put(TOKENS, kv)
        assert again.count("present") == 16


async def test_a_group_is_stored_while_later_layers_are_still_computed(kit, layout):
    kv = kv_of(layout)
    async with kit.open(kit.medium(MemoryBackend()), layout=layout) as store:
        async with store.put_layers(TOKENS, wait="medium") as layers:
            for layer in (0, 1):
                layers.add(layer, {name: kv["a"][name][layer] for name in "kv"})
            async with asyncio.timeout(20):
                while store.stats().tiers["medium"].entries < 4:
                    await asyncio.sleep(0)
            assert await store.exists(TOKENS) == 0  # no other group is there
            for layer in range(2, 8):
                layers.add(layer, {name: kv["abcd"[layer // 2]][name][layer % 2] for name in "kv"})
        assert layers.result.count("dropped") == 0
        assert await store.exists(TOKENS) == 16


async def test_layers_that_never_came_are_dropped_and_said_so(kit, layout):
    kv = kv_of(layout)
    async with kit.open(kit.medium(MemoryBackend()), layout=layout) as store:
        result = await save_layers(store, layout, kv, [0, 1, 2, 4, 5])
        assert {chunk.reason for chunk in result.chunks if chunk.status == "dropped"} == {"layers-missing"}
        assert result.count("dropped") == 8  # of b and d
        assert await store.exists(TOKENS) == 0


async def test_a_model_that_fails_on_the_way_leaves_nothing_under_way(kit, layout):
    kv = kv_of(layout)
    async with kit.open(kit.medium(MemoryBackend()), layout=layout) as store:
        before = len(asyncio.all_tasks())
        layers = store.put_layers(TOKENS)

        async def fail():
            async with layers:
                for layer in (0, 1):
                    layers.add(layer, {name: kv["a"][name][layer] for name in "kv"})
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert len(asyncio.all_tasks()) == before
        with pytest.raises(RuntimeError, match="scope"):
            _ = layers.result


async def test_mistakes_with_layers(kit, layout):
    part = {name: torch.zeros(16, 2, 8) for name in "kv"}
    async with kit.open(kit.medium(MemoryBackend()), layout=layout) as store, store.put_layers(TOKENS) as layers:
        layers.add(0, part)
        for layer, given, error, text in (
            (0, part, kvtier.InvalidValueError, "given already"),
            (8, part, kvtier.InvalidValueError, "in no group"),
            (1, {name: torch.zeros(15, 2, 8) for name in "kv"}, kvtier.LayoutMismatchError, "15"),
            (1, {"k": part["k"]}, kvtier.LayoutMismatchError, "tensors of group"),
            (1, None, kvtier.LayoutMismatchError, "a mapping"),
        ):
            with pytest.raises(error, match=text):
                layers.add(layer, given)
    async with kit.open(kit.medium(MemoryBackend()), layout=layout) as store:
        with pytest.raises(kvtier.InvalidValueError, match="start=17"):
            async with store.put_layers(TOKENS, start=17):
                pass
