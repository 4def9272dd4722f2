"""A container's header as plain values, and its msgpack form: fixed schema, strict types, limits before allocation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgpack  # type: ignore[import-untyped]  # has no stubs

from kvtier.chunk.dtypes import MAX_DIMENSIONS, MAX_ELEMENTS
from kvtier.chunk.segments import Segment, SegmentSpec
from kvtier.errors import CorruptChunkError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.chunk.segments import CodecOption

KINDS = frozenset({"kv", "tensor", "mapping", "bytes"})
MAX_SEGMENTS = 2048
MAX_CHAIN = 8
MAX_OPTIONS = 16
MAX_TEXT = 4096  # UTF-8 bytes of a key, parent or namespace
MAX_NAME = 1024  # UTF-8 bytes of a segment's name
MAX_WORD = 64  # UTF-8 bytes of a codec's name, dtype, axes, option name or option text
MAX_SIZE = 1 << 53

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRef:
    """A codec as an entry names it: resolved only through the registry, built with `options` by keyword."""

    name: str
    options: Mapping[str, CodecOption] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, frozenset(self.options.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What an entry says of itself.

    `kind` is "kv" (a chunk of a layer group), "tensor", "mapping" or "bytes". `parent` is the key of the chunk
    before this one. `chain` is empty for raw bytes. `created` and `expires` (the expiry when written; the medium knows
    the current one) are wall-clock seconds. `epoch` counts the `clear` calls of a shared tier. `payload_offset` and
    `payload_size` are in bytes; 0 until the value is sealed or was read from a container.
    """

    key: str
    namespace: str
    parent: str | None = None
    kind: str
    chain: tuple[CodecRef, ...] = ()
    segments: tuple[Segment, ...]
    tokens: int = 0
    created: float
    expires: float | None = None
    lossy: bool = False
    epoch: int = 0
    payload_offset: int = 0
    payload_size: int = 0

    @property
    def size(self) -> int:
        """Bytes of the whole container."""
        return self.payload_offset + self.payload_size

    @property
    def raw(self) -> int:
        """Bytes of the value before any codec."""
        return sum(segment.raw for segment in self.segments)


def pack_header(header: Header) -> bytes:
    """Return the header's stored form; equal headers give equal bytes."""
    fields = {
        "key": header.key,
        "namespace": header.namespace,
        "parent": header.parent,
        "kind": header.kind,
        "chain": [[ref.name, {name: ref.options[name] for name in sorted(ref.options)}] for ref in header.chain],
        "segments": [_pack_segment(segment) for segment in header.segments],
        "tokens": header.tokens,
        "created": float(header.created),
        "expires": None if header.expires is None else float(header.expires),
        "lossy": header.lossy,
        "epoch": header.epoch,
    }
    packer = msgpack.Packer(use_bin_type=True, autoreset=False)
    packer.pack(fields)
    packed: bytes = packer.bytes()
    return packed


def _pack_segment(segment: Segment) -> list[object]:
    spec = segment.spec
    where = [segment.offset, segment.stored, segment.raw, segment.checksum]
    return [spec.name, spec.dtype, list(spec.shape), spec.axes, spec.first_token, *where]


