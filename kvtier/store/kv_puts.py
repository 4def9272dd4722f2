"""From a caller's KV tensors to the objects that a put stores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvtier.errors import InvalidValueError
from kvtier.keys import Prefix, chunk_keys
from kvtier.store.arguments import check_flag, check_hint
from kvtier.store.exchange import TensorSource
from kvtier.store.hints import advise
from kvtier.store.placing import Placing, Put
from kvtier.store.plan import PrefixPlan
from kvtier.store.results import ChunkPut, PutResult
from kvtier.store.waiting import check_wait, expiry, settle_puts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.chunk.layout import KVLayout
    from kvtier.concurrency.deadline import Deadline
    from kvtier.keys import Hint, PrefixLike
    from kvtier.store.engine import Engine
    from kvtier.store.exchange import KVSource
    from kvtier.store.kv import KVStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PutTerms:
    """How a put is made: the arguments of `KVStore.put` beside prefix, KV and deadline; `tail` is its `partial`."""

    start: int
    wait: str | None
    ttl_seconds: float | None
    tail: bool
    lossy: bool
    hint: Hint | None

    def check(self, engine: Engine, plan: PrefixPlan) -> None:
        """Raise `InvalidValueError` for what makes no sense."""
        if type(self.start) is not int or not 0 <= self.start <= plan.num_tokens:
            raise InvalidValueError(f"start={self.start!r}: must be within 0 and the prefix's {plan.num_tokens} tokens")
        check_flag("lossy", self.lossy)
        check_hint(self.hint)
        check_wait(engine, self.wait)
        expiry(engine, self.ttl_seconds)

    def skipped(self, plan: PrefixPlan) -> int:
        """Return how many chunks begin before `start` and end behind it."""
        return int(self.start % plan.chunk_tokens != 0 and self.start < plan.num_tokens)


async def put_source(
    engine: Engine, plan: PrefixPlan, layout: KVLayout, source: KVSource, *, terms: PutTerms, deadline: Deadline
) -> list[ChunkPut]:
    """Store what `source` holds of the layout's groups, by terms that were checked."""
    puts = chunk_puts(plan, layout, source, start=terms.start, tail=terms.tail, lossy=terms.lossy)
    expires, priority = expiry(engine, terms.ttl_seconds), terms.hint.priority if terms.hint else 0
    placed = await Placing(engine, expires=expires, priority=priority, deadline=deadline).place(puts)
    advise(engine, terms.hint, [put.key for put in puts])
    engine.arrivals.notify()
    await settle_puts(engine, placed, terms.wait, deadline)
    return [item.result() for item in placed]


def chunk_puts(
    plan: PrefixPlan,
    layout: KVLayout,
    source: KVSource,
    *,
    start: int,
    tail: bool,
    lossy: bool,
) -> Sequence[Put]:
    """Return one put per span and group that lies wholly within the source, parents before children.

    Args:
        plan: of the whole prefix.
        layout: the store's.
        source: checked against the layout; what it holds of a group ends with the prefix and may begin behind `start`.
        start: position of the first token the caller gave.
        tail: whether to store the incomplete last span.
        lossy: whether the KV was computed on top of a lossy hit.
    """
    puts = []
    for piece in plan.to_store(start, layout.groups):
        if plan.has_tail and piece.span == plan.spans - 1 and not tail:
            continue
        first, stop = plan.start(piece.span), plan.stop(piece.span)
        specs = layout.specs(piece.group, tokens=stop - first, first_token=first)
        if first < source.held_from(piece.group):
            continue
        puts.append(
            Put(
                key=plan.key(piece),
                namespace=plan.key(piece).split("/", 1)[0],
                parent=plan.parent(piece),
                kind="kv",
                specs=specs,
                tokens=stop - first,
                lossy=lossy,
                fill=partial(source.read, piece.group, specs),
                tensors=partial(source.parts, piece.group, specs) if isinstance(source, TensorSource) else None,
            )
        )
    return puts


def dropped_puts(store: KVStore, prefix: PrefixLike, *, start: int, tail: bool, reason: str) -> PutResult:
    """Return the result of a put of which nothing is known to be stored."""
    digest = store.namespace.fingerprint(layout=store.layout.describe(), chunk_tokens=store.chunk_tokens)
    keys = chunk_keys(Prefix.coerce(prefix), namespace=digest, chunk_tokens=store.chunk_tokens)
    plan = PrefixPlan(keys, store.layout)
    pieces = plan.to_store(start, store.layout.groups)
    return PutResult(
        chunks=tuple(
            ChunkPut(key=plan.key(piece), status="dropped", reason=reason)
            for piece in pieces
            if tail or not plan.has_tail or piece.span < plan.spans - 1
        )
    )
