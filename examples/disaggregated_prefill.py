"""One process computes a prompt's KV and puts it; another waits for it, loads it and decodes.

The decoder does not poll: `wait_seconds` waits inside the store, chunk by chunk as they come. If the prefill process
dies on the way, the decoder takes what has arrived, computes the rest itself, and says the same.

    python examples/disaggregated_prefill.py decode /tmp/kv &
    python examples/disaggregated_prefill.py prefill /tmp/kv

In place of a folder it takes a TOML file whose [[tiers]] name a Redis or an S3 bucket.
"""

import asyncio
import json
import sys
import tomllib
from pathlib import Path

import torch
from toy_transformer import BLOCK_TOKENS, DIM, HEADS, LAYERS, NAMESPACE, Transformer, digest, prompt

import kvtier
from kvtier.paged import PagedLayout

CHUNK_TOKENS = 2 * BLOCK_TOKENS
NEW_TOKENS = 8
TOKENS = prompt(1, 180)
BLOCKS = list(range(-(-(len(TOKENS) + NEW_TOKENS) // BLOCK_TOKENS)))


def tiers(where: str) -> list[dict[str, object]]:
    """Return the tier that both sides share: a folder, or what the `[[tiers]]` of a TOML file say (Redis, S3)."""
    if where.endswith(".toml"):
        found: list[dict[str, object]] = tomllib.loads(Path(where).read_text())["tiers"]
        return found
    return [{"backend": "local-disk", "path": where, "capacity": "256MiB"}]


class Worker:
    """A model, its blocks, and a store on the shared tier."""

    def __init__(self, where: str) -> None:
        self.model = Transformer()
        self.cache = torch.zeros(2, LAYERS, len(BLOCKS), BLOCK_TOKENS, HEADS, DIM)
        self.paged = PagedLayout.from_stacked(self.cache, "2LBNHD")
        config = {"chunk_tokens": CHUNK_TOKENS, "tiers": tiers(where)}
        self.store = kvtier.open(config, namespace=NAMESPACE, layout=self.paged.kv_layout())

    def compute(self, tokens: list[int], begin: int) -> torch.Tensor:
        """Compute tokens from `begin` on; return the last logits."""
        logits = torch.empty(0)
        for low in range(begin, len(tokens), BLOCK_TOKENS):
            logits = self.model.forward(tokens[low : low + BLOCK_TOKENS], low, self.cache, BLOCKS)
        return logits


async def prefill(where: str, *, die_after: int | None) -> None:
    """Compute the prompt and put it, one chunk at a time: the decoder may begin to load before the last is there."""
    worker = Worker(where)
    async with worker.store as store:
        for low in range(0, len(TOKENS) // CHUNK_TOKENS * CHUNK_TOKENS, CHUNK_TOKENS):
            worker.compute(TOKENS[: low + CHUNK_TOKENS], low)
            put = store.put(TOKENS[: low + CHUNK_TOKENS], worker.paged.source(BLOCKS), start=low, wait="durable")
            if die_after is not None and low >= die_after:
                task = asyncio.create_task(put)
                await asyncio.sleep(0)  # the put has begun
                print("dying", flush=True)
                await asyncio.Event().wait()  # until somebody kills this process
                await task
            await put
    print(json.dumps({"computed": worker.model.computed_tokens}))


async def decode(where: str, wait_seconds: float) -> None:
    """Wait for the prompt's KV, load what there is, compute the rest, decode."""
    worker = Worker(where)
    async with worker.store as store:
        target = worker.paged.target(BLOCKS)
        print("waiting", flush=True)
        hit = await store.get(
            TOKENS,
            max_tokens=len(TOKENS) - 1,
            out=target,
            wait_seconds=wait_seconds,
            deadline_seconds=wait_seconds + 30,
        )
        loaded = hit.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS if hit else 0
        logits = [worker.compute(TOKENS, loaded)]
        said = list(TOKENS)
        while len(logits) < NEW_TOKENS:
            said.append(int(logits[-1].argmax()))
            logits.append(worker.model.forward(said[-1:], len(said) - 1, worker.cache, BLOCKS))
    print(json.dumps({"loaded": loaded, "said": said[len(TOKENS) :], "digest": digest(logits[:1])}))


def main(arguments: list[str]) -> None:
    """Be one of the two."""
    role, where, *rest = arguments
    if role == "prefill":
        asyncio.run(prefill(where, die_after=int(rest[0]) if rest else None))
    elif role == "decode":
        asyncio.run(decode(where, float(rest[0]) if rest else 60.0))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:] or ["help", ""])
