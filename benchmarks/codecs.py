"""How fast codecs encode and decode real KV, as a fraction of memcpy of the same bfloat16 bytes in the same round.

The KV of 1,024 tokens of SmolLM2-135M in chunks of 256, on the route with numba and on the one with torch alone,
straight between warm memory; by one thread and by two. Nothing is tiled or repeated: a compressor would find it.

Every call stands between two copies, and what counts is the median of its ratios to them. One thread is judged by its
own processor time, so that other work on the machine takes part in neither; two threads by the clock. The `bound` cases
are loops that read and write the bytes of `int8` and compute next to nothing; with torch, the fewest operations that
turn numbers into codes and back, without the search for limits: to float32, one multiplication, and to the other type.
"""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import zstandard

from benchmarks.codec_quality import PAGE, between
from benchmarks.harness import Case, Figure, parser, save, show
from kvtier.chunk.segments import SegmentSpec
from kvtier.codecs import eager, fast
from kvtier.codecs.base import TensorCodec
from kvtier.codecs.bf16_split import Bf16SplitCodec
from kvtier.codecs.fp8 import Fp8Codec
from kvtier.codecs.int4 import Int4Codec, K5V4Codec
from kvtier.codecs.int8 import Int8Codec
from kvtier.codecs.zstd import ZstdCodec
from kvtier.demo.model import load, prepare
from kvtier.keys import user_cache_folder
from kvtier.testing.codec_quality import CHUNK, KV, Judge, token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.codecs.base import Codec

CONTEXT = 1024
CODECS: list[Codec] = [Int8Codec(), Int4Codec(), K5V4Codec(), Fp8Codec(), Bf16SplitCodec(), ZstdCodec()]
GOALS = {
    "int8 encode, numba": 0.8,
    "int8 decode, numba": 1.0,
    "int4 encode, numba": 0.8,
    "int4 decode, numba": 1.0,
    "k5v4 encode, numba": 0.5,
    "k5v4 decode, numba": 0.8,
    "int8 encode, torch": 0.25,
    "int8 decode, torch": 0.5,
    "int4 encode, torch": 0.2,
    "int4 decode, torch": 0.3,
    "bf16-split encode, numba": 0.06,
    "bf16-split decode, numba": 0.19,
}
ROUTES = {"numba": True, "torch": False}


def real_kv() -> KV:
    """Return the KV of the code text; computed once, then kept in the user's cache."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415  # an extra

    path = user_cache_folder() / "benchmark-kv.safetensors"
    if not path.exists():
        model, tokenizer = load(prepare(user_cache_folder(), print))
        exact = Judge(model, token_ids(tokenizer, "code", CONTEXT + 2), context=CONTEXT).exact
        save_file({"k": exact.k, "v": exact.v}, path)
    tensors = load_file(path)
    return KV(tensors["k"], tensors["v"])


@dataclass(slots=True)
class Piece:
    """K or V of one chunk, in warm memory of its own, with room for every form of it."""

    spec: SegmentSpec
    raw: torch.Tensor
    back: torch.Tensor
    stored: dict[str, tuple[bytearray, int]]

    def view(self, tensor: torch.Tensor) -> memoryview:
        """Return a tensor's bytes."""
        return memoryview(tensor.view(torch.uint8).numpy()).cast("B")

    def encode(self, codec: Codec) -> None:
        """Encode into memory that is there already."""
        memory = self.stored.get(codec.name)
        if memory is None:
            memory = (bytearray(codec.bound(self.raw.nbytes, self.spec)), 0)
        if isinstance(codec, TensorCodec):
            size = codec.encode_tensor(self.raw, memoryview(memory[0]), self.spec)
        else:
            size = codec.encode(self.view(self.raw), memoryview(memory[0]), self.spec)
        self.stored[codec.name] = (memory[0], size)

    def decode(self, codec: Codec) -> None:
        """Decode into warm memory."""
        memory, size = self.stored[codec.name]
        source = memoryview(memory)[:size]
        if isinstance(codec, TensorCodec):
            codec.decode_tensor(source, self.back, self.spec)
        else:
            codec.decode(source, self.view(self.back), self.spec)

    def copy(self) -> None:
        """Copy as libc does."""
        ctypes.memmove(self.back.data_ptr(), self.raw.data_ptr(), self.raw.nbytes)


