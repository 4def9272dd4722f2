"""Codecs with one fault each: the kit must catch every one, or it proves nothing about the codecs that pass."""

from __future__ import annotations

import itertools
import struct
import time
import zlib
from typing import TYPE_CHECKING

from kvtier.codecs.base import Codec
from kvtier.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.chunk.segments import CodecOption, SegmentSpec

_LENGTH = struct.Struct("<Q")


class SoundCodec(Codec):
    """The sound one that the others break: a length, then the deflated bytes."""

    name = "sound"

    def __init__(self, *, level: int = 1) -> None:
        self._level = level

    def options(self) -> Mapping[str, CodecOption]:
        """Return the level."""
        return {"level": self._level}

    def bound(self, size: int, spec: SegmentSpec) -> int:
        """Return deflate's worst case and the length's eight bytes."""
        return size + (size >> 10) + 64

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        """Deflate."""
        packed = _LENGTH.pack(len(source)) + zlib.compress(source, self._level)
        into[: len(packed)] = packed
        return len(packed)

    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:
        """Inflate what declares the right length."""
        if len(source) < _LENGTH.size or _LENGTH.unpack_from(source)[0] != len(into):
            raise CodecError("another length")
        into[:] = self._inflate(source[_LENGTH.size :], len(into))

    def _inflate(self, packed: memoryview, size: int) -> bytes:
        inflater = zlib.decompressobj()
        try:
            raw = inflater.decompress(packed, size + 1)
        except zlib.error as exc:
            raise CodecError(str(exc)) from exc
        if len(raw) != size or not inflater.eof or inflater.unused_data:
            raise CodecError("not exactly one stream of the declared length")
        return raw


class BoundTooLow(SoundCodec):
    """Believes that values always shrink."""

    def bound(self, size: int, spec: SegmentSpec) -> int:
        """Return too little."""
        return size // 2 + 32


class Salted(SoundCodec):
    """Stores something else every time."""

    _salt = itertools.count()

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        """Add a counter."""
        size = super().encode(source, into, spec)
        into[size] = next(self._salt) & 0xFF
        return size + 1

    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:
        """Leave the counter out."""
        super().decode(source[:-1], into, spec)


class UsesTheTarget(SoundCodec):
    """Takes the target's old content for zeros."""

    def bound(self, size: int, spec: SegmentSpec) -> int:
        """Add room for a byte that is never written."""
        return super().bound(size, spec) + 1

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        """Count a byte more than was written."""
        return super().encode(source, into, spec) + 1

    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:
        """Leave that byte out."""
        super().decode(source[:-1], into, spec)


class KeepsBuffers(SoundCodec):
    """Remembers the last source."""

    _last: memoryview | None = None

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        """Keep a view of it."""
        self._last = source[:]
        return super().encode(source, into, spec)


class EatsItsSource(SoundCodec):
    """Works in place, as if the source were its own."""

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        """Flip the first byte and forget to flip it back."""
        size = super().encode(source, into, spec)
        if not source.readonly:
            source[0] ^= 0xFF
        return size


class WritesOutside(SoundCodec):
    """Rounds its writes up to whole words, like a vector loop without a tail."""

    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:
        """Zero the bytes behind the target, reached through the view's owner."""
        super().decode(source, into, spec)
        owner = into.obj
        if isinstance(owner, bytearray) and len(owner) > len(into):
            owner[-1] = 0


class IgnoresSurplus(SoundCodec):
    """Stops where the stream ends, whatever follows."""

    def _inflate(self, packed: memoryview, size: int) -> bytes:
        try:
            raw = zlib.decompressobj().decompress(packed, size + 1)
        except zlib.error as exc:
            raise CodecError(str(exc)) from exc
        if len(raw) != size:
            raise CodecError("another length")
        return raw


class FillsUpWithZeros(SoundCodec):
    """Takes a stream that was cut short."""

    def _inflate(self, packed: memoryview, size: int) -> bytes:
        try:
            return zlib.decompressobj().decompress(packed, size).ljust(size, b"\x00")
        except zlib.error as exc:
            raise CodecError(str(exc)) from exc


