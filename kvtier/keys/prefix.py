"""A prompt's tokens with all else that decides its KV, and the keys of its chunks."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from kvtier.errors import InvalidKeyError
from kvtier.keys.block_hashes import BlockHashes
from kvtier.keys.chain import (
    ChunkKeys,
    Extras,
    MediaItem,
    Salt,
    chain_chunks,
    chain_root,
    checked_text,
    key_text,
    salt_digest,
    tail_digest,
)
from kvtier.keys.tokens import WORD, TokenSource, token_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.keys.namespace import NamespaceDigest

PrefixLike: TypeAlias = "Prefix | BlockHashes | TokenSource"

_CHAINS_KEPT = 4  # namespaces or chunk sizes that one prefix is asked for


class Prefix:
    """Tokens from position 0 on, with their salt, LoRA and media. Immutable: it keeps a copy of the tokens.

    Keys are computed once and kept; `extend` goes on from them.
    """

    __slots__ = ("_chains", "_lora", "_media", "_salts", "_words")

    def __init__(
        self,
        tokens: TokenSource,
        *,
        salt: Salt = None,
        lora: str | bytes | None = None,
        media: Sequence[MediaItem] | None = None,
    ) -> None:
        """Copy and check `tokens`; `None` and emptiness mean the same for `salt`, `lora` and `media`.

        Args:
            tokens: integers from 0 to 2**32 - 1: `Sequence[int]`, `array`, numpy or torch integer array of shape
                `[n]` or `[1, n]`. None at all is legal: such a prefix has no keys.
            salt: keeps prefixes of different owners apart; it shows in keys only as a digest.
            lora: content digest of the adapter the KV is computed with.
            media: `(position, digest)` of each image or other embedding that starts at token `position`.

        Raises:
            InvalidKeyError: for anything that cannot be hashed exactly; the message names it.
        """
        self._words = token_words(tokens)
        self._salts: tuple[tuple[int, bytes | None], ...] = ((0, salt_digest(salt)),)
        self._lora = checked_text(lora, "lora")
        self._media = _checked_media(media, first=0, end=len(self))
        self._chains: dict[tuple[bytes, int], tuple[ChunkKeys, bytes]] = {}

    @classmethod
    def coerce(cls, prefix: PrefixLike) -> Prefix | BlockHashes:
        """Return `prefix` itself if it has keys of its own, else a `Prefix` of these tokens without salt."""
        return prefix if isinstance(prefix, Prefix | BlockHashes) else cls(prefix)

    def extend(self, tokens: TokenSource, *, salt: Salt = None, media: Sequence[MediaItem] | None = None) -> Prefix:
        """Return this prefix with `tokens` behind it, reusing the keys computed so far.

        A `salt` of its own applies from the first chunk that holds an extended token; the chunks before keep their
        keys. Without one the last salt goes on: what was private stays private. `media` positions count from the
        prefix's start and lie among the new tokens.
        """
        longer = Prefix(())
        longer._words = self._words + token_words(tokens)  # still its own constructor
        longer._salts = self._salts_with(salt_digest(salt))
        longer._lora = self._lora
        new_media = _checked_media(media, first=len(self), end=len(longer))
        longer._media = (*self._media, *new_media)
        longer._chains = dict(self._chains)
        return longer

    def keys(self, *, namespace: NamespaceDigest, chunk_tokens: int) -> ChunkKeys:
        """Return the keys of this prefix's chunks; asked again, the same object."""
        which = (namespace.bytes32, chunk_tokens)
        known = self._chains.get(which)
        if known is not None and known[0].num_tokens == len(self):
            return known[0]
        chain = self._go_on(known, namespace, chunk_tokens)
        if len(self._chains) >= _CHAINS_KEPT and which not in self._chains:
            self._chains = {}
        self._chains[which] = chain
        return chain[0]

    def __len__(self) -> int:
        return len(self._words) // WORD

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prefix):
            return NotImplemented
        mine = (self._words, self._salts, self._lora, self._media)
        return mine == (other._words, other._salts, other._lora, other._media)

    def __hash__(self) -> int:
        return hash((self._words, self._salts, self._lora, self._media))

    def __repr__(self) -> str:
        salted = any(salt is not None for _, salt in self._salts)
        lora = self._lora is not None
        return f"<Prefix of {len(self)} tokens, {salted=}, {lora=}, media={len(self._media)}>"

    def _go_on(
        self, known: tuple[ChunkKeys, bytes] | None, namespace: NamespaceDigest, chunk_tokens: int
    ) -> tuple[ChunkKeys, bytes]:
        """Return the keys and the last full chunk's digest, starting behind the full chunks of `known`."""
        previous = chain_root(namespace, chunk_tokens) if known is None else known[1]
        keys = [] if known is None else list(known[0].keys)
        full = len(self) // chunk_tokens
        media = self._media_by_chunk(chunk_tokens)
        for chunks, salt in self._salted_chunks(len(keys), full, chunk_tokens):
            extras = Extras(salt, self._lora, media)
            digests = chain_chunks(self._words, previous, chunks, extras, chunk_tokens)
            stem = f"{namespace.text16}/{extras.salt_text}/"
            keys += [key_text(stem, each) for each in digests]
            previous = digests[-1]
        partial = None
        if len(self) % chunk_tokens:
            extras = Extras(self._salt_of(full, chunk_tokens), self._lora, media)
            tail = tail_digest(self._words[full * chunk_tokens * WORD :], previous, full, extras)
            partial = key_text(f"{namespace.text16}/{extras.salt_text}/", tail)
        found = ChunkKeys(keys=tuple(keys), num_tokens=len(self), chunk_tokens=chunk_tokens, partial=partial)
        return found, previous

    def _salts_with(self, own: bytes | None) -> tuple[tuple[int, bytes | None], ...]:
        """Return (first token, salt) of each part of this prefix, extended by a part under `own`."""
        if own is None or own == self._salts[-1][1]:
            return self._salts
        before = tuple(part for part in self._salts if part[0] < len(self))
        return before if before and before[-1][1] == own else (*before, (len(self), own))

    def _salted_chunks(self, first: int, end: int, chunk_tokens: int) -> Iterator[tuple[range, bytes | None]]:
        """Yield the chunks from `first` to `end` in runs of one salt."""
        starts = [start // chunk_tokens for start, _ in self._salts[1:]]
        while first < end:
            stop = min([start for start in starts if start > first] + [end])
            yield range(first, min(stop, end)), self._salt_of(first, chunk_tokens)
            first = stop

    def _salt_of(self, chunk: int, chunk_tokens: int) -> bytes | None:
        """Return the salt of the last part that has a token in `chunk`."""
        end = min((chunk + 1) * chunk_tokens, len(self))
        return [salt for start, salt in self._salts if start < end][-1]

    def _media_by_chunk(self, chunk_tokens: int) -> dict[int, list[MediaItem]]:
        held: dict[int, list[MediaItem]] = {}
        for item in self._media:
            held.setdefault(item[0] // chunk_tokens, []).append(item)
        return held


def _checked_media(media: Sequence[MediaItem] | None, *, first: int, end: int) -> tuple[MediaItem, ...]:
    """Return media ordered by position; they must start in [first, end)."""
    given: object = media  # may come straight from a user
    if given is not None and not isinstance(given, Iterable):
        raise InvalidKeyError(f"media come as {type(media).__name__}; give a list of (position, digest)")
    checked = [_checked_item(index, item, first, end) for index, item in enumerate(media or ())]
    return tuple(sorted(checked, key=_media_order))


def _checked_item(index: int, item: object, first: int, end: int) -> MediaItem:
    if not isinstance(item, tuple | list) or len(item) != 2:  # noqa: PLR2004  # a pair
        raise InvalidKeyError(f"media[{index}] is {item!r}; give (position, digest)")
    text = checked_text(item[1], f"media[{index}] digest")
    if text is None:
        raise InvalidKeyError(f"media[{index}] has no digest; two images without one could not be told apart")
    return _checked_position(item[0], index, first, end), text


def _media_order(item: MediaItem) -> tuple[int, bool, bytes]:
    position, digest = item
    return position, isinstance(digest, str), digest.encode() if isinstance(digest, str) else digest


def _checked_position(position: object, index: int, first: int, end: int) -> int:
    try:
        place = -1 if isinstance(position, bool) else operator.index(position)  # type: ignore[arg-type]  # may raise
    except TypeError:
        place = -1
    if not first <= place < end:
        raise InvalidKeyError(f"media[{index}] starts at token {position!r}; give an int from {first} to {end - 1}")
    return place


def chunk_keys(prefix: Prefix | BlockHashes, *, namespace: NamespaceDigest, chunk_tokens: int) -> ChunkKeys:
    """Return the keys of a prefix's chunks in a namespace.

    Raises:
        InvalidKeyError: if the chunk size is no int from 1 on, or does not fit `BlockHashes.tokens_per_hash`.
    """
    return prefix.keys(namespace=namespace, chunk_tokens=chunk_tokens)
