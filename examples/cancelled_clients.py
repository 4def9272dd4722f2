"""Clients that hang up: half of the requests are cancelled at a random moment, and nobody else notices.

python examples/cancelled_clients.py
"""

import asyncio
import random
import tempfile

import torch
from toy_model import LAYOUT, NAMESPACE, compute

import kvtier

CLIENTS = 60


async def ask(store: kvtier.KVStore, tokens: list[int]) -> int:
    """Load what is stored, compute the rest, store it; return how many tokens were loaded."""
    hit = await store.get(tokens, max_tokens=len(tokens) - 1)
    start = hit.num_tokens if hit else 0
    if hit:
        loaded, expected = LAYOUT.match(hit.kv, tokens=start)["full"], compute(tokens[:start], 0)
        if not all(torch.equal(loaded[name], expected[name]) for name in expected):
            raise AssertionError("a client got somebody else's KV")
    await store.put(tokens, compute(tokens, start), start=start)
    return start


async def main() -> None:
    """Let sixty clients ask about four documents and cancel every second one."""
    dice = random.Random(2)
    documents = [[dice.randrange(1000) for _ in range(512)] for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "chunk_tokens": 64,
            "tiers": [
                {"backend": "pinned-cpu", "capacity": "256KiB", "promote": "never"},  # so that disk reads go on
                {"backend": "local-disk", "path": folder, "capacity": "64MiB"},
            ],
        }
        async with kvtier.open(config, namespace=NAMESPACE, layout=LAYOUT) as store:
            for document in documents:
                await ask(store, document)
            await store.flush()
            tasks = [asyncio.create_task(ask(store, [*dice.choice(documents), client])) for client in range(CLIENTS)]
            for task in tasks[::2]:
                asyncio.get_running_loop().call_later(dice.random() * 0.02, task.cancel)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            finished = [result for result in results if isinstance(result, int)]
            hung_up = sum(isinstance(result, asyncio.CancelledError) for result in results)
            memory, reads = store.stats().memory, store.stats().reads_under_way
            failed = len(results) - len(finished) - hung_up
            print(f"{len(finished)} clients were served, {hung_up} hung up, {failed} failed")
            print(f"loaded {sum(finished):,} tokens; {reads} reads left over, {memory.leased} bytes leased")
            if failed:
                raise AssertionError(next(r for r in results if isinstance(r, Exception)))


if __name__ == "__main__":
    asyncio.run(main())
