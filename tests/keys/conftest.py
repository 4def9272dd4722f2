"""A second implementation of the documented key derivation, written from the document alone."""

import hashlib
import struct
from types import SimpleNamespace

import pytest

from kvtier.keys import NamespaceDigest


def frame(tag, payload):
    return tag + struct.pack("<I", len(payload)) + payload


def pack(value):
    match value:
        case None:
            return frame(b"N", b"")
        case bool():
            return frame(b"?", bytes([value]))
        case int():
            return frame(b"i", str(value).encode("ascii"))
        case float():
            return frame(b"f", struct.pack("<d", value))
        case str():
            return frame(b"s", value.encode("utf-8"))
        case bytes():
            return frame(b"b", value)
        case list() | tuple():
            return frame(b"l", b"".join(pack(item) for item in value))
        case dict():
            return frame(b"m", b"".join(sorted(pack(key) + pack(item) for key, item in value.items())))
    raise AssertionError(value)


def hashed(label, *frames):
    return hashlib.sha256(pack("kvtier-key-1") + pack(label) + b"".join(frames)).digest()


def salt_of(salt):
    return hashed("salt", pack(salt)) if salt else None


def text(namespace, salt, digest):
    salt16 = salt_of(salt)[:8].hex() if salt else "0000000000000000"
    return f"{namespace[:8].hex()}/{salt16}/{digest[:16].hex()}"


def link(label, previous, tokens, first, salt, lora, media):
    inside = [[place, digest] for place, digest in sorted(media) if first <= place < first + len(tokens)]
    return hashed(
        label,
        pack(previous),
        pack(salt_of(salt)),
        pack(lora or None),
        pack(inside),
        frame(b"t", struct.pack(f"<{len(tokens)}I", *tokens)),
    )


def chain(namespace, chunk_tokens, tokens, *, salt=None, lora=None, media=(), salt_from=()):
    """Return (keys, partial key); `salt_from` is [(first token, salt)] of extensions."""

    def salt_at(end):
        return [each for first, each in [(0, salt), *salt_from] if first < end][-1]

    tokens = list(tokens)
    digest = hashed("root", pack(namespace), pack(chunk_tokens))
    keys = []
    full = len(tokens) // chunk_tokens * chunk_tokens
    for first in range(0, full, chunk_tokens):
        end = first + chunk_tokens
        digest = link("chunk", digest, tokens[first:end], first, salt_at(end), lora, media)
        keys.append(text(namespace, salt_at(end), digest))
    if full == len(tokens):
        return keys, None
    salt = salt_at(len(tokens))
    return keys, text(namespace, salt, link("tail", digest, tokens[full:], full, salt, lora, media))


@pytest.fixture(scope="session")
def reference():
    return SimpleNamespace(chain=chain, pack=pack, hashed=hashed, text=text, salt_of=salt_of)


@pytest.fixture(scope="session")
def space():
    return NamespaceDigest(bytes(range(32)))
