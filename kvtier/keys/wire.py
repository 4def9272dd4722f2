"""The typed, length-framed encoding that every key and fingerprint is a SHA-256 of."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final

SCHEME: Final = "kvtier-key-1"
"""Name and version of the derivation: the first field of everything that is hashed."""


def header(tag: bytes, size: int) -> bytes:
    """Return what precedes a payload of `size` bytes: the type tag, then the size as 4 little-endian bytes."""
    return tag + size.to_bytes(4, "little")


def field(tag: bytes, payload: bytes) -> bytes:
    """Frame one payload. No frame is a prefix of another one, so a row of them can be read in one way only."""
    return header(tag, len(payload)) + payload


def encode(value: object) -> bytes:
    """Encode a value as one frame; equal bytes mean equal type and equal value.

    Tags: `N` None, `?` bool, `i` integer in decimal ASCII, `f` float as little-endian IEEE double, `s` UTF-8 text,
    `b` bytes, `l` list or tuple (its items' frames), `m` mapping (key and value frames, ordered by key frame).

    Raises:
        TypeError: for any other type, whose text could differ between processes.
        UnicodeEncodeError: for text with lone surrogates.
    """
    if value is None:
        return field(b"N", b"")
    if isinstance(value, bool):
        return field(b"?", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return field(b"i", b"%d" % value)
    if isinstance(value, float):
        return field(b"f", struct.pack("<d", value))
    if isinstance(value, str):
        return field(b"s", value.encode("utf-8"))
    if isinstance(value, bytes):
        return field(b"b", value)
    if isinstance(value, Mapping):
        pairs = sorted((encode(key), encode(item)) for key, item in value.items())
        return field(b"m", b"".join(key + item for key, item in pairs))
    if isinstance(value, Sequence):
        return field(b"l", b"".join(map(encode, value)))
    raise TypeError(f"no encoding for {type(value).__name__}")


def opening(label: str) -> bytes:
    """Return the frames that open a message of the kind `label`: the scheme and the label."""
    return encode(SCHEME) + encode(label)


def digest(label: str, *values: object) -> bytes:
    """Return the 32-byte SHA-256 of the scheme, the label and the values, each in its own frame."""
    return sha256(opening(label) + b"".join(map(encode, values))).digest()
