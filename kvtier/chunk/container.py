"""The one container of every byte tier: a checked header, then 4096-aligned segments; written and verified in place.

Stored bytes, little-endian:

    magic 8 | version u16 | flags u16 | header length u32 | payload offset u64 | payload length u64 | checksum u64
    msgpack header | zeros up to the payload offset | segment 0 | zeros | segment 1 | zeros | ...

The first checksum covers everything before the payload (itself left out); each segment has its own in the header; the
zeros behind a segment must be zeros. So no bit of a container can change unnoticed. Checksums are xxh3-64: they find
damage, not forgery.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import xxhash

from kvtier.chunk.dtypes import raw_size
from kvtier.chunk.header import (
    MAX_NAME,
    MAX_SEGMENTS,
    MAX_TEXT,
    CodecRef,
    Header,
    pack_header,
    unpack_header,
)
from kvtier.chunk.segments import Segment
from kvtier.errors import CorruptChunkError, InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from kvtier.chunk.segments import SegmentSpec

__all__ = [
    "FORMAT",
    "MAX_FRONT",
    "PAGE",
    "READABLE",
    "CodecRef",
    "Header",
    "NeedMore",
    "UnknownFormatError",
    "check_header",
    "check_segment",
    "payload_offset",
    "payload_size",
    "peek",
    "plan_segments",
    "seal",
    "segment_view",
    "verify",
]

PAGE = 4096
FORMAT = 1
READABLE = frozenset({FORMAT, FORMAT - 1} - {0})  # this format and the one before; format 1 is the first

_MAGIC = b"\x89KVT\r\n\x1a\n"
_PREAMBLE = struct.Struct("<8sHHIQQ")  # the checksum follows
_CHECKSUM = struct.Struct("<Q")
_FRONT = _PREAMBLE.size + _CHECKSUM.size
_ZEROS = bytes(PAGE)

MAX_FRONT = 1 << 19  # the most bytes before the payload: all that parsing ever looks at before a checksum matched

# Worst cases of the header's parts in bytes: what `payload_offset` reserves, so that it depends on nothing that
# changes between two values of one layout.
_RESERVE_FIXED = 256 + 512  # field names, kind, numbers, times; and 512 for the codec chain
_RESERVE_NAMESPACE = 128
_RESERVE_PARENT = 256
_RESERVE_SEGMENT = 64  # framing, dtype, lengths, offset, checksum


class NeedMore(CorruptChunkError):  # noqa: N818  # a request for more bytes rather than a verdict
    """The bytes given end before the payload starts: read `size` bytes and try again.

    Attributes:
        size: bytes from the container's start that `peek` needs.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"header incomplete: {size} bytes needed")
        self.size = size


class UnknownFormatError(CorruptChunkError):
    """An undamaged container of a later format than this version reads: somebody else's, and to be left alone."""


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE


def payload_offset(specs: Sequence[SegmentSpec], key: str) -> int:
    """Return where the payload starts: a multiple of 4096 that depends on the layout alone.

    Number, names and ranks of the segments and the key's length count; shapes, lengths, codecs and times do not.

    Raises:
        InvalidValueError: too many segments, or names too long.
    """
    if len(specs) > MAX_SEGMENTS:
        raise InvalidValueError(f"{len(specs)} tensors in one value; at most {MAX_SEGMENTS} are possible")
    size = _largest_front(specs, key)
    if size > MAX_FRONT:
        raise InvalidValueError(f"names of {len(specs)} tensors take {size} bytes; at most {MAX_FRONT} are possible")
    return _padded(size)


def _largest_front(specs: Sequence[SegmentSpec], key: str) -> int:
    """Return the most bytes that preamble and header can take for this layout."""
    size = _FRONT + _RESERVE_FIXED + _RESERVE_NAMESPACE
    size += _text_size("key", key, MAX_TEXT) + max(len(key.encode()), _RESERVE_PARENT)
    for spec in specs:
        size += _RESERVE_SEGMENT + _text_size("tensor name", spec.name, MAX_NAME) + 9 * len(spec.shape)
        size += len(spec.axes) + len(spec.dtype)
    return size


def _text_size(what: str, text: str, most: int) -> int:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as exc:
        raise InvalidValueError(f"{what} {text!r} is not valid Unicode: {exc.reason}") from None
    if size > most:
        raise InvalidValueError(f"{what} of {size} bytes; at most {most} are possible")
    return size


def plan_segments(specs: Sequence[SegmentSpec], stored: Sequence[int]) -> tuple[Segment, ...]:
    """Lay segments of `stored` bytes each one after the other, every one at a multiple of 4096, no checksums yet."""
    segments = []
    offset = 0
    for spec, size in zip(specs, stored, strict=True):
        segments.append(Segment(spec=spec, offset=offset, stored=size, raw=raw_size(spec.dtype, spec.shape)))
        offset += _padded(size)
    return tuple(segments)