def unpack_header(packed: memoryview) -> Header:
    """Return the header that `pack_header` wrote; of any other bytes only types and ranges are vouched for.

    Raises:
        CorruptChunkError: not the schema, a value out of range, surplus bytes, or a key given twice.
    """
    try:
        fields = msgpack.unpackb(
            packed,
            raw=False,
            use_list=True,
            strict_map_key=True,
            object_pairs_hook=_unique,
            max_str_len=MAX_TEXT,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=MAX_SEGMENTS,
            max_map_len=MAX_OPTIONS,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as exc:
        raise CorruptChunkError(f"header is not valid msgpack: {exc}") from exc
    return _header(_fields(fields))


_NAMES = frozenset(
    ("key", "namespace", "parent", "kind", "chain", "segments", "tokens", "created", "expires", "lossy", "epoch")
)


def _unique(pairs: list[tuple[object, object]]) -> dict[object, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise CorruptChunkError("header has a field twice")
    return fields


def _fields(fields: object) -> dict[str, object]:
    if type(fields) is not dict or fields.keys() != _NAMES:
        raise CorruptChunkError("header has not the fields of this format")
    return fields


def _header(fields: dict[str, object]) -> Header:
    kind = _text(fields["kind"], MAX_WORD)
    if kind not in KINDS:
        raise CorruptChunkError(f"unknown kind {kind!r}")
    parent, expires = fields["parent"], fields["expires"]
    return Header(
        key=_text(fields["key"], MAX_TEXT),
        namespace=_text(fields["namespace"], MAX_TEXT),
        parent=None if parent is None else _text(parent, MAX_TEXT),
        kind=kind,
        chain=tuple(_codec_ref(item) for item in _list(fields["chain"], MAX_CHAIN)),
        segments=tuple(_segment(item) for item in _list(fields["segments"], MAX_SEGMENTS)),
        tokens=_int(fields["tokens"]),
        created=_time(fields["created"]),
        expires=None if expires is None else _time(expires),
        lossy=_of(bool, fields["lossy"]),
        epoch=_int(fields["epoch"]),
    )


def _codec_ref(item: object) -> CodecRef:
    name, options = _row(item, 2)
    if type(options) is not dict:
        raise CorruptChunkError("codec options are not a map")
    return CodecRef(
        name=_text(name, MAX_WORD),
        options={_text(option, MAX_WORD): _option(value) for option, value in options.items()},
    )


def _option(value: object) -> CodecOption:
    if type(value) is str:
        return _text(value, MAX_WORD)
    if type(value) is float:
        return _time(value)
    if type(value) is bool or type(value) is int:
        return value
    raise CorruptChunkError(f"codec option of type {type(value).__name__}")


def _segment(item: object) -> Segment:
    name, dtype, shape, axes, first_token, offset, stored, raw, checksum = _row(item, 9)
    spec = SegmentSpec(
        name=_text(name, MAX_NAME),
        dtype=_text(dtype, MAX_WORD),
        shape=tuple(_int(length, most=MAX_ELEMENTS) for length in _list(shape, MAX_DIMENSIONS)),
        axes=_text(axes, MAX_WORD),
        first_token=_int(first_token, least=-1),
    )
    most = (1 << 64) - 1
    return Segment(
        spec=spec, offset=_int(offset), stored=_int(stored), raw=_int(raw), checksum=_int(checksum, most=most)
    )


def _of(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise CorruptChunkError(f"header field of type {type(value).__name__}, not {kind.__name__}")
    return value


def _text(value: object, most: int) -> str:
    text = _of(str, value)
    # Four bytes per character is UTF-8's worst case, so the encoded length needs a look only near the limit.
    if len(text) * 4 > most and len(text.encode()) > most:
        raise CorruptChunkError(f"text of more than {most} bytes in the header")
    return text


def _int(value: object, *, least: int = 0, most: int = MAX_SIZE) -> int:
    number = _of(int, value)
    if not least <= number <= most:
        raise CorruptChunkError(f"number {number} in the header is not within {least}..{most}")
    return number


def _time(value: object) -> float:
    seconds = _of(float, value)
    if not math.isfinite(seconds):
        raise CorruptChunkError("number in the header is not finite")
    return seconds


def _list(value: object, most: int) -> list[object]:
    if type(value) is not list or len(value) > most:
        raise CorruptChunkError(f"header field is not a list of at most {most}")
    return value


def _row(value: object, length: int) -> list[object]:
    row = _list(value, length)
    if len(row) != length:
        raise CorruptChunkError(f"{len(row)} values in the header where {length} must stand")
    return row
