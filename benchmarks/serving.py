"""A real model with too few KV blocks serves conversations in four modes: what a hierarchy behind the blocks is worth.

`recompute`: every turn computes its whole prompt. `blocks only`: prefixes are found in the engine's own blocks (what
GPU memory is to a serving engine) until others need these. `tiered`: as before, and what the blocks lost comes from
host memory or disk. `disaggregated`: another worker computes the prompt and puts it; this one loads it and decodes.

Every request is served in all modes, one after the other in a new order, before the next one comes; so ratios are of
the same request at nearly the same time. The same answers must come out. The model computes in steps that begin at
multiples of a chunk, so that its results do not depend on what was loaded, to the last bit.
"""

from __future__ import annotations

import asyncio
import pathlib
import random
import statistics
import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

import kvtier
from benchmarks.harness import Figure, parser, save, show
from kvtier.demo.model import load, prepare
from kvtier.keys import user_cache_folder
from kvtier.paged import PagedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

BLOCK_TOKENS, CHUNK_TOKENS = 16, 64
BLOCKS = 80  # two of the conversations at their full length
ASKED, ANSWERED = 192, 8
MODES = ("recompute", "blocks only", "tiered", "disaggregated")
TIERS = (("pinned-cpu", "64MiB"), ("local-disk", "4GiB"))  # memory holds half of what is stored in the end


@dataclass
class Outcome:
    """What one mode came to."""

    first_token: list[float] = field(default_factory=list)  # seconds, request by request
    seconds: float = 0.0
    prompt_tokens: int = 0
    computed: int = 0  # of the prompts
    said: list[int] = field(default_factory=list)


