"""Two tensor-parallel ranks, each with half of the heads and a store of its own on one shared folder.

A prefix helps only as far as *both* ranks have it. So they agree twice: on the least of what exists, before they load,
and on the least of what arrived, after it: a chunk may be corrupt, or late, on one rank alone. The tokens that only one
of them has are computed again by both.

    python examples/tensor_parallel.py /tmp/kv       # twice: the second run loads
    python examples/tensor_parallel.py /tmp/kv late  # one rank's get has no time: both compute
    python examples/tensor_parallel.py /tmp/kv dies  # one rank is killed on the way: the other ends at once
"""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection

import torch
from toy_transformer import BLOCK_TOKENS, DIM, HEADS, LAYERS, NAMESPACE, Transformer, digest, prompt

import kvtier
from kvtier.paged import PagedLayout

RANKS = 2
CHUNK_TOKENS = 2 * BLOCK_TOKENS
TOKENS = prompt(1)
BLOCKS = list(range(-(-len(TOKENS) // BLOCK_TOKENS)))
PEER_SECONDS = 60.0  # a rank that is gone must not leave the other waiting


class Peers:
    """The other rank, at the end of a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def _exchange(self, mine: object) -> object:
        self.pipe.send_bytes(json.dumps(mine).encode())
        if not self.pipe.poll(PEER_SECONDS):
            raise TimeoutError("the other rank does not answer")
        return json.loads(self.pipe.recv_bytes(1 << 20))

    async def least(self, mine: int) -> int:
        """Return the least of all ranks' numbers; the loop goes on meanwhile."""
        theirs = await asyncio.to_thread(self._exchange, mine)
        if not isinstance(theirs, int):
            raise TypeError(f"the other rank sent {theirs!r}")
        return min(mine, theirs)

    def total(self, mine: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, to the last bit the same on each: two summands have one sum."""
        theirs = torch.tensor(self._exchange(mine.tolist()))
        return mine + theirs


async def run(rank: int, peers: Peers, folder: str, trouble: str) -> dict[str, object]:
    """Load what both ranks have, compute the rest, store it; rank 1 may get into trouble, "late" or "dies"."""
    heads = range(rank * HEADS // RANKS, (rank + 1) * HEADS // RANKS)
    cache = torch.zeros(2, LAYERS, len(BLOCKS), BLOCK_TOKENS, len(heads), DIM)
    paged = PagedLayout.from_stacked(cache, "2LBNHD")
    model = Transformer(heads, peers.total)
    config = {
        "chunk_tokens": CHUNK_TOKENS,
        "tiers": [{"backend": "local-disk", "path": folder, "capacity": "64MiB"}],
    }
    namespace = NAMESPACE.rank(tp=rank, tp_size=RANKS)  # ranks hold different heads: never each other's keys
    async with kvtier.open(config, namespace=namespace, layout=paged.kv_layout()) as store:
        there = await peers.least(await store.exists(TOKENS, max_tokens=len(TOKENS) - 1))
        arrived = 0
        if there:
            seconds = 1e-6 if (rank, trouble) == (1, "late") else 5.0
            hit = await store.get(TOKENS, max_tokens=there, out=paged.target(BLOCKS), deadline_seconds=seconds)
            arrived = hit.num_tokens if hit else 0
        if (rank, trouble) == (1, "dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        agreed = await peers.least(arrived) // CHUNK_TOKENS * CHUNK_TOKENS
        logits = await asyncio.to_thread(compute, model, cache, agreed)
        await store.put(TOKENS, paged.source(BLOCKS), start=agreed)
        await store.flush()
    return {"rank": rank, "existed": there, "arrived": arrived, "agreed": agreed, "digest": digest([logits])}


def compute(model: Transformer, cache: torch.Tensor, begin: int) -> torch.Tensor:
    """Compute all tokens from `begin` on; return the last logits."""
    logits = torch.empty(0)
    for low in range(begin, len(TOKENS), BLOCK_TOKENS):
        logits = model.forward(TOKENS[low : low + BLOCK_TOKENS], low, cache, BLOCKS)
    return logits


def rank_main(rank: int, pipe: Connection, folder: str, trouble: str) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    said = json.dumps(asyncio.run(run(rank, Peers(pipe), folder, trouble)))
    sys.stdout.write(f"{said}\n")  # at one stroke: both ranks write to one output
    sys.stdout.flush()


def main(folder: str, trouble: str = "") -> None:
    """Start both ranks and wait for them."""
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    ranks = [context.Process(target=rank_main, args=(rank, ends[rank], folder, trouble)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for end in ends:
        end.close()
    for process in ranks:
        process.join(2 * PEER_SECONDS)
    if any(process.exitcode != 0 for process in ranks):
        for process in ranks:
            process.kill()
        sys.exit("a rank failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
