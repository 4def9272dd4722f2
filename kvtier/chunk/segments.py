"""A blob's parts as named, typed byte ranges: what codecs encode and containers list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

CodecOption: TypeAlias = str | int | float | bool  # what a codec's option may be, and a header can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSpec:
    """One tensor (or byte string) of a blob, before any codec.

    `name` is unique within the blob ("k", "v", "latent", or a mapping's key; "" for a lone tensor or bytes).
    `dtype` is a name from `kvtier.chunk.dtypes` ("bfloat16", ..., or "bytes"). `shape` is in elements, and `axes`
    names its dimensions ("LTHD", "LHTD", ...; "" when unknown), so that a codec finds tokens and channels.
    `first_token` is the position of the first token in the prompt (attention sinks sit at 0); -1 when unknown.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: str = ""
    first_token: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where a segment lies in a payload: `offset` (4096-aligned, from the payload's start) and lengths in bytes.

    `checksum` is xxh3-64 of the stored bytes, or None while the value has not left memory yet.
    """

    spec: SegmentSpec
    offset: int
    stored: int
    raw: int
    checksum: int | None = None
