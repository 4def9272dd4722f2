"""Lossless for bfloat16: exponents apart from signs and mantissas, because only they can be compressed."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from kvtier.chunk.memory import copy_bytes
from kvtier.chunk.serial import on_this_thread
from kvtier.codecs import fast
from kvtier.codecs.base import Codec
from kvtier.codecs.zstd import FREQUENCIES, ZstdCodec
from kvtier.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtier.chunk.segments import CodecOption, SegmentSpec

_EXACT, _SPLIT = b"E", b"S"
_FORMAT = 1
_HEADER = struct.Struct("<cB14x")
_LENGTH = struct.Struct("<I")
_PIECE = 1 << 19  # numbers whose exponents are compressed together: they stay in the processor's cache


class Bf16SplitCodec(Codec):
    """The exponents of bfloat16 numbers behind zstd; signs and mantissas, which are noise, as they are.

    About 1.48 times smaller on real KV, where zstd alone reaches 1.28. Other element types are stored as they are.

    Exponents hardly repeat, but few of them are frequent. At level 1 zstd is told not to look for repeats: 2.6 times
    as fast, and 5 % smaller, since what it takes for one costs more than it saves.

    Args:
        level: of zstd; more than 1 looks for repeats: slower and, for exponents, larger.

    Raises:
        ConfigError: a level that zstd does not have.
    """

    name = "bf16-split"

    def __init__(self, *, level: int = 1) -> None:
        self._zstd = ZstdCodec(level=level)
        self._level = FREQUENCIES if level == 1 else level

    def options(self) -> Mapping[str, CodecOption]:
        """Return zstd's level."""
        return self._zstd.options()

    def bound(self, size: int, spec: SegmentSpec) -> int:
        """Return room for exponents that zstd makes larger."""
        frames = sum(self._zstd.bound(stop - start, spec) for start, stop in _pieces(size // 2))
        return max(_HEADER.size + size, _frames_at(size // 2) + frames)

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        """Write the plane of signs and mantissas, then one zstd frame per piece of exponents."""
        if spec.dtype == "bfloat16" and len(source) % 2 == 0:
            end = on_this_thread(lambda: self._split(source, into, spec))
            if end < _HEADER.size + len(source):
                return end
        _HEADER.pack_into(into, 0, _EXACT, _FORMAT)
        copy_bytes(source, into[_HEADER.size : _HEADER.size + len(source)])
        return _HEADER.size + len(source)

    def _split(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        count = len(source) // 2
        words = _tensor(source, torch.int16)
        rest = _tensor(into[_rest_at(count) : _frames_at(count)], torch.uint8)
        plane = memoryview(bytearray(min(count, _PIECE)))
        exponents = torch.frombuffer(plane, dtype=torch.uint8)
        frame = memoryview(bytearray(self._zstd.bound(len(plane), spec)))
        end = _frames_at(count)
        for index, (start, stop) in enumerate(_pieces(count)):
            _split_words(words[start:stop], exponents[: stop - start], rest[start:stop])
            length = self._zstd.compress(plane[: stop - start], frame, self._level)
            into[end : end + length] = frame[:length]
            _LENGTH.pack_into(into, _HEADER.size + index * _LENGTH.size, length)
            end += length
        _HEADER.pack_into(into, 0, _SPLIT, _FORMAT)
        return end

    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:
        """Fill `into` from both planes."""
        if len(source) < _HEADER.size:
            raise CodecError(f"{self.name}: {len(source)} bytes are no stored segment")
        form, version = _HEADER.unpack_from(source)
        if form not in {_EXACT, _SPLIT} or version != _FORMAT or _HEADER.pack(form, version) != source[: _HEADER.size]:
            raise CodecError(f"{self.name}: stored in a form that this version does not read")
        if form == _SPLIT:
            on_this_thread(lambda: self._join(source, into, spec))
            return
        if len(source) != _HEADER.size + len(into):
            raise CodecError(f"{self.name}: {len(source)} bytes for a value of {len(into)}")
        copy_bytes(source[_HEADER.size :], into)

    def _join(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:
        count = len(into) // 2
        end = _frames_at(count)
        if len(into) % 2 or not count or len(source) < end:
            raise CodecError(f"{self.name}: {len(source)} bytes for a value of {len(into)}")
        words = _tensor(into, torch.int16)
        rest = _tensor(source[_rest_at(count) : end], torch.uint8)
        plane = memoryview(bytearray(min(count, _PIECE)))
        exponents = torch.frombuffer(plane, dtype=torch.uint8)
        for index, (start, stop) in enumerate(_pieces(count)):
            length = _LENGTH.unpack_from(source, _HEADER.size + index * _LENGTH.size)[0]
            self._zstd.decode(source[end : end + length], plane[: stop - start], spec)
            end += length
            _join_words(exponents[: stop - start], rest[start:stop], words[start:stop])
        if end != len(source):
            raise CodecError(f"{self.name}: {len(source)} bytes where {end} must be")


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _PIECE, count)) for start in range(0, count, _PIECE))


def _rest_at(count: int) -> int:
    return _HEADER.size + -(-count // _PIECE) * _LENGTH.size


def _frames_at(count: int) -> int:
    return _rest_at(count) + count


def _tensor(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    # torch would warn to make a tensor over read-only bytes
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)


def _split_words(words: torch.Tensor, exponents: torch.Tensor, rest: torch.Tensor) -> None:
    kernel = fast.kernel("encode", "split")
    if kernel is not None:
        kernel(words.data_ptr(), len(words), exponents.data_ptr(), rest.data_ptr())
        return
    exponents.copy_((words >> 7).bitwise_and_(0xFF))
    rest.copy_((words >> 8).bitwise_and_(0x80).bitwise_or_(words & 0x7F))


def _join_words(exponents: torch.Tensor, rest: torch.Tensor, words: torch.Tensor) -> None:
    kernel = fast.kernel("decode", "split")
    if kernel is not None:
        kernel(words.data_ptr(), len(words), exponents.data_ptr(), rest.data_ptr())
        return
    words.copy_(rest)
    words.bitwise_left_shift_(8).bitwise_and_(-0x8000).bitwise_or_(rest & 0x7F)
    wide = exponents.to(torch.int16).bitwise_left_shift_(7)
    words.bitwise_or_(wide)
