"""The chain of digests over a prefix: each chunk's key stands for every token up to the chunk's end."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final, TypeAlias

from kvtier.errors import InvalidKeyError
from kvtier.keys.tokens import WORD
from kvtier.keys.wire import digest, encode, header, opening

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.keys.namespace import NamespaceDigest

Salt: TypeAlias = "str | bytes | None"
MediaItem: TypeAlias = "tuple[int, str | bytes]"

NO_SALT_TEXT: Final = "0" * 16
DIGEST_BYTES: Final = 16  # of a SHA-256 that key text shows: 128 bits
GROUP_SCHEME: Final = "kvtier-group-1"

_FULL: Final = opening("chunk") + header(b"b", 32)
_TAIL: Final = opening("tail") + header(b"b", 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkKeys:
    """Keys of a prefix cut into chunks of `chunk_tokens`, in order.

    `keys` has the key of every full chunk, `<namespace16>/<salt16>/<digest32>`. `partial` is the key of the
    incomplete tail, which only a prefix that ends exactly there has, or None if there is no tail (or, for
    `BlockHashes`, no hash that covers it). `num_tokens` is the length of the whole prefix.
    """

    keys: tuple[str, ...]
    num_tokens: int
    chunk_tokens: int
    partial: str | None = None


@dataclass(frozen=True, slots=True)
class Extras:
    """What chunks add to the chain besides tokens: salt digest, LoRA digest, and media by the chunk they start in."""

    salt: bytes | None
    lora: str | bytes | None
    media: Mapping[int, Sequence[MediaItem]]

    @property
    def salt_text(self) -> str:
        """16 hex digits, zeros for no salt: the second part of key text."""
        return NO_SALT_TEXT if self.salt is None else self.salt[:8].hex()

    def frames(self, chunk: int, size: int) -> bytes:
        """Return the frames between the previous digest and `size` bytes of tokens of chunk number `chunk`."""
        media = self.media.get(chunk, ())
        return encode(self.salt) + encode(self.lora) + encode(media) + header(b"t", size)


def salt_digest(salt: Salt) -> bytes | None:
    """Return 32 bytes for a salt, None for no salt; `None`, `""` and `b""` all mean no salt.

    Raises:
        InvalidKeyError: for another type, and for text with lone surrogates.
    """
    text = checked_text(salt, "salt")
    return None if text is None else digest("salt", text)


def salt_text(salt: Salt) -> str:
    """Return the second part of every key under `salt`: 16 hex digits, zeros for no salt."""
    return Extras(salt_digest(salt), None, {}).salt_text


def checked_text(value: object, what: str) -> str | bytes | None:
    """Return text or bytes that can be hashed, None for None and for emptiness.

    Raises:
        InvalidKeyError: naming `what`, for another type and for text with lone surrogates.
    """
    if value is None:
        return None
    if not isinstance(value, str | bytes):
        raise InvalidKeyError(f"{what} is a {type(value).__name__}; give a str, bytes or None")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise InvalidKeyError(f"{what} {value!r} holds a lone surrogate at character {exc.start}") from exc
    return value or None


def check_chunk_tokens(chunk_tokens: object) -> int:
    """Return the chunk size.

    Raises:
        InvalidKeyError: unless it is an int of 1 to 2**24.
    """
    if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or not 1 <= chunk_tokens <= 2**24:
        raise InvalidKeyError(f"chunk_tokens is {chunk_tokens!r}; give an int from 1 to {2**24}")
    return chunk_tokens


def chain_root(namespace: NamespaceDigest, chunk_tokens: int) -> bytes:
    """Return the digest that stands before the first chunk."""
    return digest("root", namespace.bytes32, check_chunk_tokens(chunk_tokens))


def chain_chunks(words: bytes, previous: bytes, chunks: range, extras: Extras, chunk_tokens: int) -> list[bytes]:
    """Return the 32-byte digests of consecutive full chunks; `previous` is that of the chunk before them.

    `words` holds the whole prefix's tokens, 4 bytes each.
    """
    size = chunk_tokens * WORD
    usual = extras.frames(-1, size)
    digests = []
    for index in chunks:
        frames = extras.frames(index, size) if index in extras.media else usual
        start = index * size
        previous = sha256(b"".join((_FULL, previous, frames, words[start : start + size]))).digest()
        digests.append(previous)
    return digests


def tail_digest(words: bytes, previous: bytes, chunk: int, extras: Extras) -> bytes:
    """Return the digest of an incomplete last chunk; its label keeps it apart from every full chunk's."""
    return sha256(b"".join((_TAIL, previous, extras.frames(chunk, len(words)), words))).digest()


def key_text(stem: str, chunk_digest: bytes) -> str:
    """Return the key of a digest; `stem` is `<namespace16>/<salt16>/`."""
    return stem + chunk_digest[:DIGEST_BYTES].hex()


def group_key(key: str, group: str) -> str:
    """Return the key of the same chunk for a further layer group: same namespace and salt, another digest.

    Raises:
        InvalidKeyError: if `key` does not end in a digest.
    """
    stem, slash, text = key.rpartition("/")
    try:
        chunk_digest = bytes.fromhex(text)
    except ValueError:
        chunk_digest = b""
    if not slash or len(chunk_digest) != DIGEST_BYTES:
        raise InvalidKeyError(f"{key!r} is not the key of a chunk; give one that chunk_keys made")
    mixed = sha256(encode(GROUP_SCHEME) + encode(chunk_digest) + encode(group)).digest()
    return key_text(stem + "/", mixed)
