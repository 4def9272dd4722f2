"""Case 23 on a real server: calls cancelled at any moment leave no reply, and no connection, behind."""

import asyncio
import contextlib

import pytest
import torch

from kvtier.store import open_chunks
from kvtier.testing.fault_proxy import Fault, FaultProxy
from kvtier.testing.servers.redis_tiers import new_prefix

pytestmark = pytest.mark.redis

DELAY_SECONDS = 0.01  # each way
KEYS = [f"key {i}" for i in range(12)]
CANCELLED = 60


def value_of(key):
    return torch.full((30_000,), KEYS.index(key), dtype=torch.int32)  # a head and parts


async def cancel_at_some_point(coroutine, turn):
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(DELAY_SECONDS * (turn % 9) / 2)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("client", ["wire", "redis-py"])
async def test_nobody_gets_another_ones_answer(valkey, client):
    with FaultProxy(("127.0.0.1", valkey.port)) as proxy:
        tier = {"backend": "redis", "name": "remote", "capacity": "64MiB", "promote": "never", "client": client}
        tier |= {"url": f"redis://127.0.0.1:{proxy.port}", "prefix": new_prefix()}
        async with open_chunks({"tiers": [tier], "deadline_seconds": 30}) as store:
            for key in KEYS:
                await store.put(key, value_of(key), wait="remote")
            proxy.requests = proxy.replies = Fault(delay_seconds=DELAY_SECONDS)
            for turn in range(CANCELLED):
                await cancel_at_some_point(store.get("key 0"), turn)
                if turn % 3 == 0:
                    await cancel_at_some_point(store.put("scratch", torch.zeros(30_000)), turn)
                if turn % 7 == 0:
                    await cancel_at_some_point(anext(aiter(store.list())), turn)
                wanted = KEYS[turn % len(KEYS)], KEYS[(turn * 5 + 1) % len(KEYS)]
                found = await asyncio.gather(*(store.get(key) for key in wanted))
                for key, value in zip(wanted, found, strict=True):
                    assert value is not None
                    assert torch.equal(value, value_of(key))
            stats = store.stats()
            assert stats.reads_under_way == 0
            assert stats.tiers["remote"].in_flight_bytes == 0
            assert proxy.connections < 40, "connections were not used again"