class TakesAnyTarget(SoundCodec):
    """Fills the front of a target that is too long."""

    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:
        """Believe the stored length alone."""
        if len(source) < _LENGTH.size or _LENGTH.unpack_from(source)[0] > len(into):
            raise CodecError("another length")
        super().decode(source, into[: _LENGTH.unpack_from(source)[0]], spec)


class TrustsSizes(SoundCodec):
    """Allocates what the stored bytes declare, then looks whether it fits."""

    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:
        """Make room first."""
        if len(source) < _LENGTH.size:
            raise CodecError("too short")
        try:
            bytearray(_LENGTH.unpack_from(source)[0])
        except (MemoryError, OverflowError) as exc:
            raise CodecError(str(exc)) from exc
        super().decode(source, into, spec)


class ForeignErrors(SoundCodec):
    """Lets its library's exceptions through."""

    def _inflate(self, packed: memoryview, size: int) -> bytes:
        inflater = zlib.decompressobj()
        raw = inflater.decompress(packed, size + 1)
        if len(raw) != size or not inflater.eof or inflater.unused_data:
            raise CodecError("not exactly one stream of the declared length")
        return raw


class SharedScratch(SoundCodec):
    """Keeps one work buffer for all threads."""

    def __init__(self, *, level: int = 1) -> None:
        super().__init__(level=level)
        self._work = b""

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        """Copy, pause as any C call may, encode the copy."""
        self._work = bytes(source)
        time.sleep(0)
        return super().encode(memoryview(self._work), into, spec)


class ForgetsOptions(SoundCodec):
    """Does not say how it was set up."""

    def options(self) -> Mapping[str, CodecOption]:
        """Return nothing."""
        return {}


class UnstorableOptions(SoundCodec):
    """Has options that no header can hold."""

    def options(self) -> Mapping[str, CodecOption]:
        """Return a list, against the type."""
        return {"level": self._level, "table": [1, 2]}  # type: ignore[dict-item]  # the fault


class SecretlyLossy(SoundCodec):
    """Makes every NaN the same NaN, and does not call itself lossy."""

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        """Clear the payload of bfloat16 NaNs."""
        if spec.dtype == "bfloat16":
            words = memoryview(bytearray(source)).cast("H")
            for index, word in enumerate(words):
                if word & 0x7FFF > 0x7F80:
                    words[index] = 0x7FC0
            source = words.cast("B")
        return super().encode(source, into, spec)


class ShapeBound(SoundCodec):
    """Knows only four-dimensional tensors."""

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        """Read the number of tokens off the shape."""
        return super().encode(source, into, spec) if spec.shape[1] else 0


BROKEN: dict[type[SoundCodec], str] = {
    BoundTooLow: "test_keeps_to_the_bound_and_to_its_buffers",
    Salted: "test_same_bytes_give_the_same_bytes",
    UsesTheTarget: "test_same_bytes_give_the_same_bytes",
    KeepsBuffers: "test_keeps_no_buffer",
    EatsItsSource: "test_leaves_the_source_alone",
    WritesOutside: "test_keeps_to_the_bound_and_to_its_buffers",
    IgnoresSurplus: "test_refuses_missing_and_surplus_bytes",
    FillsUpWithZeros: "test_refuses_missing_and_surplus_bytes",
    TakesAnyTarget: "test_refuses_a_target_of_another_size",
    TrustsSizes: "test_allocates_no_more_than_the_target",
    ForeignErrors: "test_damage_raises_codec_error_or_nothing",
    SharedScratch: "test_threads_do_not_disturb_each_other",
    ForgetsOptions: "test_options_rebuild_the_codec",
    UnstorableOptions: "test_name_and_options_can_be_stored",
    SecretlyLossy: "test_round_trip",
    ShapeBound: "test_round_trip",
}
"""Each broken twin, and the test of the kit that must catch it."""
