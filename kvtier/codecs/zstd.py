"""Zstandard over a segment's bytes, with decompression that trusts no declared size."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import zstandard

from kvtier.codecs.base import Codec
from kvtier.errors import CodecError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.chunk.segments import CodecOption, SegmentSpec

LEVELS = frozenset(range(-7, 23)) - {0}
FREQUENCIES = 0  # not a level of users: codes by how frequent bytes are, not by what repeats

_DESCRIPTOR = 4  # position of the byte whose bit 2 says that a checksum follows the blocks
_BLOCK_HEADER = 3
_RLE, _RESERVED = 1, 3  # block types


class _PerThread(threading.local):
    """Contexts of this thread: zstandard's objects must not be shared between threads."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        compressor = self.compressors.get(level)
        if compressor is None:
            compressor = self.compressors[level] = _compressor(level)
        return compressor


def _compressor(level: int) -> zstandard.ZstdCompressor:
    if level != FREQUENCIES:
        return zstandard.ZstdCompressor(level=level, write_checksum=False)
    # The smallest table of places and the longest least match: hardly anything is looked for, or found.
    few = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        window_log=20,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
    )
    return zstandard.ZstdCompressor(compression_params=few)


_contexts = _PerThread()


class ZstdCodec(Codec):
    """One zstd frame per segment, with its content size and without zstd's checksum: the container has its own.

    Args:
        level: -7..-1 (faster) or 1..22 (smaller).

    Raises:
        ConfigError: another level.
    """

    name = "zstd"

    def __init__(self, *, level: int = 1) -> None:
        if type(level) is not int or level not in LEVELS:
            raise ConfigError(f"zstd: level is {level!r}; give -7..-1 (faster) or 1..22 (smaller)")
        self._level = level

    def options(self) -> Mapping[str, CodecOption]:
        """Return the level: no reader needs it, but two chains with other levels store other bytes."""
        return {"level": self._level}

    def bound(self, size: int, spec: SegmentSpec) -> int:  # noqa: ARG002  # the contract's signature
        """Return zstd's own worst case, rounded up."""
        return size + (size >> 8) + 128

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:  # noqa: ARG002
        """Write one frame straight into `into`; `CodecError` if it does not fit there."""
        return self.compress(source, into, self._level)

    def compress(self, source: memoryview, into: memoryview, level: int) -> int:
        """Write one frame at another level, or by `FREQUENCIES`.

        Raises:
            CodecError: the frame does not fit into `into`.
        """
        with _contexts.compressor(level).stream_reader(source, size=len(source), closefd=False) as frame:
            written = 0
            while count := frame.readinto(into[written:]) if written < len(into) else frame.readinto(bytearray(1)):
                written += count
                if written > len(into):
                    raise CodecError(f"zstd frame of {len(source)} bytes does not fit into {len(into)}")
        return written

    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:  # noqa: ARG002
        """Fill `into` from exactly one frame that declares exactly its length.

        With the whole frame and room for all of its content at hand, zstd decodes into `into` in one pass and
        allocates nothing.
        """
        try:
            if zstandard.frame_content_size(source) != len(into):
                raise CodecError(f"zstd frame does not declare {len(into)} bytes")
            if _frame_size(source) != len(source):
                raise CodecError("zstd frame is cut short, or more bytes follow it")
            with _contexts.decompressor.stream_reader(source, closefd=False) as content:
                filled = content.readinto(into)
        except zstandard.ZstdError as exc:
            raise CodecError(f"not a zstd frame: {exc}") from exc
        if filled != len(into):
            raise CodecError(f"zstd frame holds {filled} bytes, not {len(into)}")


def _frame_size(source: memoryview) -> int | None:
    """Return the length of the frame at the start of `source`, from its block headers; `None` if it is cut short.

    The library ignores what follows a frame and does not tell where it ended.
    """
    position: int = zstandard.frame_header_size(source)
    last = 0
    while not last:
        header = int.from_bytes(source[position : position + _BLOCK_HEADER], "little")
        position += _BLOCK_HEADER
        if position > len(source):
            return None
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == _RESERVED:
            return None
        position += 1 if kind == _RLE else size
    position += 4 if source[_DESCRIPTOR] & 4 else 0
    return position if position <= len(source) else None
