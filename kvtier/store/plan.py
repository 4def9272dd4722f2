"""Which chunks of which layer groups make a prefix usable: pure arithmetic over spans of tokens."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, NamedTuple

from kvtier.errors import InvalidValueError
from kvtier.keys.chain import ChunkKeys, group_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.chunk.layout import KVLayout, LayerGroup


class Piece(NamedTuple):
    """One stored object: the tokens of one span in one layer group."""

    group: str
    span: int


class PrefixPlan:
    """A prefix cut into spans (its chunks, and the stored tail if there is one), with a key per span and group."""

    def __init__(self, keys: ChunkKeys, layout: KVLayout) -> None:
        self.num_tokens: int = keys.num_tokens
        self.chunk_tokens: int = keys.chunk_tokens
        self.full: tuple[LayerGroup, ...] = tuple(group for group in layout.groups if group.window is None)
        self.windowed: tuple[LayerGroup, ...] = tuple(group for group in layout.groups if group.window is not None)
        self._first = layout.groups[0].name
        self._chain = keys.keys if keys.partial is None else (*keys.keys, keys.partial)
        self.has_tail: bool = keys.partial is not None

    def only(self, group: LayerGroup) -> PrefixPlan:
        """Return the plan of one of the groups, with the same keys."""
        plan = copy.copy(self)
        plan.full, plan.windowed = ((group,), ()) if group.window is None else ((), (group,))
        return plan

    @property
    def spans(self) -> int:
        """How many spans the prefix has."""
        return len(self._chain)

    @property
    def whole(self) -> Sequence[str]:
        """Keys of the whole chunks, as the first group has them."""
        return self._chain[: len(self._chain) - self.has_tail]

    def start(self, span: int) -> int:
        """Return the position of the span's first token."""
        return span * self.chunk_tokens

    def stop(self, span: int) -> int:
        """Return the position behind the span's last token."""
        return min((span + 1) * self.chunk_tokens, self.num_tokens)

    def key(self, piece: Piece) -> str:
        """Return the key of one stored object."""
        key = self._chain[piece.span]
        return key if piece.group == self._first else group_key(key, piece.group)

    def parent(self, piece: Piece) -> str | None:
        """Return the key this object is useless without: the one before it, or for windows the span's full object."""
        if any(piece.group == group.name for group in self.full):
            return self.key(Piece(piece.group, piece.span - 1)) if piece.span else None
        return self.key(Piece(self.full[0].name, piece.span)) if self.full else None

    def run(self, start: int = 0, length: int | None = None) -> list[Piece]:
        """Return, in the order of tokens, the objects of [start, length) without which no later token is usable."""
        stop = self.spans if length is None else min(self.spans, -(-length // self.chunk_tokens))
        names = [group.name for group in self.full]
        return [Piece(name, span) for span in range(start // self.chunk_tokens, stop) for name in names]

    def limit_of_run(self, found: int) -> int:
        """Return how many leading tokens the first `found` objects of `run` cover."""
        if not self.full:
            return self.stop(self.spans - 1) if self.spans else 0
        spans = found // len(self.full)
        return self.stop(spans - 1) if spans else 0

    def window_start(self, group: LayerGroup, length: int) -> int:
        """Return the first position that a group must have for a prefix of `length` tokens; 0 for full groups."""
        return 0 if group.window is None else max(0, length - (group.window - 1))

    def pieces(self, group: LayerGroup, first: int, stop: int) -> list[Piece]:
        """Return the objects of `group` that hold tokens of [first, stop)."""
        if first >= stop:
            return []
        return [Piece(group.name, span) for span in range(first // self.chunk_tokens, -(-stop // self.chunk_tokens))]

    def window_pieces(self, limit: int) -> list[Piece]:
        """Return every windowed object that could matter for some usable length up to `limit`."""
        return [piece for group in self.windowed for piece in self.pieces(group, 0, limit)]

    def usable(self, limit: int, present: Callable[[Piece], bool]) -> int:
        """Return the greatest length up to `limit` for which every windowed group has what it needs.

        `limit` is what the full groups cover. Within one span the greatest length needs the least, so one candidate
        per span is enough.
        """
        if not self.windowed:
            return limit
        for span in range(-(-limit // self.chunk_tokens) - 1, -1, -1):
            length = min(self.stop(span), limit)
            if all(
                present(piece)
                for group in self.windowed
                for piece in self.pieces(group, self.window_start(group, length), length)
            ):
                return length
        return 0

    def needed(self, start: int, length: int) -> list[Piece]:
        """Return the objects that hold the KV of [start, length): full groups first, each in token order."""
        pieces = self.run(start, length)
        for group in self.windowed:
            pieces += self.pieces(group, max(start, self.window_start(group, length)), length)
        return pieces

    def to_store(self, start: int, groups: Sequence[LayerGroup]) -> list[Piece]:
        """Return the objects that lie wholly in [start, end of prefix): parents before children."""
        first = -(-start // self.chunk_tokens)
        return [Piece(group.name, span) for span in range(first, self.spans) for group in groups]


def token_range(num_tokens: int, start: int, max_tokens: int | None) -> int:
    """Return the cap on the length; raise `InvalidValueError` for positions that make no sense."""
    if type(start) is not int or start < 0:
        raise InvalidValueError(f"start={start!r}: must be a position, 0 or more")
    if max_tokens is None:
        return num_tokens
    if type(max_tokens) is not int or max_tokens < 0:
        raise InvalidValueError(f"max_tokens={max_tokens!r}: must be a number of tokens, 0 or more")
    return min(max_tokens, num_tokens)
