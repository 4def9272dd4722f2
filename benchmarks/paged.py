"""How fast chunks are gathered from an engine's blocks and scattered to them, against memcpy between warm buffers.

256 tokens in 16-token blocks at random places of a pool four times as large, on one thread.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from typing import TYPE_CHECKING

import torch

from benchmarks.harness import Case, Figure, fill, measure, parser, save, show
from kvtier.paged import PagedLayout

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, HEADS, DIM, TOKENS, BLOCK = 32, 8, 128, 256, 16
CHUNK = 2 * LAYERS * TOKENS * HEADS * DIM * 2  # bfloat16
POOL_BLOCKS = 4 * TOKENS // BLOCK
OUTPUTS = 3  # in turn, so that no cache holds the next one
GOAL = 0.8


class Bench:
    """A pool of blocks in the engine's order, chunks in the store's, and a table of random blocks for each call."""

    def __init__(self) -> None:
        self.dice = random.Random(3)
        self.caches = {axes: self._cache(axes) for axes in ("2LBNHD", "L2BNHD", "LB2NHD", "2LBHND")}
        self.paged = {axes: PagedLayout.from_stacked(cache, axes) for axes, cache in self.caches.items()}
        layers = [[layer.clone() for layer in part] for part in self.caches["2LBNHD"]]
        self.paged["list"] = PagedLayout.from_list(*layers)
        self.paged["native"] = PagedLayout.from_stacked(self.caches["LB2NHD"], "LB2NHD", order="native")
        self.chunks = {name: itertools.cycle([self._chunk(name) for _ in range(OUTPUTS)]) for name in self.paged}
        self.plain = itertools.cycle([torch.ones(CHUNK, dtype=torch.uint8) for _ in range(2 * OUTPUTS)])

    def _cache(self, axes: str) -> torch.Tensor:
        sizes = {"2": 2, "L": LAYERS, "B": POOL_BLOCKS, "N": BLOCK, "H": HEADS, "D": DIM}
        cache = torch.empty([sizes[letter] for letter in axes], dtype=torch.bfloat16)
        fill(memoryview(cache.view(torch.uint8).numpy()).cast("B"), seed=1)
        return cache

    def _chunk(self, name: str) -> dict[str, torch.Tensor]:
        return self.paged[name].gather(self._blocks())

    def _blocks(self) -> list[int]:
        return self.dice.sample(range(POOL_BLOCKS), TOKENS // BLOCK)

    def memcpy(self) -> None:
        """Copy one chunk between warm buffers, as libc does it."""
        into, source = next(self.plain), next(self.plain)
        ctypes.memmove(into.data_ptr(), source.data_ptr(), CHUNK)

    def gather(self, name: str) -> None:
        """Gather one chunk into warm memory."""
        self.paged[name].gather(self._blocks(), out=next(self.chunks[name]))

    def scatter(self, name: str) -> None:
        """Scatter one chunk over warm blocks."""
        self.paged[name].scatter(next(self.chunks[name]), self._blocks())

    def cases(self) -> list[Case]:
        """Return every case, the base first."""
        made = [Case(name="memcpy", call=self.memcpy, size=CHUNK)]
        calls: list[tuple[str, Callable[[str], None]]] = [("gather", self.gather), ("scatter", self.scatter)]
        for verb, call in calls:
            made += [Case(name=f"{verb} {name}", call=lambda c=call, n=name: c(n), size=CHUNK) for name in self.paged]
        return made


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/paged.json`."""
    options = parser(__doc__, rounds=15).parse_args(arguments)
    torch.set_num_threads(1)
    goals = {f"{verb} {name}": GOAL for verb in ("gather", "scatter") for name in ("2LBNHD", "L2BNHD", "LB2NHD")}
    figures = measure(Bench().cases(), base="memcpy", rounds=options.rounds, goals=goals)
    show(figures)
    if not options.no_save:
        extra = {"chunk_bytes": CHUNK, "block_tokens": BLOCK, "chunk_tokens": TOKENS, "pool_blocks": POOL_BLOCKS}
        save("paged", figures, flags=vars(options), extra=extra)
    return figures


if __name__ == "__main__":
    main()
