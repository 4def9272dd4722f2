"""Values that codecs stumble over: every dtype, odd shapes, and bit patterns that arithmetic would change."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtier.chunk.dtypes import ITEMSIZE, raw_size
from kvtier.chunk.segments import SegmentSpec
from kvtier.chunk.tensors import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
SHAPES: dict[str, tuple[int, ...]] = {
    "LTHD": (2, 9, 3, 8),
    "LHTD": (2, 3, 9, 8),
    "LTD": (3, 7, 24),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value: what it is like, and its bytes. `finite` tells that a lossy codec owes it its error bound."""

    title: str
    spec: SegmentSpec
    raw: bytes
    finite: bool = True


def samples() -> Iterator[Sample]:
    """Yield the whole corpus, the same in every run; no sample is empty, since no codec ever sees an empty segment."""
    yield from _kv_like()
    yield from _special_floats()
    yield from _every_dtype()
    yield from _byte_strings()


def kv_sample(seed: int, *, tokens: int = 64, dtype: str = "bfloat16") -> Sample:
    """Return a chunk of KV-like numbers: a few channels much larger than the rest, as real keys have."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, tokens, 4, 32)
    values = torch.randn(shape, generator=generator)
    values[..., :2] *= 30
    spec = SegmentSpec(name="k", dtype=dtype, shape=shape, axes="LTHD", first_token=0)
    return Sample(
        title=f"kv {dtype} {tokens} tokens, seed {seed}", spec=spec, raw=_bytes(values.to(TORCH_DTYPES[dtype]))
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def _kv_like() -> Iterator[Sample]:
    for dtype in FLOATS:
        yield kv_sample(1, tokens=5, dtype=dtype)
        for axes, shape in SHAPES.items():
            values = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(TORCH_DTYPES[dtype])
            spec = SegmentSpec(name="v", dtype=dtype, shape=shape, axes=axes, first_token=512)
            yield Sample(title=f"{axes} {dtype}", spec=spec, raw=_bytes(values))
        yield _constant(dtype, "zeros", 0.0)
        yield _constant(dtype, "one value", -1.5)


def _constant(dtype: str, title: str, value: float) -> Sample:
    shape = SHAPES["LTHD"]
    spec = SegmentSpec(name="k", dtype=dtype, shape=shape, axes="LTHD", first_token=-1)
    return Sample(title=f"{title} {dtype}", spec=spec, raw=_bytes(torch.full(shape, value).to(TORCH_DTYPES[dtype])))


def _special_floats() -> Iterator[Sample]:
    """Every 16-bit pattern and random 8-, 32- and 64-bit ones: NaN payloads, infinities, -0.0, subnormals."""
    patterns = b"".join(i.to_bytes(2, "little") for i in range(1 << 16))
    for dtype in ("bfloat16", "float16"):
        spec = SegmentSpec(name="k", dtype=dtype, shape=(2, 128, 4, 64), axes="LTHD", first_token=0)
        yield Sample(title=f"all patterns {dtype}", spec=spec, raw=patterns, finite=False)
    for dtype in ("float8_e4m3fn", "float8_e5m2", "float32", "float64"):
        shape = SHAPES["LHTD"]
        raw = random.Random(dtype).randbytes(raw_size(dtype, shape))
        spec = SegmentSpec(name="k", dtype=dtype, shape=shape, axes="LHTD", first_token=0)
        yield Sample(title=f"random patterns {dtype}", spec=spec, raw=raw, finite=False)


def _every_dtype() -> Iterator[Sample]:
    for dtype in ITEMSIZE:
        if dtype == "bytes":
            continue
        for shape in ((), (1,), (7,), (3, 1, 5)):
            raw = random.Random(f"{dtype}{shape}").randbytes(raw_size(dtype, shape))
            spec = SegmentSpec(name="", dtype=dtype, shape=shape)
            yield Sample(title=f"{dtype} {list(shape)}", spec=spec, raw=raw, finite=False)


def _byte_strings() -> Iterator[Sample]:
    texts = {
        "one byte": b"\x00",
        "a page less one": random.Random(3).randbytes(4095),
        "a page and one": b"kvtier " * 585 + b"kv",
        "runs": b"".join(bytes([i % 256]) * (i % 700) for i in range(900)),
        "random": random.Random(4).randbytes((1 << 18) + 13),
    }
    for title, raw in texts.items():
        spec = SegmentSpec(name="", dtype="bytes", shape=(len(raw),))
        yield Sample(title=title, spec=spec, raw=raw, finite=False)
