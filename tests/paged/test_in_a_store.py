"""Puts from blocks and gets into blocks, in the order of the engine's streams."""

import asyncio

import pytest
import torch

import kvtier
from kvtier.paged import PagedLayout, exchange
from kvtier.testing.streams import LazyDevice

TOKENS = list(range(100, 132))
CHUNK = 8
NAMESPACE = kvtier.Namespace(model="org/model", revision="1")


def cache(seed=0, dtype=torch.float32, axes="2LBNHD"):
    sizes = {"2": 2, "L": 3, "B": 12, "N": 4, "H": 2, "D": 8}
    shape = [sizes[letter] for letter in axes]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def open_store(paged, *tiers, axes="LTHD", **options):
    config = {
        "chunk_tokens": CHUNK,
        "tiers": list(tiers) or [{"backend": "pinned-cpu", "capacity": "16MiB"}],
        "memory": {"staging_bytes": "4MiB", "results_bytes": "16MiB"},
        **options,
    }
    return kvtier.open(config, layout=paged.kv_layout(axes=axes), namespace=NAMESPACE)


@pytest.mark.parametrize("order", ["canonical", "native"])
@pytest.mark.parametrize("axes", ["2LBNHD", "LB2HND"])
@pytest.mark.parametrize("store_axes", ["LTHD", "LHTD"])
async def test_round_trip_through_other_blocks(order, axes, store_axes, tmp_path):
    one, other = cache(1, axes=axes), cache(2, axes=axes)
    here, there = (PagedLayout.from_stacked(tensor, axes, order=order) for tensor in (one, other))
    disk = {"backend": "local-disk", "path": str(tmp_path), "capacity": "16MiB", "codecs": ["zstd"]}
    async with open_store(here, disk, axes=store_axes) as store:
        blocks, elsewhere = [3, 0, 11, 5, 6, 1, 2, 9], [8, 7, 4, 10, 3, 0, 1, 2]
        result = await store.put(TOKENS, here.source(blocks), wait="durable")
        assert result.count("queued") == 4
        hit = await store.get(TOKENS, out=there.target(elsewhere), max_tokens=31)
        length = 31 if order == "canonical" else 28
        assert (hit.num_tokens, hit.kv, hit.event) == (length, {}, None)
        mine = PagedLayout.from_stacked(one, axes).gather(blocks)
        found = PagedLayout.from_stacked(other, axes).gather(elsewhere)
        for name in "kv":
            assert torch.equal(found[name][:, :length], mine[name][:, :length])


async def test_blocks_and_tensors_are_one_to_the_store():
    paged = PagedLayout.from_stacked(cache(1))
    async with open_store(paged) as store:
        blocks = list(range(8))
        await store.put(TOKENS, paged.source(blocks))
        hit = await store.get(TOKENS)
        wanted = paged.gather(blocks)
        assert all(torch.equal(hit.kv[name], wanted[name]) for name in "kv")
        await store.clear()
        await store.put(TOKENS, wanted)
        target = PagedLayout.from_stacked(cache(3))
        await store.get(TOKENS, out=target.target(blocks))
        assert all(torch.equal(target.gather(blocks)[name], wanted[name]) for name in "kv")


async def test_parts_of_a_prompt_in_slots():
    paged = PagedLayout.from_stacked(cache(1))
    slots = [47, 3, 4, 5, 20, 21, 0, 9, *range(24, 40)]  # of tokens 8 to 31
    async with open_store(paged) as store:
        result = await store.put(TOKENS, paged.source(slots=slots, first=8), start=8)
        assert result.count("stored") == 3
        await store.put(TOKENS[:8], paged.source([0, 1]))
        target = PagedLayout.from_stacked(cache(2))
        hit = await store.get(TOKENS, start=13, out=target.target(slots=slots[5:], first=13))
        assert hit.num_tokens == 32
        wanted = paged.gather_slots(slots[5:])
        assert all(torch.equal(target.gather_slots(slots[5:])[name], wanted[name]) for name in "kv")


async def test_a_target_that_ends_early_ends_the_hit():
    paged = PagedLayout.from_stacked(cache(1))
    async with open_store(paged) as store:
        await store.put(TOKENS, paged.source(list(range(8))))
        hit = await store.get(TOKENS, out=PagedLayout.from_stacked(cache(2)).target([0, 1, 2]))
        assert hit.num_tokens == 12
        assert await store.get([1, 2, 3], out=paged.target([11])) is None


async def test_two_groups_with_tables_of_their_own():
    full = PagedLayout.from_stacked(cache(1), name="full", layers=[0, 2, 4])
    windowed = PagedLayout.from_stacked(cache(2), name="windowed", layers=[1, 3, 5], window=9)
    paged = PagedLayout.join(full, windowed)
    tables = {"full": list(range(8)), "windowed": [11, 10, 9, 8, 7, 6, 5, 4]}
    async with open_store(paged) as store:
        await store.put(TOKENS, paged.source(tables))
        other = PagedLayout.join(
            PagedLayout.from_stacked(cache(3), name="full", layers=[0, 2, 4]),
            PagedLayout.from_stacked(cache(4), name="windowed", layers=[1, 3, 5], window=9),
        )
        hit = await store.get(TOKENS, out=other.target(tables))
        assert hit.num_tokens == 32
        for group, first in (("full", 0), ("windowed", 24)):  # a window of 9 needs the last 8 tokens
            wanted, found = (layout.gather(tables[group], group=group)["k"][:, first:] for layout in (paged, other))
            assert torch.equal(wanted, found)