def payload_size(segments: Sequence[Segment]) -> int:
    """Return the payload's bytes, padding included: a multiple of 4096."""
    return sum(_padded(segment.stored) for segment in segments)


def segment_view(view: memoryview, header: Header, segment: Segment) -> memoryview:
    """Return the stored bytes of one segment of a container that starts at `view[0]`."""
    start = header.payload_offset + segment.offset
    return view[start : start + segment.stored]


def seal(view: memoryview, header: Header, *, payload_offset: int, size: int) -> Header:
    """Make the bytes in `view` a container: checksum the segments, write all that stands before the payload.

    `view[payload_offset:]` holds the segments where `header.segments` says; padding is zeroed here. A checksum that a
    segment already has is kept, so a value that was verified once is not hashed again. Deterministic.

    Args:
        view: writable, at least `size` bytes.
        header: what to write; its `payload_offset` and `payload_size` are set here.
        payload_offset: from the function of this name.
        size: bytes of the whole container, `payload_offset + payload_size(segments)`.

    Returns:
        The header with offsets and checksums: equal to what `verify` returns for these bytes.

    Raises:
        InvalidValueError: the header does not fit before the payload, holds what no reader would accept, or `size` is
            not the segments' size.
    """
    total = payload_size(header.segments)
    if size != payload_offset + total or len(view) < size or payload_offset % PAGE:
        raise InvalidValueError(f"container of {size} bytes: header {payload_offset} and payload {total} do not add up")
    segments = []
    for segment in header.segments:
        start = payload_offset + segment.offset
        end = start + segment.stored
        view[end : start + _padded(segment.stored)] = _ZEROS[: -segment.stored % PAGE]
        segments.append(_with_checksum(segment, view[start:end]))
    sealed = replace(header, segments=tuple(segments), payload_offset=payload_offset, payload_size=total)
    packed = _pack(sealed)
    if _FRONT + len(packed) > payload_offset:
        raise InvalidValueError(f"header of {len(packed)} bytes does not fit into {payload_offset - _FRONT}")
    _PREAMBLE.pack_into(view, 0, _MAGIC, FORMAT, 0, len(packed), payload_offset, total)
    end = _FRONT + len(packed)
    view[_FRONT:end] = packed
    view[end:payload_offset] = bytes(payload_offset - end)
    _CHECKSUM.pack_into(view, _PREAMBLE.size, _front_checksum(view, payload_offset))
    _check_readable(view, sealed)
    return sealed


def _with_checksum(segment: Segment, stored: memoryview) -> Segment:
    if segment.checksum is not None:
        return segment
    return replace(segment, checksum=xxhash.xxh3_64_intdigest(stored))


def _front_checksum(view: memoryview, payload_offset: int) -> int:
    state = xxhash.xxh3_64(view[: _PREAMBLE.size])
    state.update(view[_FRONT:payload_offset])
    return state.intdigest()


def _pack(header: Header) -> bytes:
    try:
        return pack_header(header)
    except (UnicodeEncodeError, TypeError, OverflowError) as exc:
        raise InvalidValueError(f"header of {header.key!r} cannot be written: {exc}") from exc


def _check_readable(view: memoryview, sealed: Header) -> None:
    """Refuse now what `verify` would refuse later, when the value can no longer be had."""
    try:
        read_back = peek(view)
    except CorruptChunkError as exc:
        raise InvalidValueError(f"header of {sealed.key!r} cannot be stored: {exc}") from exc
    if read_back != sealed:
        raise InvalidValueError(f"header of {sealed.key!r} cannot be stored: it reads back as {read_back!r}")


def peek(view: memoryview) -> Header:
    """Return the header of the container that starts at `view[0]`; the payload need not be there.

    Magic, version, lengths and the checksum of everything before the payload are checked, and the segment table
    against the payload's length. Nothing larger than the header (at most 512 KiB) is allocated.

    Raises:
        NeedMore: `view` ends before the payload starts.
        CorruptChunkError: not a container, a format this version does not read, or damaged.
    """
    if len(view) < _FRONT:
        raise CorruptChunkError(f"{len(view)} bytes are no container")
    magic, version, flags, length, offset, payload = _PREAMBLE.unpack_from(view, 0)
    if magic != _MAGIC:
        raise CorruptChunkError("not a kvtier container: wrong magic")
    if flags or offset % PAGE or payload % PAGE or not _FRONT + length <= offset <= MAX_FRONT:
        raise CorruptChunkError("lengths before the header make no sense")
    if len(view) < offset:
        raise NeedMore(offset)
    if _CHECKSUM.unpack_from(view, _PREAMBLE.size)[0] != _front_checksum(view, offset):
        raise CorruptChunkError("header checksum does not match")
    if version not in READABLE:
        kind = UnknownFormatError if version > FORMAT else CorruptChunkError
        raise kind(f"container format {version}; readable: {', '.join(map(str, sorted(READABLE)))}")
    header = replace(unpack_header(view[_FRONT : _FRONT + length]), payload_offset=offset, payload_size=payload)
    _check_table(header)
    return header