def pieces_of(kv: KV) -> list[Piece]:
    """Cut KV into segments."""
    pieces = []
    for name, tensor in (("k", kv.k), ("v", kv.v)):
        for first in range(0, tensor.shape[1], CHUNK):
            raw = tensor[:, first : first + CHUNK].contiguous()
            spec = SegmentSpec(name=name, dtype="bfloat16", shape=tuple(raw.shape), axes="LTHD", first_token=first)
            pieces.append(Piece(spec, raw, torch.zeros_like(raw), {}))
    return pieces


def each(work: Callable[[Piece], object], pieces: Sequence[Piece], threads: int) -> Callable[[], None]:
    """Return a call that does `work` on all pieces, by so many threads at once."""

    def run(part: Sequence[Piece]) -> None:
        for piece in part:
            work(piece)

    def spread() -> None:
        others = [threading.Thread(target=run, args=(pieces[place::threads],)) for place in range(1, threads)]
        for thread in others:
            thread.start()
        run(pieces[::threads])
        for thread in others:
            thread.join()

    return spread


def on_route(fast_route: bool, call: Callable[[], None]) -> Callable[[], None]:  # noqa: FBT001  # read from a table
    """Return `call` with numba's kernels, or without them."""

    def switched() -> None:
        fast._installed = fast_route  # noqa: SLF001  # no option of the library: nobody else has a use for it
        call()

    return switched


def cases_of(pieces: Sequence[Piece], size: int, threads: int) -> list[Case]:
    """Return memcpy, every codec on both routes, and zstd as its library has it."""
    cases = [Case(name="memcpy", call=each(Piece.copy, pieces, threads), size=size)]
    for codec in CODECS:
        for route, switch in ROUTES.items():
            if isinstance(codec, ZstdCodec | Fp8Codec) and switch:
                continue  # they have one route
            for verb in ("encode", "decode"):
                call = each(lambda piece, verb=verb, codec=codec: getattr(piece, verb)(codec), pieces, threads)
                cases.append(Case(name=f"{codec.name} {verb}, {route}", call=on_route(switch, call), size=size))
    if threads == 1:
        compressor = zstandard.ZstdCompressor(level=1)
        cases.append(
            Case(
                name="zstd's library, encode",
                call=lambda: [compressor.compress(piece.view(piece.raw)) for piece in pieces],
                size=size,
            )
        )
    return cases


def bounds_of(pieces: Sequence[Piece], size: int) -> list[Case]:
    """Return loops with the traffic of `int8` and hardly any arithmetic; none without numba."""
    if not fast._installed:  # noqa: SLF001  # as in on_route
        return []
    import numba  # noqa: PLC0415  # an extra

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]  # numba has no stubs
    def narrow(words: np.ndarray, octets: np.ndarray) -> None:
        for at in range(len(words)):
            octets[at] = words[at] >> 8

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]  # likewise
    def widen(words: np.ndarray, octets: np.ndarray) -> None:
        for at in range(len(words)):
            words[at] = octets[at] << 8

    half = {id(piece): np.zeros(piece.raw.numel(), np.uint8) for piece in pieces}

    def words_of(tensor: torch.Tensor) -> np.ndarray:
        words: np.ndarray = tensor.view(torch.uint16).numpy().reshape(-1)
        return words

    narrow_there, widen_there = torch_bounds(pieces)
    return [
        Case(name="bound of int8 encode, torch", call=narrow_there, size=size),
        Case(name="bound of int8 decode, torch", call=widen_there, size=size),
        Case(
            name="bound of int8 encode",
            call=each(lambda piece: narrow(words_of(piece.raw), half[id(piece)]), pieces, 1),
            size=size,
        ),
        Case(
            name="bound of int8 decode",
            call=each(lambda piece: widen(words_of(piece.back), half[id(piece)]), pieces, 1),
            size=size,
        ),
    ]


