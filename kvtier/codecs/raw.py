"""Bytes as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.chunk.memory import copy_bytes
from kvtier.codecs.base import Codec
from kvtier.errors import CodecError

if TYPE_CHECKING:
    from kvtier.chunk.segments import SegmentSpec


class RawCodec(Codec):
    """The identity. A chain leaves it out, so entries never name it."""

    name = "raw"

    def bound(self, size: int, spec: SegmentSpec) -> int:  # noqa: ARG002  # the contract's signature
        """Return `size`: nothing is added."""
        return size

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:  # noqa: ARG002
        """Copy `source` to the front of `into`."""
        copy_bytes(source, into[: len(source)])
        return len(source)

    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:  # noqa: ARG002
        """Copy `source`, which must have the length of `into`."""
        if len(source) != len(into):
            raise CodecError(f"{len(source)} raw bytes for a value of {len(into)}")
        copy_bytes(source, into)
