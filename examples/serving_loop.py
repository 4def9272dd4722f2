"""A serving loop of your own, while one of its tiers dies under it and comes back.

Two workers take requests from a queue. The upper tier is small, the lower one is a "shelf" somewhere in the network
that is unplugged for a while. The answers stay right all the time; only the work saved goes down, and the figures say
why.

    python examples/serving_loop.py
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable

import torch
from toy_model import LAYOUT, NAMESPACE, answer, compute

import kvtier
from kvtier.backends.bytes_backend import BytesBackend


class Shelf(BytesBackend):
    """Values in a dict that stands for a machine in the network."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.unplugged = False

    def _reach(self) -> None:
        if self.unplugged:
            raise ConnectionError("the shelf does not answer")

    async def get(self, name: str) -> bytes | None:
        """Return the value, or `None`."""
        self._reach()
        return self.values.get(name)

    async def put(self, name: str, value: bytes, expires: float | None) -> None:
        """Store the value."""
        del expires
        self._reach()
        self.values[name] = value

    async def delete(self, name: str) -> bool:
        """Remove the value; tell whether it was there."""
        self._reach()
        return self.values.pop(name, None) is not None

    async def names(self) -> Iterable[str]:
        """Return all names."""
        self._reach()
        return list(self.values)


class Faults:
    """Counts what went wrong, by kind and tier."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def on_event(self, event: kvtier.Event) -> None:
        """Called by the store for every event."""
        if event.kind in {"error", "timeout", "dropped", "degraded"}:
            self.seen[f"{event.kind} in {event.tier}"] += event.count


async def serve(store: kvtier.KVStore, tokens: list[int]) -> tuple[float, int]:
    """Answer one request; return the answer and how many of its tokens were loaded."""
    hit = await store.get(tokens, max_tokens=len(tokens) - 1)
    start = hit.num_tokens if hit else 0
    new = compute(tokens, start)
    await store.put(tokens, new, start=start, lossy=hit.lossy if hit else False)
    if hit is None:
        return answer(new), 0
    loaded = LAYOUT.match(hit.kv, tokens=start)["full"]  # by layer group, checked; this layout has one
    return answer({name: torch.cat([loaded[name], new[name]], dim=1) for name in new}), start


async def worker(store: kvtier.KVStore, requests: asyncio.Queue[list[int]], loaded: Counter[str]) -> None:
    """Serve requests for ever; a wrong answer ends the program."""
    while True:
        tokens = await requests.get()
        said, start = await serve(store, tokens)
        if said != answer(compute(tokens, 0)):
            raise AssertionError(f"wrong answer for a prompt of {len(tokens)} tokens")
        loaded["tokens"] += len(tokens)
        loaded["loaded"] += start
        requests.task_done()


async def phase(store: kvtier.KVStore, name: str, prompts: list[list[int]]) -> None:
    """Serve all prompts with two workers and print how much of them was loaded."""
    requests: asyncio.Queue[list[int]] = asyncio.Queue()
    loaded: Counter[str] = Counter()
    for prompt in prompts:
        requests.put_nowait(prompt)
    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(worker(store, requests, loaded)) for _ in range(2)]
        await requests.join()
        for task in workers:
            task.cancel()
    print(f"{name:<34} {len(prompts)} prompts, {loaded['loaded'] / loaded['tokens']:4.0%} of their tokens loaded")


async def main() -> None:
    """Serve the same conversations with the shelf there, gone, and there again."""
    shelf, faults, dice = Shelf(), Faults(), random.Random(1)
    documents = [[dice.randrange(1000) for _ in range(640)] for _ in range(8)]
    config = {
        "chunk_tokens": 64,
        "tiers": [
            # room for less than one of the eight documents; a full tier makes a put wait instead of dropping
            {"backend": "pinned-cpu", "capacity": "320KiB", "on_full": "wait"},
            {"backend": shelf, "name": "shelf", "capacity": "64MiB", "on_full": "wait"},
        ],
    }

    def questions() -> list[list[int]]:
        return [[*document, *(dice.randrange(1000) for _ in range(20))] for document in documents]

    async with kvtier.open(config, namespace=NAMESPACE, layout=LAYOUT, observer=faults) as store:
        await phase(store, "first questions, nothing stored:", questions())
        await store.flush()
        await phase(store, "more questions:", questions())
        shelf.unplugged = True
        await phase(store, "the shelf is unplugged:", questions())
        shelf.unplugged = False
        while not store.stats().tiers["shelf"].up:  # noqa: ASYNC110  # the tier looks by itself whether it is back
            await asyncio.sleep(0.2)
        await phase(store, "the shelf is back:", questions())
    print("faults seen:", ", ".join(f"{count} x {kind}" for kind, count in faults.seen.items()) or "none")
    print("every answer was right")


if __name__ == "__main__":
    asyncio.run(main())