def torch_bounds(pieces: Sequence[Piece]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return torch's least work to encode and to decode as `int8` does, in parts that stay in the cache."""
    codes = [torch.zeros(piece.raw.shape, dtype=torch.uint8) for piece in pieces]
    layers = max(1, eager.TOGETHER // pieces[0].raw[0].numel())
    numbers = torch.zeros(layers, *pieces[0].raw.shape[1:])

    def narrow() -> None:
        for piece, coded in zip(pieces, codes, strict=True):
            for some, into in zip(piece.raw.split(layers), coded.split(layers), strict=True):
                part = numbers[: len(some)]
                part.copy_(some)
                into.copy_(part.mul_(0.5).add_(eager.ROUND).view(torch.int32))

    def widen() -> None:
        for piece, coded in zip(pieces, codes, strict=True):
            for into, some in zip(piece.back.split(layers), coded.split(layers), strict=True):
                part = numbers[: len(some)]
                part.copy_(some)
                into.copy_(part.mul_(0.5))

    return narrow, widen


def paired(cases: Sequence[Case], *, rounds: int, clock: Callable[[], float], goals: dict[str, float]) -> list[Figure]:
    """Time every case between two calls of the first one, in another order each round."""
    base, *others = cases
    chance = random.Random(1)
    taken: dict[str, list[tuple[float, float]]] = {case.name: [] for case in others}

    def timed(case: Case) -> float:
        begin = clock()
        case.call()
        return clock() - begin

    for case in cases:
        case.call()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for case in chance.sample(others, len(others)):
                before, own, after = timed(base), timed(case), timed(base)
                taken[case.name].append(((before + after) / 2, own))
    finally:
        gc.enable()
    found = {base.name: [(copy, copy) for pairs in taken.values() for copy, _ in pairs], **taken}
    return [_figure(case, found[case.name], goals.get(case.name)) for case in cases]


def _figure(case: Case, pairs: Sequence[tuple[float, float]], goal: float | None) -> Figure:
    ratios = [copy / own for copy, own in pairs]
    median = statistics.median(own for _, own in pairs)
    return Figure(
        name=case.name,
        seconds=median,
        gigabytes_per_second=case.size / median / 1e9,
        ratio=statistics.median(ratios),
        ratio_lower_quartile=statistics.quantiles(ratios, n=4)[0],
        goal=goal,
    )


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Measure, print, save."""
    flags = parser(__doc__, rounds=15)
    flags.add_argument("--threads", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    given = flags.parse_args(arguments)
    pieces = pieces_of(real_kv())
    torch.set_num_threads(1)
    size = sum(piece.raw.nbytes for piece in pieces)
    bits = {}
    for codec in CODECS:
        for piece in pieces:
            piece.encode(codec)
        bits[codec.name] = sum(piece.stored[codec.name][1] for piece in pieces) * 16 / size
    print("stored bits per number: " + ", ".join(f"{name} {value:.2f}" for name, value in bits.items()))
    figures: list[Figure] = []
    for threads in given.threads:
        print(f"\n{threads} thread(s), {size / 1e6:.1f} MB of bfloat16", flush=True)
        cases, clock, goals = cases_of(pieces, size, threads), time.perf_counter, {}
        if threads == 1:
            cases, clock, goals = [*cases, *bounds_of(pieces, size)], time.thread_time, GOALS
        found = paired(cases, rounds=given.rounds, clock=clock, goals=goals)
        show(found)
        figures += [figure if threads == 1 else _renamed(figure, threads) for figure in found]
    if not given.no_save:
        save("codecs", figures, flags=vars(given), extra={"bits_per_number": bits, "bytes": size})
        write_page(figures)
    return figures


def table(figures: Sequence[Figure]) -> str:
    """Return the page's table in Markdown: encode and decode as fractions of memcpy, by one thread."""
    ratio = {figure.name: figure.ratio for figure in figures}
    lines = ["| one thread, encode / decode | numba | torch alone |", "|---|---|---|"]
    for codec in CODECS:
        row = []
        for route in ROUTES:
            both = [ratio.get(f"{codec.name} {verb}, {route}") for verb in ("encode", "decode")]
            row.append(" / ".join(f"{value:.2f}" for value in both if value is not None))
        lines.append(f"| `{codec.name}` | " + " | ".join(row) + " |")
    return "\n".join(lines)


def write_page(figures: Sequence[Figure]) -> None:
    """Put the table between its marks on the page about codecs."""
    PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), "speed", table(figures)), encoding="utf-8")


def _renamed(figure: Figure, threads: int) -> Figure:
    return replace(figure, name=f"{figure.name}, {threads} threads")


if __name__ == "__main__":
    main()
