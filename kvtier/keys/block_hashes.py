"""Block hashes that an engine has computed, in place of the tokens they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from kvtier.errors import InvalidKeyError
from kvtier.keys.chain import (
    ChunkKeys,
    Extras,
    Salt,
    check_chunk_tokens,
    checked_text,
    key_text,
    salt_digest,
)
from kvtier.keys.wire import encode, opening

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.keys.namespace import NamespaceDigest

MIN_HASH_BYTES: Final = 16


class BlockHashes:
    """A prefix known by chained hashes: hash i stands for all tokens up to `(i + 1) * tokens_per_hash`. Immutable."""

    __slots__ = ("_hashes", "_num_tokens", "_salt", "_scheme", "_tokens_per_hash")

    def __init__(
        self,
        hashes: Sequence[bytes],
        *,
        tokens_per_hash: int,
        scheme: str,
        num_tokens: int | None = None,
        salt: Salt = None,
    ) -> None:
        """Copy and check `hashes`.

        Args:
            hashes: of the blocks in order, at least 16 bytes each (shorter ones collide). They cover salt, LoRA and
                media as far as the engine's scheme does.
            tokens_per_hash: tokens in one block.
            scheme: names how the engine hashes, with everything that changes the result, e.g.
                `"vllm-sha256_cbor-seed0"`. Equal hashes under different schemes give different keys.
            num_tokens: length of the whole prefix; default `len(hashes) * tokens_per_hash`. A last block that is
                not full may have a hash of its own or none.
            salt: keeps owners apart, beyond what is in the hashes.

        Raises:
            InvalidKeyError: naming what is wrong.
        """
        given: object = hashes  # may come straight from a user
        if not isinstance(given, Iterable) or isinstance(given, str | bytes):
            raise InvalidKeyError(f"hashes come as {type(hashes).__name__}; give a list of bytes")
        self._hashes = tuple(_checked_hash(index, each) for index, each in enumerate(hashes))
        self._tokens_per_hash = _checked_count(tokens_per_hash, "tokens_per_hash", least=1)
        text = checked_text(scheme, "scheme")
        if not isinstance(text, str):
            raise InvalidKeyError(f"scheme is {scheme!r}; name how the hashes are made, e.g. 'vllm-sha256_cbor-seed0'")
        self._scheme = text
        covered = len(self._hashes) * self._tokens_per_hash
        self._num_tokens = covered if num_tokens is None else _checked_count(num_tokens, "num_tokens", least=0)
        if abs(self._num_tokens - covered) >= self._tokens_per_hash:
            raise InvalidKeyError(
                f"num_tokens is {num_tokens}, but {len(self._hashes)} hashes of {tokens_per_hash} tokens cover"
                f" {covered}; give the hashes of exactly this prefix"
            )
        self._salt = salt_digest(salt)

    def keys(self, *, namespace: NamespaceDigest, chunk_tokens: int) -> ChunkKeys:
        """Return the keys of this prefix's chunks: each takes the last hash inside it.

        Raises:
            InvalidKeyError: if blocks do not divide chunks: no hash would end where a chunk ends.
        """
        per_chunk, rest = divmod(check_chunk_tokens(chunk_tokens), self._tokens_per_hash)
        if rest:
            raise InvalidKeyError(
                f"blocks of {self._tokens_per_hash} tokens do not divide chunks of {chunk_tokens}; change chunk_tokens"
            )
        fixed = b"".join(map(encode, (namespace.bytes32, chunk_tokens, self._salt, self._scheme)))
        stem = f"{namespace.text16}/{Extras(self._salt, None, {}).salt_text}/"
        full = self._num_tokens // chunk_tokens
        head = opening("hash") + fixed
        keys = []
        for index in range(full):
            end = (index + 1) * chunk_tokens
            last = self._hashes[(index + 1) * per_chunk - 1]
            keys.append(key_text(stem, sha256(head + encode(end) + encode(last)).digest()))
        partial = None
        if self._num_tokens % chunk_tokens and self._ends_in_hash():
            end_and_hash = encode(self._num_tokens) + encode(self._hashes[-1])
            partial = key_text(stem, sha256(opening("hash-tail") + fixed + end_and_hash).digest())
        return ChunkKeys(keys=tuple(keys), num_tokens=self._num_tokens, chunk_tokens=chunk_tokens, partial=partial)

    def __len__(self) -> int:
        """Return the prefix's length in tokens."""
        return self._num_tokens

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, BlockHashes) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"<BlockHashes of {self._num_tokens} tokens, {len(self._hashes)} hashes by {self._scheme!r}>"

    def _identity(self) -> tuple[object, ...]:
        return self._hashes, self._tokens_per_hash, self._scheme, self._num_tokens, self._salt

    def _ends_in_hash(self) -> bool:
        """Tell whether the last hash stands for the whole prefix."""
        return -(-self._num_tokens // self._tokens_per_hash) == len(self._hashes)


def _checked_hash(index: int, value: object) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidKeyError(f"hash {index} is a {type(value).__name__}; give bytes (bytes.fromhex for hex text)")
    copied = bytes(value)
    if len(copied) < MIN_HASH_BYTES:
        raise InvalidKeyError(
            f"hash {index} has {len(copied)} bytes; at least {MIN_HASH_BYTES}, or different prefixes will collide"
        )
    return copied


def _checked_count(value: object, what: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidKeyError(f"{what} is {value!r}; give an int of at least {least}")
    return value
