"""Sample containers: one of each kind, small enough to damage bit by bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from kvtier.chunk.container import CodecRef, Header, payload_offset, payload_size, plan_segments, seal
from kvtier.chunk.segments import SegmentSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Unpack

KEY = "0123456789abcdef/fedcba9876543210/00112233445566778899aabbccddeeff"
PARENT = "0123456789abcdef/fedcba9876543210/ffeeddccbbaa99887766554433221100"
NAMESPACE = "0123456789abcdef"
CREATED = 1_700_000_000.25
_PAINT = 0xEE


@dataclass(frozen=True, slots=True)
class SealedSample:
    """A container in memory, with what went into it."""

    view: memoryview
    header: Header
    stored: tuple[bytes, ...]

    @property
    def bytes(self) -> bytes:
        """The container as it would lie on a medium."""
        return bytes(self.view)


class HeaderFields(TypedDict, total=False):
    """Fields of a `Header` that a sample may set."""

    key: str
    namespace: str
    parent: str | None
    kind: str
    chain: tuple[CodecRef, ...]
    tokens: int
    created: float
    expires: float | None
    lossy: bool
    epoch: int


def seal_parts(
    specs: Sequence[SegmentSpec], stored: Sequence[bytes], *, paint: int = _PAINT, **fields: Unpack[HeaderFields]
) -> SealedSample:
    """Seal `stored[i]` as the segment like `specs[i]`, in memory that held `paint`."""
    segments = plan_segments(specs, [len(item) for item in stored])
    chosen: HeaderFields = {"key": KEY, "namespace": NAMESPACE, "kind": "kv", "created": CREATED, **fields}
    offset = payload_offset(specs, chosen["key"])
    view = memoryview(bytearray([paint]) * (offset + payload_size(segments)))
    for segment, item in zip(segments, stored, strict=True):
        start = offset + segment.offset
        view[start : start + len(item)] = item
    header = seal(view, Header(segments=segments, **chosen), payload_offset=offset, size=len(view))
    return SealedSample(view, header, tuple(stored))


def kv_specs(tokens: int = 5) -> list[SegmentSpec]:
    """Return K and V of two layers, three heads, four dimensions."""
    shape = (2, tokens, 3, 4)
    return [SegmentSpec(name=n, dtype="bfloat16", shape=shape, axes="LTHD", first_token=256) for n in ("k", "v")]


def kv_container(*, paint: int = _PAINT, **fields: Unpack[HeaderFields]) -> SealedSample:
    """Return a chunk of five tokens, not encoded."""
    chance = random.Random(1)
    given: HeaderFields = {"tokens": 5, "parent": PARENT, **fields}
    return seal_parts(kv_specs(), [chance.randbytes(240), chance.randbytes(240)], paint=paint, **given)


def coded_container() -> SealedSample:
    """Return a chunk behind two codecs with options; one segment is longer than a page."""
    chance = random.Random(2)
    chain = (
        CodecRef(name="int8", options={"group": 32, "symmetric": True}),
        CodecRef(name="zstd", options={"level": 1}),
    )
    stored = [chance.randbytes(4097), chance.randbytes(33)]
    return seal_parts(
        kv_specs(tokens=200), stored, chain=chain, tokens=200, lossy=True, expires=1_800_000_000.5, epoch=7
    )


def mapping_container() -> SealedSample:
    """Return three tensors under odd names, one of them empty."""
    specs = [
        SegmentSpec(name="", dtype="float32", shape=()),
        SegmentSpec(name="empty", dtype="int64", shape=(0, 4)),
        SegmentSpec(name="Ω \x00 名", dtype="bool", shape=(3,)),
    ]
    return seal_parts(specs, [b"\x01\x02\x03\x04", b"", b"\x01\x00\x01"], key="any / key", kind="mapping")


def bytes_container() -> SealedSample:
    """Return a byte string."""
    specs = [SegmentSpec(name="", dtype="bytes", shape=(11,))]
    return seal_parts(specs, [b"hello world"], key="b", kind="bytes", namespace="")


def empty_container() -> SealedSample:
    """Return a mapping of nothing."""
    return seal_parts([], [], key="none", kind="mapping")


SAMPLES: dict[str, Callable[[], SealedSample]] = {
    "kv": kv_container,
    "coded": coded_container,
    "mapping": mapping_container,
    "bytes": bytes_container,
    "empty": empty_container,
}
"""A maker of each sample, by name."""