@pytest.mark.parametrize(
    ("kv", "error"),
    [
        (lambda paged: paged.source([0, 1, 2]), "hold tokens"),
        (lambda paged: paged.source(list(range(8)), first=8), "hold tokens"),
        (lambda paged: PagedLayout.from_stacked(cache(dtype=torch.float16)).source(list(range(8))), "paged.kv_layout"),
    ],
)
async def test_sources_that_do_not_fit(kv, error):
    paged = PagedLayout.from_stacked(cache())
    async with open_store(paged) as store:
        with pytest.raises(kvtier.InvalidValueError, match=error):
            await store.put(TOKENS, kv(paged))
        assert await store.exists(TOKENS) == 0


async def test_targets_that_do_not_fit():
    paged = PagedLayout.from_stacked(cache())
    async with open_store(paged) as store:
        for target, start, text in (
            (paged.target([0], first=8), 0, "begin at token 8"),
            (PagedLayout.from_stacked(cache(dtype=torch.float16)).target([0]), 0, "paged.kv_layout"),
        ):
            with pytest.raises(kvtier.InvalidValueError, match=text):
                await store.get(TOKENS, start=start, out=target)
    native = PagedLayout.from_stacked(cache(), order="native")
    async with open_store(native) as store:
        await store.put(TOKENS, native.source(list(range(8))))
        with pytest.raises(kvtier.InvalidValueError, match="begins with a block"):
            await store.get(TOKENS, start=2, out=native.target(list(range(8))))


async def test_a_put_waits_for_the_stream_that_computes_the_blocks():
    device, tensor = LazyDevice(), torch.zeros_like(cache())
    paged = PagedLayout([*PagedLayout.from_stacked(tensor).groups.values()], device=device)
    async with open_store(paged) as store:
        device.caller.run(lambda: tensor.copy_(cache(1)))  # the forward pass, which has not run yet
        source = paged.source(list(range(8)))
        device.caller.run(tensor.zero_)  # the next one overwrites the blocks
        await store.put(TOKENS, source)
        assert device.caller.pending == 1
        hit = await store.get(TOKENS)
        assert torch.equal(hit.kv["k"], PagedLayout.from_stacked(cache(1)).gather(list(range(8)))["k"])


async def test_a_get_waits_for_the_stream_that_still_reads_the_blocks_and_is_then_visible():
    device, tensor = LazyDevice(), cache(2)
    plain = PagedLayout.from_stacked(cache(1))
    paged = PagedLayout([*PagedLayout.from_stacked(tensor).groups.values()], device=device)
    async with open_store(plain) as store:
        await store.put(TOKENS, plain.source(list(range(8))))
        before, seen = tensor.clone(), []
        device.caller.run(lambda: seen.append(torch.equal(tensor, before)))  # the blocks' last use by another request
        assert (await store.get(TOKENS, out=paged.target(list(range(8))))).num_tokens == 32
        assert seen == [True]
        assert torch.equal(paged.gather(list(range(8)))["v"], plain.gather(list(range(8)))["v"])


async def test_with_an_event_the_get_ends_before_the_blocks_are_filled_and_the_event_tells_when(monkeypatch):
    device, tensor = LazyDevice(), cache(2)
    plain = PagedLayout.from_stacked(cache(1))
    paged = PagedLayout([*PagedLayout.from_stacked(tensor).groups.values()], device=device)
    wanted = plain.gather(list(range(8)))
    async with open_store(plain) as store:
        await store.put(TOKENS, plain.source(list(range(8))))
        monkeypatch.setattr(exchange, "_on_device", lambda pages: True)
        hit = await store.get(TOKENS, out=paged.target(list(range(8)), event=True))
        monkeypatch.undo()
        assert (hit.num_tokens, hit.event.query()) == (32, False)
        assert not torch.equal(paged.gather(list(range(8)))["v"], wanted["v"])
        hit.event.synchronize()
        assert all(torch.equal(paged.gather(list(range(8)))[name], wanted[name]) for name in "kv")


async def test_a_named_stream_is_the_one_waited_for():
    device, tensor = LazyDevice(), torch.zeros_like(cache())
    paged = PagedLayout([*PagedLayout.from_stacked(tensor).groups.values()], device=device)
    mine = device.stream()
    mine.run(lambda: tensor.copy_(cache(1)))
    device.caller.run(tensor.zero_)  # another stream, which has nothing to do with it
    async with open_store(paged) as store:
        await store.put(TOKENS, paged.source(list(range(8)), stream=mine))
        assert (mine.pending, device.caller.pending) == (0, 1)
        assert bool((await store.get(TOKENS)).kv["k"].any())


async def test_a_cancelled_get_touches_no_block_afterwards():
    paged, target = PagedLayout.from_stacked(cache(1)), PagedLayout.from_stacked(cache(2))
    async with open_store(paged) as store:
        await store.put(TOKENS, paged.source(list(range(8))))
        for turns in range(12):
            call = asyncio.create_task(store.get(TOKENS, out=target.target(list(range(8)))))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait({call})
            mine = torch.full_like(target.gather(list(range(8)))["k"], 7.0)
            target.scatter({"k": mine, "v": mine}, list(range(8)))
            await store.exists(TOKENS)
            assert torch.equal(target.gather(list(range(8)))["k"], mine)
