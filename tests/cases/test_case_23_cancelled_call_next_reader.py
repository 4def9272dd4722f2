"""Case 23: a cancelled call must not leave its reply for the next reader.

The remote answers in order over one connection and its client keeps no count: whoever is cancelled between request and
reply shifts every later answer by one. Called bare it does exactly that (the control); below a store it must not.
"""

import asyncio
import contextlib

import torch

from kvtier.backends.bytes_backend import BytesBackend
from kvtier.store import open_chunks

DELAY_SECONDS = 0.01  # each way
KEYS = [f"key {i}" for i in range(24)]


class Remote:
    """A server that answers requests in order, each after a delay both ways, over one connection."""

    def __init__(self):
        self.values = {}
        self._requests, self._replies = asyncio.Queue(), asyncio.Queue()

    async def serve(self):
        while True:
            verb, name, value = await self._requests.get()
            await asyncio.sleep(DELAY_SECONDS)
            if verb == "set":
                self.values[name] = value
            elif verb == "del":
                value = self.values.pop(name, None)
            else:
                value = self.values.get(name)
            self._replies.put_nowait(value)

    async def call(self, verb, name, value=None):
        await asyncio.sleep(DELAY_SECONDS)
        self._requests.put_nowait((verb, name, value))
        return await self._replies.get()


class RemoteBackend(BytesBackend):
    """The naive client: one connection, one call at a time."""

    def __init__(self, remote):
        super().__init__()
        self._remote = remote
        self._connection = asyncio.Lock()

    async def _call(self, verb, name, value=None):
        async with self._connection:
            return await self._remote.call(verb, name, value)

    async def get(self, name):
        return await self._call("get", name)

    async def put(self, name, value, expires=None):
        await self._call("set", name, bytes(value))

    async def delete(self, name):
        return await self._call("del", name) is not None

    async def names(self):
        return list(self._remote.values)


@contextlib.asynccontextmanager
async def serving():
    remote = Remote()
    server = asyncio.create_task(remote.serve())
    try:
        yield remote
    finally:
        server.cancel()


async def cancel_at_some_point(coroutine, turn):
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(DELAY_SECONDS * (turn % 7) / 2)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def value_of(key):
    return torch.full((50,), KEYS.index(key), dtype=torch.int32)


async def test_the_bare_client_mixes_answers_up():
    async with serving() as remote:
        client = RemoteBackend(remote)
        for key in KEYS:
            await client.put(key, key.encode())
        wrong = 0
        for turn, key in enumerate(KEYS):
            await cancel_at_some_point(client.get("key 0"), turn)
            wrong += await client.get(key) != key.encode()
        assert wrong


async def test_below_a_store_nobody_gets_another_ones_answer():
    async with serving() as remote:
        tiers = [{"backend": RemoteBackend(remote), "name": "remote", "capacity": "64MiB", "promote": "never"}]
        async with open_chunks({"tiers": tiers, "deadline_seconds": 30}) as store:
            for key in KEYS:
                await store.put(key, value_of(key), wait="remote")
            for turn in range(60):
                await cancel_at_some_point(store.get("key 0"), turn)
                if turn % 3 == 0:
                    await cancel_at_some_point(store.put("scratch", torch.zeros(10)), turn)
                key, other = KEYS[turn % len(KEYS)], KEYS[(turn * 5 + 1) % len(KEYS)]
                for wanted, got in zip(
                    (key, other), await asyncio.gather(store.get(key), store.get(other)), strict=True
                ):
                    assert got is not None
                    assert torch.equal(got, value_of(wanted))
            stats = store.stats()
            assert stats.reads_under_way == 0
            assert stats.tiers["remote"].in_flight_bytes == 0
