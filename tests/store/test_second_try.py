"""A read whose value was replaced by a larger one meanwhile must not wait for memory that its own call holds."""

import asyncio

import torch

from kvtier.store import open_chunks
from kvtier.testing.memory import MemoryBackend

DEADLINE_SECONDS = 60.0


class Interrupted(MemoryBackend):
    """Does something else once, in the middle of the next read."""

    meanwhile = None

    async def read_many(self, reads):
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return await super().read_many(reads)


def config(backend):
    return {
        "deadline_seconds": DEADLINE_SECONDS,
        "memory": {"staging_bytes": "2MiB"},
        "tiers": [{"backend": backend, "name": "medium", "capacity": "64MiB"}],
    }


async def test_the_other_keys_of_the_call_arrive_and_nobody_waits_for_the_deadline():
    medium = {}
    backend, others = Interrupted(medium), [f"key {i}" for i in range(10)]
    async with open_chunks(config(backend)) as store, open_chunks(config(MemoryBackend(medium))) as elsewhere:
        await store.put("swapped", torch.zeros(1000, dtype=torch.uint8), wait="medium")
        for key in others:  # together more than the memory for reads
            await store.put(key, torch.zeros(500_000, dtype=torch.uint8), wait="medium")

        async def swap():
            await elsewhere.put("swapped", torch.ones(300_000, dtype=torch.uint8), wait="medium")

        backend.meanwhile = swap
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await store.get_many(["swapped", *others])
        assert loop.time() - began < DEADLINE_SECONDS / 2  # not a measure of speed: a stall lasts the whole deadline
        assert all(value is not None for value in found[1:])
        assert found[0] is None or torch.equal(found[0], torch.ones(300_000, dtype=torch.uint8))
        assert torch.equal(await store.get("swapped"), torch.ones(300_000, dtype=torch.uint8))
