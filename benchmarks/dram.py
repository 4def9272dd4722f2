"""How fast chunks get into and out of the arena and the result pool, against memcpy between warm buffers.

The copies alone: what the store makes of them is measured by `benchmarks.store`.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from typing import TYPE_CHECKING

import torch

from benchmarks.harness import MIB, Case, Figure, fill, measure, parser, save, show
from kvtier.buffers import Arena, ResultPool
from kvtier.chunk.segments import SegmentSpec
from kvtier.chunk.transfer import copy_in, copy_out

if TYPE_CHECKING:
    from kvtier.buffers import Slot

LAYERS, HEADS, DIM, TOKENS = 32, 8, 128, 256  # K and V of such a chunk in bfloat16: 2 x 16 MiB
HALF = LAYERS * HEADS * DIM * TOKENS * 2
CHUNK = 2 * HALF
CHUNKS = 8  # in turn, so that no cache holds the next one
SHAPES = {"LTHD": (LAYERS, TOKENS, HEADS, DIM), "LHTD": (LAYERS, HEADS, TOKENS, DIM)}
GOALS = {"copy_in LTHD": 0.95, "copy_in LHTD": 0.85, "copy_out LTHD": 0.95, "copy_out LHTD": 0.85, "result pool": 0.855}


class Bench:
    """Warm memory of all kinds: a prompt's KV in both axis orders, slots, outputs, recycled results."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.arena = Arena((CHUNKS + 2) * CHUNK, staging=0, pin=False)
        self.pool = ResultPool(2 * CHUNK)
        self.slots = [self._slot(seed) for seed in range(CHUNKS)]
        self.prompt = {axes: self._prompt(axes) for axes in SHAPES}
        self.out = {axes: torch.zeros((2, *shape), dtype=torch.bfloat16) for axes, shape in SHAPES.items()}
        self.turn = itertools.cycle(range(CHUNKS))

    def _slot(self, seed: int) -> Slot:
        slot = self.arena.try_allocate(CHUNK)
        if slot is None:
            raise MemoryError("the arena is too small")
        fill(slot.view(), seed=seed)
        return slot

    def _prompt(self, axes: str) -> torch.Tensor:
        """KV of CHUNKS chunks in one piece: [2, *axes] with the token axis CHUNKS times as long."""
        shape = list(SHAPES[axes])
        shape[axes.index("T")] *= CHUNKS
        kv = torch.empty((2, *shape), dtype=torch.bfloat16)
        fill(memoryview(kv.view(torch.uint8).numpy()).cast("B"), seed=100)
        return kv

    def chunk(self, axes: str, number: int) -> torch.Tensor:
        """K and V of one chunk, a strided slice of the prompt."""
        return self.prompt[axes].narrow(1 + axes.index("T"), number * TOKENS, TOKENS)

    def memcpy(self) -> None:
        """Copy one chunk between warm buffers, as libc does it."""
        number = next(self.turn)
        source = self.slots[(number + CHUNKS // 2) % CHUNKS]
        ctypes.memmove(self.slots[number].address, source.address, CHUNK)

    def copy_in(self, axes: str) -> None:
        """Snapshot a slice of the prompt into a slot, as put does."""
        number = next(self.turn)
        kv, slot = self.chunk(axes, number), self.slots[number]
        for part in range(2):
            copy_in(kv[part], slot.view(part * HALF, HALF))

    def copy_out(self, axes: str) -> None:
        """Fill warm tensors of the caller, as get(out=) does."""
        self._unpack(self.slots[next(self.turn)], axes, list(self.out[axes]))

    def result_pool(self) -> None:
        """Fill a recycled result, as get without out= does."""
        view = self.loop.run_until_complete(self.pool.take(CHUNK, timeout=1))
        into = torch.frombuffer(view, dtype=torch.bfloat16).view(2, *SHAPES["LTHD"])
        self._unpack(self.slots[next(self.turn)], "LTHD", list(into))

    def fresh_tensor(self) -> None:
        """Fill a new tensor: what the pool avoids."""
        into = torch.empty((2, *SHAPES["LTHD"]), dtype=torch.bfloat16)
        self._unpack(self.slots[next(self.turn)], "LTHD", list(into))

    def _unpack(self, slot: Slot, axes: str, into: list[torch.Tensor]) -> None:
        spec = SegmentSpec(name="k", dtype="bfloat16", shape=SHAPES[axes])
        for part in range(2):
            copy_out(slot.view(part * HALF, HALF), spec, into[part])

    def cases(self) -> list[Case]:
        """Return every case, the base first."""
        return [
            Case(name="memcpy", call=self.memcpy, size=CHUNK),
            *(Case(name=f"copy_in {axes}", call=lambda a=axes: self.copy_in(a), size=CHUNK) for axes in SHAPES),
            *(Case(name=f"copy_out {axes}", call=lambda a=axes: self.copy_out(a), size=CHUNK) for axes in SHAPES),
            Case(name="result pool", call=self.result_pool, size=CHUNK),
            Case(name="fresh tensor", call=self.fresh_tensor, size=CHUNK),
        ]


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/dram.json`."""
    flags = parser(__doc__, rounds=15)
    flags.add_argument("--threads", type=int, default=1, help="threads of one tensor copy; memcpy has one")
    options = flags.parse_args(arguments)
    torch.set_num_threads(options.threads)
    bench = Bench()
    figures = measure(bench.cases(), base="memcpy", rounds=options.rounds, goals=GOALS)
    show(figures)
    if not options.no_save:
        save("dram", figures, flags=vars(options), extra={"chunk_bytes": CHUNK, "mib": MIB})
    return figures


if __name__ == "__main__":
    main()
