"""Two stores on one directory: what one deletes, the other stops serving, and cannot bring back."""

import asyncio
import contextlib

import pytest
import torch

from kvtier.store import open_chunks
from kvtier.store.coherence import listen

COHERENCE_SECONDS = 0.5  # looked at four times per period, at the pace of the upkeep's tick


def config(path, **extra):
    return {
        "coherence_seconds": COHERENCE_SECONDS,
        "tiers": [
            {"backend": "pinned-cpu", "capacity": "8MiB"},
            {"backend": "local-disk", "path": str(path), "capacity": "64MiB", "negative_seconds": 0.01, **extra},
        ],
    }


@contextlib.asynccontextmanager
async def two_stores(path, **extra):
    async with open_chunks(config(path, **extra)) as one, open_chunks(config(path, **extra)) as two:
        yield one, two


async def until(condition):
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_what_one_store_deletes_the_other_stops_serving_from_memory(tmp_path):
    async with two_stores(tmp_path) as (one, two):
        await one.put("a", torch.arange(100), wait="durable")
        await one.put("b", torch.arange(100), wait="durable")
        assert torch.equal(await two.get("a"), torch.arange(100))  # and promotes it into its own memory
        assert torch.equal(await two.get("b"), torch.arange(100))
        await one.delete("a")

        async def gone():
            return await two.get("a") is None

        await until(gone)
        assert torch.equal(await two.get("b"), torch.arange(100))


async def test_a_copy_written_back_by_a_store_that_has_not_heard_is_not_served_by_the_one_that_deleted(tmp_path):
    deaf = config(tmp_path, write="back") | {"coherence_seconds": 3600}
    async with open_chunks(deaf) as one, open_chunks(deaf) as two:
        await two.put("a", torch.arange(100))  # in its memory only
        await one.delete("a")
        for i in range(40):  # pushes it down to the shared directory
            await two.put(f"filler{i}", torch.zeros(1 << 17))
        await two.flush()
        assert await two.exists("a")
        await asyncio.sleep(0.05)  # let what this store believes to be absent expire
        assert await one.get("filler1") is not None
        assert await one.get("a") is None


async def test_a_value_put_anew_after_the_delete_is_served_by_both(tmp_path):
    async with two_stores(tmp_path) as (one, two):
        await one.put("a", torch.arange(100), wait="durable")
        assert await two.get("a") is not None
        await one.delete("a")
        await one.put("a", torch.arange(7), wait="durable")

        async def new():
            got = await two.get("a")
            return got is not None and torch.equal(got, torch.arange(7))

        await until(new)
        await asyncio.sleep(2 * COHERENCE_SECONDS)
        assert torch.equal(await one.get("a"), torch.arange(7))
        assert torch.equal(await two.get("a"), torch.arange(7))


@pytest.mark.parametrize("how", ["clear", "delete"])
async def test_a_cleared_namespace_is_gone_everywhere(tmp_path, how):
    import kvtier

    layout = kvtier.KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    namespace = kvtier.Namespace(model="m", revision="1")
    options = {"namespace": namespace, "layout": layout}
    cfg = config(tmp_path) | {"chunk_tokens": 16}
    tokens = list(range(64))
    kv = {name: torch.randn(1, 64, 1, 8) for name in "kv"}
    async with kvtier.open(cfg, **options) as one, kvtier.open(cfg, **options) as two:
        await one.put(tokens, kv, wait="durable")
        assert (await two.get(tokens)).num_tokens == 64
        await (one.clear() if how == "clear" else one.delete(tokens))

        async def gone():
            return await two.exists(tokens) == 0 and await two.get(tokens) is None

        await until(gone)
        assert await one.exists(tokens) == 0


async def test_a_deletion_is_heard_although_its_store_closed_and_another_compacted_the_logs(tmp_path):
    rare = config(tmp_path) | {"coherence_seconds": 3600}
    async with open_chunks(rare) as listener:
        await listener.put("a", torch.arange(100), wait="durable")
        async with open_chunks(rare) as deleter:
            await deleter.delete("a")
        async with open_chunks(rare):  # takes stock, and puts one log in the place of those of the closed stores
            pass
        assert await listener.get("a") is not None
        await listen(listener._engine, listener._engine.stored_tiers[0])
        assert await listener.get("a") is None
