"""A continuous-batching engine in small: block tables, and a store behind the blocks.

For each request: match what is stored, allocate blocks, have the stored part written into them, compute the rest block
by block beside the other requests, save every full block. Run it twice on one folder: the second process computes
less and says exactly the same.

    python examples/paged_engine.py /tmp/kv          # once more: loads what the first run stored
    python examples/paged_engine.py                  # without a store
"""

import asyncio
import json
import sys
from collections import deque
from dataclasses import dataclass, field

import torch
from toy_transformer import BLOCK_TOKENS, DIM, HEADS, LAYERS, NAMESPACE, Transformer, digest, prompt

import kvtier
from kvtier.paged import PagedLayout

BLOCKS = 40  # room for three requests at a time: the others wait
CHUNK_TOKENS = 2 * BLOCK_TOKENS
REQUESTS = 6
NEW_TOKENS = 8


@dataclass
class Request:
    """One prompt on its way."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    done: int = 0  # tokens whose KV is in the blocks
    loaded: int = 0
    saved: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)
    saving: set[asyncio.Task[kvtier.PutResult]] = field(default_factory=set)

    @property
    def total(self) -> int:
        """Tokens at the end."""
        return len(self.tokens) + NEW_TOKENS - len(self.logits)


class Engine:
    """Blocks, a model, and perhaps a store."""

    def __init__(self, store: kvtier.KVStore | None, cache: torch.Tensor) -> None:
        self.model = Transformer()
        self.store = store
        self.cache = cache
        self.paged = PagedLayout.from_stacked(cache, "2LBNHD")
        self.free = deque(range(BLOCKS))
        self.running: list[Request] = []

    async def admit(self, request: Request) -> None:
        """Allocate the request's blocks and fill them with what is stored."""
        request.blocks = [self.free.popleft() for _ in range(-(-request.total // BLOCK_TOKENS))]
        if self.store is not None:
            # One token at least is left to compute: its logits are what the request is for.
            target = self.paged.target(request.blocks)
            hit = await self.store.get(request.tokens, max_tokens=len(request.tokens) - 1, out=target)
            found = hit.num_tokens if hit else 0
            request.done = request.loaded = found // BLOCK_TOKENS * BLOCK_TOKENS
            request.saved = found // CHUNK_TOKENS * CHUNK_TOKENS
        self.running.append(request)

    def step(self, request: Request) -> None:
        """Compute the request's next block, or its next token."""
        stop = min((request.done // BLOCK_TOKENS + 1) * BLOCK_TOKENS, len(request.tokens))
        logits = self.model.forward(request.tokens[request.done : stop], request.done, self.cache, request.blocks)
        request.done = stop
        if request.done == len(request.tokens):
            request.logits.append(logits)
            request.tokens.append(int(logits.argmax()))

    def save(self, request: Request) -> None:
        """Begin to store the chunks that have become full; their blocks are not overwritten before `retire`."""
        full = request.done // CHUNK_TOKENS * CHUNK_TOKENS
        if self.store is not None and full > request.saved:
            source = self.paged.source(request.blocks)
            put = self.store.put(request.tokens[:full], source, start=request.saved)
            print("saving", flush=True)
            request.saving.add(asyncio.create_task(put))
            request.saved = full

    async def retire(self, request: Request) -> None:
        """Give the blocks back once nothing reads them any more."""
        await asyncio.gather(*request.saving)
        self.running.remove(request)
        self.free.extend(request.blocks)

    async def serve(self, prompts: list[list[int]]) -> list[Request]:
        """Serve all prompts, as many at a time as there are blocks for."""
        waiting = deque(Request(list(tokens)) for tokens in prompts)
        everything = list(waiting)
        while waiting or self.running:
            while waiting and -(-waiting[0].total // BLOCK_TOKENS) <= len(self.free):
                await self.admit(waiting.popleft())
            for request in list(self.running):
                self.step(request)
                self.save(request)
                if len(request.logits) == NEW_TOKENS:
                    await self.retire(request)
            await asyncio.sleep(0)  # loads and saves go on beside the model
        return everything


async def main(folder: str | None) -> None:
    """Serve six prompts and print what was loaded, what was computed, and a digest of all logits."""
    cache = torch.zeros(2, LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, DIM)
    prompts = [prompt(number) for number in range(1, REQUESTS + 1)]
    if folder is None:
        engine = Engine(None, cache)
        requests = await engine.serve(prompts)
    else:
        config = {
            "chunk_tokens": CHUNK_TOKENS,
            "tiers": [
                {"backend": "pinned-cpu", "capacity": "8MiB"},
                {"backend": "local-disk", "path": folder, "capacity": "64MiB"},
            ],
        }
        layout = PagedLayout.from_stacked(cache, "2LBNHD").kv_layout()
        async with kvtier.open(config, namespace=NAMESPACE, layout=layout) as store:
            engine = Engine(store, cache)
            requests = await engine.serve(prompts)
            await store.flush()
    print(
        json.dumps(
            {
                "loaded": sum(request.loaded for request in requests),
                "computed": engine.model.computed_tokens,
                "free": len(engine.free),
                "digest": digest([logits for request in requests for logits in request.logits]),
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