class Engine:
    """A model, blocks, and a prefix cache in them of whole chunks, least recently used first to go."""

    def __init__(self, model: PreTrainedModel, *, keep: bool) -> None:
        self.model = model
        config = model.config
        shape = (2, config.num_hidden_layers, BLOCKS, BLOCK_TOKENS, config.num_key_value_heads, config.head_dim)
        self.cache = torch.zeros(shape, dtype=model.dtype)
        self.paged = PagedLayout.from_stacked(self.cache, "2LBNHD")
        self.keep = keep
        self.free = list(range(BLOCKS))
        self.known: OrderedDict[tuple[int, ...], list[int]] = OrderedDict()  # a prefix to its last chunk's blocks
        self.computed = 0

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Take the blocks of the longest known beginning, all but the last token at most."""
        found: list[int] = []
        for stop in range(CHUNK_TOKENS, len(tokens), CHUNK_TOKENS):
            blocks = self.known.pop(tuple(tokens[:stop]), None)
            if blocks is None:
                break
            found += blocks
        return found

    def allocate(self, count: int) -> list[int]:
        """Take blocks, from what is least recently used if none are free."""
        while len(self.free) < count:
            self.free += self.known.popitem(last=False)[1]
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def retire(self, tokens: Sequence[int], table: list[int]) -> None:
        """Keep the whole chunks for later turns, give the rest back. The last chunks are the first to go."""
        per_chunk = CHUNK_TOKENS // BLOCK_TOKENS
        whole = len(tokens) // CHUNK_TOKENS if self.keep else 0
        for i in reversed(range(whole)):
            self.known[tuple(tokens[: (i + 1) * CHUNK_TOKENS])] = table[i * per_chunk : (i + 1) * per_chunk]
        self.free += table[whole * per_chunk :]

    def prefill(self, tokens: Sequence[int], done: int, table: Sequence[int]) -> tuple[DynamicCache, int]:
        """Compute what lies behind `done` on top of the blocks, and fill the blocks; return the cache, the next token.

        The model reads one piece of memory per request: the blocks are gathered into it.
        """
        cache = DynamicCache(config=self.model.config)
        if done:
            chunk = self.paged.gather(table[: done // BLOCK_TOKENS])
            for layer, (k, v) in enumerate(zip(chunk["k"], chunk["v"], strict=True)):
                cache.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], layer)
        self.computed += len(tokens) - done
        token = 0
        for low in range(done, len(tokens), CHUNK_TOKENS):
            token = self.step(cache, tokens[low : low + CHUNK_TOKENS])
        whole = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        if whole > done:
            new = {
                "k": torch.stack([layer.keys[0, :, done:whole].transpose(0, 1) for layer in cache.layers]),
                "v": torch.stack([layer.values[0, :, done:whole].transpose(0, 1) for layer in cache.layers]),
            }
            self.paged.scatter(new, table[done // BLOCK_TOKENS : whole // BLOCK_TOKENS])
        return cache, token

    def step(self, cache: DynamicCache, tokens: Sequence[int]) -> int:
        """Compute some tokens; return the next one."""
        with torch.no_grad():
            output = self.model(torch.tensor([list(tokens)]), cache=cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())


class Mode:
    """One way to serve: an engine, perhaps with a store behind it or a prefill worker before it."""

    def __init__(self, name: str, model: PreTrainedModel, folder: pathlib.Path) -> None:
        self.name = name
        self.outcome = Outcome()
        self.engine = Engine(model, keep=name in {"blocks only", "tiered"})
        self.worker = Engine(model, keep=False) if name == "disaggregated" else None
        places = ({}, {"path": str(folder)})
        tiers = [
            {"backend": backend, "capacity": capacity, **place}
            for (backend, capacity), place in zip(TIERS, places, strict=True)
        ]
        self.store = kvtier.open(
            {"chunk_tokens": CHUNK_TOKENS, "tiers": tiers, "deadline_seconds": 30.0},
            namespace=kvtier.Namespace.from_model(model),
            layout=self.engine.paged.kv_layout(),
        )
        self.stored = name in {"tiered", "disaggregated"}

    async def serve(self, tokens: list[int]) -> list[int]:
        """Answer one request."""
        begin = time.perf_counter()
        if self.worker is not None:
            await self._prefill_elsewhere(tokens, self.worker)
        engine = self.engine
        table = engine.match(tokens) if engine.keep else []
        there = len(table) * BLOCK_TOKENS
        table += engine.allocate(-(-len(tokens) // BLOCK_TOKENS) - len(table))
        done = max(there, await self._load(engine, tokens, there, table))
        cache, token = engine.prefill(tokens, done, table)
        self.outcome.first_token.append(time.perf_counter() - begin)
        said = [token]
        while len(said) < ANSWERED:
            said.append(engine.step(cache, said[-1:]))
        if self.stored and self.worker is None:
            whole = len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
            source = engine.paged.source(table[: whole // BLOCK_TOKENS])
            await self.store.put(tokens[:whole], source, start=min(done, whole))
        engine.retire(tokens, table)
        self.outcome.seconds += time.perf_counter() - begin
        self.outcome.prompt_tokens += len(tokens)
        self.outcome.said += said
        self.outcome.computed = engine.computed + (self.worker.computed if self.worker else 0)
        return said

    async def _load(self, engine: Engine, tokens: list[int], start: int, table: list[int]) -> int:
        """Have the stored whole chunks behind `start` written to the blocks; return where they end."""
        if not self.stored:
            return 0
        most = (len(tokens) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        hit = await self.store.get(tokens, start=start, max_tokens=most, out=engine.paged.target(table))
        return hit.num_tokens // CHUNK_TOKENS * CHUNK_TOKENS if hit else 0

    async def _prefill_elsewhere(self, tokens: list[int], worker: Engine) -> None:
        table = worker.allocate(-(-len(tokens) // BLOCK_TOKENS))
        done = await self._load(worker, tokens, 0, table)
        whole = len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
        if whole > done:
            worker.prefill(tokens[:whole], done, table)
            await self.store.put(tokens[:whole], worker.paged.source(table[: whole // BLOCK_TOKENS]), start=done)
        worker.retire(tokens, table)


async def replay(model: PreTrainedModel, sessions: int, turns: int, folder: pathlib.Path) -> dict[str, Outcome]:
    """Serve all conversations, turn by turn in a mixed order, each request in every mode."""
    dice = random.Random(4)
    modes = [Mode(name, model, folder / name.replace(" ", "-")) for name in MODES]
    for mode in modes:
        await mode.store.__aenter__()
        mode.engine.step(DynamicCache(config=model.config), range(CHUNK_TOKENS))  # warm
    spoken: list[list[int]] = [[] for _ in range(sessions)]
    for number in [number for _ in range(turns) for number in dice.sample(range(sessions), sessions)]:
        spoken[number] += [dice.randrange(1000, 40000) for _ in range(ASKED)]
        answers = [await mode.serve(list(spoken[number])) for mode in dice.sample(modes, len(modes))]
        if any(said != answers[0] for said in answers):
            raise AssertionError(f"two modes gave different answers: {answers}")
        spoken[number] += answers[0]
    for mode in modes:
        await mode.store.aclose()
    return {mode.name: mode.outcome for mode in modes}


def figures_of(outcomes: dict[str, Outcome]) -> list[Figure]:
    """Return the time to the first token of each mode, and how much faster than recomputing it was."""
    base = outcomes["recompute"].first_token
    figures = []
    for name, outcome in outcomes.items():
        ratios = [slow / fast for slow, fast in zip(base, outcome.first_token, strict=True)]
        figures.append(
            Figure(
                name=f"first token, {name}",
                seconds=statistics.median(outcome.first_token),
                gigabytes_per_second=None,
                ratio=statistics.median(ratios),
                ratio_lower_quartile=statistics.quantiles(ratios, n=4)[0],
            )
        )
    return figures


def table_of(outcomes: dict[str, Outcome], turns: int) -> dict[str, dict[str, float]]:
    """Return the figures per mode; later turns are those that have something to find."""
    rows = {}
    for name, outcome in outcomes.items():
        later = outcome.first_token[len(outcome.first_token) // turns :]
        rows[name] = {
            "ttft_p50_seconds": statistics.median(outcome.first_token),
            "ttft_p99_seconds": statistics.quantiles(outcome.first_token, n=100, method="inclusive")[98],
            "later_turns_ttft_p50_seconds": statistics.median(later),
            "tokens_per_second": len(outcome.said) / outcome.seconds,
            "prefill_tokens_saved": 1 - outcome.computed / outcome.prompt_tokens,
        }
    return rows


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/serving.json`."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument("--sessions", type=int, default=4, help="conversations at a time")
    flags.add_argument("--turns", type=int, default=3)
    options = flags.parse_args(arguments)
    model, _ = load(prepare(user_cache_folder(), print))
    with tempfile.TemporaryDirectory() as folder:
        outcomes = asyncio.run(replay(model, options.sessions, options.turns, pathlib.Path(folder)))
    figures = figures_of(outcomes)
    show(figures)
    rows = table_of(outcomes, options.turns)
    for name, row in rows.items():
        first, last, later = (1e3 * row[f"{key}_seconds"] for key in ("ttft_p50", "ttft_p99", "later_turns_ttft_p50"))
        saved, speed = row["prefill_tokens_saved"], row["tokens_per_second"]
        print(
            f"{name:14} TTFT p50 {first:6.0f} ms (later turns {later:6.0f}), p99 {last:6.0f} ms; "
            f"{speed:5.1f} tokens/s; {saved:4.0%} of prefill saved"
        )
    if not options.no_save:
        extra = {"modes": rows, "model": "SmolLM2-135M-Instruct, float32", "blocks": BLOCKS, "tiers": TIERS}
        save("serving", figures, flags=vars(options), extra=extra)
    return figures


if __name__ == "__main__":
    main()
