"""What a codec is: pure functions from one segment's bytes to fewer bytes and back, safe in any thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvtier.chunk.segments import CodecOption, SegmentSpec


class Codec(ABC):
    """One step of a chain. Knows no storage, no keys and no asyncio; holds no mutable state.

    `source` and `into` are one-dimensional byte views (`memoryview`, format "B") that do not overlap and that the
    codec must not keep; `source` may be read-only and is never empty. Encoding is deterministic: the same bytes give
    the same bytes, in every process.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool] = False

    def options(self) -> Mapping[str, CodecOption]:
        """Return what a reader needs to build this codec again: stored in the entry, passed to the class by keyword."""
        return {}

    @abstractmethod
    def bound(self, size: int, spec: SegmentSpec) -> int:
        """Return the most bytes `encode` can produce for `size` source bytes."""

    @abstractmethod
    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        """Write the encoded form to the front of `into` (at least `bound` bytes long); return its length."""

    @abstractmethod
    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:
        """Fill `into` exactly.

        `into` has the length that was encoded. Stored bytes are not trusted: whatever they declare, nothing larger
        than `into` is allocated, and what does not decode to exactly `len(into)` bytes raises `CodecError`.
        """


class TensorCodec(Codec):
    """A codec that also reads and writes tensors where they lie, so that no dense copy is made first.

    As the first step of a chain it takes the place of the copy between a caller's tensors and the store. Both methods
    produce what `encode` and `decode` do for the same elements laid out densely.
    """

    @abstractmethod
    def encode_tensor(self, source: torch.Tensor, into: memoryview, spec: SegmentSpec) -> int:
        """Encode a dense host tensor of `spec`'s shape and element type, of any strides; as `encode`."""

    @abstractmethod
    def decode_tensor(self, source: memoryview, into: torch.Tensor, spec: SegmentSpec) -> None:
        """Fill a host tensor of `spec`'s shape and element type, of any strides; raises as `decode`."""