def _check_table(header: Header) -> None:
    """Refuse a segment table that `plan_segments` would not have made, or that does not suit the kind."""
    names = set()
    offset = 0
    for segment in header.segments:
        spec = segment.spec
        names.add(spec.name)
        try:
            raw = raw_size(spec.dtype, spec.shape)
        except InvalidValueError as exc:
            raise CorruptChunkError(f"segment {spec.name!r}: {exc}") from None
        if segment.raw != raw or segment.offset != offset:
            raise CorruptChunkError(f"segment {spec.name!r} is not where or what the table must say")
        if (segment.stored == 0) != (raw == 0) or (not header.chain and segment.stored != raw):
            raise CorruptChunkError(f"segment {spec.name!r}: {segment.stored} stored bytes for {raw}")
        if spec.axes and len(spec.axes) != len(spec.shape):
            raise CorruptChunkError(f"segment {spec.name!r}: axes {spec.axes!r} for {len(spec.shape)} dimensions")
        if (spec.dtype == "bytes") != (header.kind == "bytes"):
            raise CorruptChunkError(f"segment {spec.name!r}: dtype {spec.dtype!r} in a value of kind {header.kind!r}")
        offset += _padded(segment.stored)
    if offset != header.payload_size:
        raise CorruptChunkError(f"segments take {offset} bytes, the payload has {header.payload_size}")
    if len(names) != len(header.segments):
        raise CorruptChunkError("two segments have one name")
    if header.kind in {"tensor", "bytes"} and names != {""}:
        raise CorruptChunkError(f"a value of kind {header.kind!r} has one segment, without a name")


def check_segment(view: memoryview, header: Header, segment: Segment) -> None:
    """Compare one segment's stored bytes and padding with what the header says of them.

    Raises:
        CorruptChunkError: bytes missing, checksum wrong or absent, or padding that is not zero.
    """
    start = header.payload_offset + segment.offset
    end = start + segment.stored
    if len(view) < start + _padded(segment.stored):
        raise CorruptChunkError(f"segment {segment.spec.name!r} is cut short")
    if xxhash.xxh3_64_intdigest(view[start:end]) != segment.checksum:
        raise CorruptChunkError(f"checksum of segment {segment.spec.name!r} does not match")
    if view[end : start + _padded(segment.stored)].tobytes() != _ZEROS[: -segment.stored % PAGE]:
        raise CorruptChunkError(f"padding behind segment {segment.spec.name!r} is not zero")


def verify(view: memoryview, *, key: str, namespace: str | None = None, codecs: Container[str], max_raw: int) -> Header:
    """Check everything about a whole container before any of its bytes is used.

    Args:
        view: exactly the stored bytes; surplus and missing bytes are refused.
        key: the key that was asked for; the one inside must be equal.
        namespace: the same for the namespace; `None` accepts any.
        codecs: names that may stand in the chain: the registry's.
        max_raw: most bytes that the decoded value may take.

    Returns:
        The header; its segments may now be decoded.

    Raises:
        CorruptChunkError: anything is not as it must be.
    """
    try:
        header = peek(view)
    except NeedMore as exc:
        raise CorruptChunkError(f"container of {len(view)} bytes is cut short: header takes {exc.size}") from None
    check_header(header, size=len(view), key=key, namespace=namespace, codecs=codecs, max_raw=max_raw)
    for segment in header.segments:
        check_segment(view, header, segment)
    return header


def check_header(
    header: Header, *, size: int, key: str, namespace: str | None = None, codecs: Container[str], max_raw: int
) -> None:
    """Compare a header with what was asked for; `size` is the stored length in bytes, the rest as in `verify`.

    Raises:
        CorruptChunkError: it is of something else, or of nothing that may be read.
    """
    if size != header.size:
        raise CorruptChunkError(f"container of {size} bytes, header says {header.size}")
    if header.key != key:
        raise CorruptChunkError(f"holds key {header.key!r}, not {key!r}")
    if namespace is not None and header.namespace != namespace:
        raise CorruptChunkError(f"of namespace {header.namespace!r}, not {namespace!r}")
    for ref in header.chain:
        if ref.name not in codecs:
            raise CorruptChunkError(f"unknown codec {ref.name!r}")
    if header.raw > max_raw:
        raise CorruptChunkError(f"value of {header.raw} bytes; at most {max_raw} are accepted")
