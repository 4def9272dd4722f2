"""Key text to medium name and back, and which texts are keys at all."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final

from kvtier.errors import InvalidKeyError

MAX_KEY_CHARACTERS: Final = 1024

_KV_KEY: Final = re.compile(r"[0-9a-f]{16}/[0-9a-f]{16}/[0-9a-f]{32}")
_KV_KEY_FRONT: Final = re.compile(
    r"[0-9a-f]{1,16}|[0-9a-f]{16}/[0-9a-f]{0,16}|[0-9a-f]{16}/[0-9a-f]{16}/[0-9a-f]{0,32}"
)
_KV_NAME: Final = re.compile(r"[0-9a-f]{16}\.[0-9a-f]{16}\.[0-9a-f]{32}")


def name_of(key: str) -> str:
    """Return the name under which a medium keeps `key`: 42 or 66 characters of `[0-9a-z.-]`, never a path.

    A KV key maps reversibly (`key_of`). Any other text maps to `x-` and 160 bits of its SHA-256: its own text is
    kept inside the entry.
    """
    if _KV_KEY.fullmatch(key):
        return key.replace("/", ".")
    return "x-" + sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def is_kv_key(key: str) -> bool:
    """Tell whether a key is of the form that chunks of KV have, which a blob's own seldom is."""
    return _KV_KEY.fullmatch(key) is not None


def key_of(name: str) -> str | None:
    """Return the KV key behind a medium name; None for a hashed name and for anything that is no name at all."""
    return name.replace(".", "/") if _KV_NAME.fullmatch(name) else None


def name_prefixes(prefix: str) -> tuple[str, ...]:
    """Return beginnings of which the name of every key under a literal prefix has one; "" is the beginning of all."""
    if not prefix:
        return ("",)
    hashed = "x-"  # may stand for a key of any text
    return (prefix.replace("/", "."), hashed) if _KV_KEY_FRONT.fullmatch(prefix) else (hashed,)


def check_key(key: object) -> str:
    """Return `key` if a `ChunkStore` takes it: every such text is a key of its own, compared code point by code point.

    Raises:
        InvalidKeyError: unless it is a `str` of 1 to 1024 characters without NUL and lone surrogates.
    """
    if not isinstance(key, str):
        raise InvalidKeyError(f"key is a {type(key).__name__}; give a str")
    if not 1 <= len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidKeyError(f"key of {len(key)} characters; give 1 to {MAX_KEY_CHARACTERS}")
    if "\0" in key:
        raise InvalidKeyError(f"key {key!r} holds a NUL character")
    try:
        key.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InvalidKeyError(f"key {key!r} holds a lone surrogate at character {exc.start}") from exc
    return key
