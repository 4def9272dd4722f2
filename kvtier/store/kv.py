"""KVStore: the KV of prompt prefixes of one model, over all tiers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

from kvtier.errors import InvalidValueError
from kvtier.store import report
from kvtier.store.arguments import check_device, check_hint, check_namespace_kind, check_wait_seconds, listed
from kvtier.store.exchange import source_of
from kvtier.store.faces import check_layout, check_namespace, check_room
from kvtier.store.fetching import Fetching
from kvtier.store.hints import advise
from kvtier.store.kv_puts import PutTerms, put_source
from kvtier.store.layer_puts import LayerPuts
from kvtier.store.layerwise import stream_parts
from kvtier.store.leases import Leasing
from kvtier.store.loads import count_absent, touch
from kvtier.store.namespace_face import NamespaceFace
from kvtier.store.plan import token_range
from kvtier.store.prefetching import prefetch_cached
from kvtier.store.prefixes import find_cached, wait_cached
from kvtier.store.removal import delete_keys
from kvtier.store.requests import GetRequest
from kvtier.store.results import PutResult
from kvtier.store.targets import Targets
from kvtier.store.waiting import expiry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import torch

    from kvtier.chunk.layout import KVLayout
    from kvtier.keys import Hint, Namespace, PrefixLike
    from kvtier.planner import LoadPlan
    from kvtier.store.leases import Lease
    from kvtier.store.results import Hit, OutKV, PutKV
    from kvtier.store.streaming import Part


class KVStore(NamespaceFace):
    """A model's KV, chunk by chunk under the digests of its prompts. Made by `kvtier.open`; enter it with `async with`.

    Faults of a tier are misses and events, never exceptions, unless the store is strict. Every call ends by its
    `deadline_seconds` (the config's when not given) and may be cancelled at any time. Memory that a caller gave (`out`,
    the source of a `put`) is not touched once the call returned, raised or was cancelled.

    Attributes:
        chunks: the key level on the same tiers.
        prefill: how long the model takes to compute, for `plan` and `min_benefit_seconds`; may be set at any time.
    """

    def with_namespace(self, namespace: Namespace, *, layout: KVLayout | None = None) -> KVStore:
        """Return another model's face on the same tiers and memory; it lives and closes with this store.

        Raises:
            ConfigError: as `kvtier.open`.
        """
        layout = layout or self.layout
        check_namespace_kind(namespace)
        check_layout(layout)
        check_namespace(namespace, outliving=self._engine.outliving)
        check_room(layout, self.chunk_tokens, capacities=self._engine.capacities)
        return KVStore(self._engine, namespace=namespace, layout=layout, chunk_tokens=self.chunk_tokens)

    # --- reading

    async def get(
        self,
        prefix: PrefixLike,
        *,
        start: int = 0,
        max_tokens: int | None = None,
        out: OutKV | None = None,
        device: str | torch.device | None = None,
        deadline_seconds: float | None = None,
        wait_seconds: float = 0.0,
        min_benefit_seconds: float | None = None,
        hint: Hint | None = None,
    ) -> Hit | None:
        """Return the KV of the longest usable cached part of `prefix`, or None.

        Args:
            prefix: tokens from position 0.
            start: first position wanted; what comes before is the caller's already.
            max_tokens: count no more than this many leading tokens; `len(prefix) - 1` leaves one to compute.
            out: tensors to fill, shaped like `KVLayout` with any number of tokens, or `PagedLayout.target`; their
                content is undefined behind the hit, and after None.
            device: where the hit's tensors shall live.
            deadline_seconds: the call ends by then, with what has arrived.
            wait_seconds: wait this long for somebody's put to make the prefix longer.
            min_benefit_seconds: load only the leading part that is there sooner than computed, and only if that
                saves as many seconds as this (see `plan`).
            hint: what the policies may use.

        Raises:
            InvalidKeyError: `prefix` is no token sequence.
            InvalidValueError: any of the others makes no sense, or `min_benefit_seconds` is given but `prefill` is not
                set.
            ClosedError: the store does not serve calls.
        """
        engine = self._engine
        deadline = engine.begin(deadline_seconds)
        check_wait_seconds(wait_seconds)
        check_device(device)
        check_hint(hint)
        plan = self._plan(prefix)
        cap = token_range(plan.num_tokens, start, max_tokens)
        targets = Targets(self.layout, start=start, out=out)
        self._tell(plan, hint)
        cached = await wait_cached(engine, plan, targets.cap(cap), deadline, wait_seconds=wait_seconds)
        if min_benefit_seconds is not None:
            deadline = engine.paying.cut(
                cached, deadline, prefill=self.prefill, start=start, least_seconds=min_benefit_seconds
            )
        fetching = Fetching(engine, self.layout, cached, start=start, deadline=deadline)
        with engine.reads, engine.paying.learning(fetching.fetched.sizes):
            length = await fetching.fill(targets)
        if length <= start:
            return None
        advise(engine, hint, [plan.key(piece) for piece in cached.where])
        return await fetching.hit(targets, length, device=device)

    async def plan(
        self,
        prefix: PrefixLike,
        *,
        start: int = 0,
        max_tokens: int | None = None,
        split: bool = False,
        deadline_seconds: float | None = None,
    ) -> LoadPlan:
        """Tell what makes the cached part of `prefix` behind `start` usable soonest: load, recompute, or both at once.

        The tiers' speeds are what their reads took lately; `prefill` tells the model's. Reads no values. With `split`
        the front may be computed while the back is loaded (`get(prefix, start=start + plan.compute_tokens)`).

        Raises:
            InvalidKeyError, InvalidValueError: as `get` with `min_benefit_seconds`.
        """
        deadline = self._engine.begin(deadline_seconds)
        keys = self._plan(prefix)
        cached = await self._cached(keys, token_range(keys.num_tokens, start, max_tokens), deadline)
        return self._engine.paying.plan(cached, self.prefill, start=start, split=split)

    async def exists(
        self, prefix: PrefixLike, *, max_tokens: int | None = None, deadline_seconds: float | None = None
    ) -> int:
        """Return how many leading tokens are cached and usable; reads no values. 0 if none."""
        return (await self.exists_many([prefix], max_tokens=max_tokens, deadline_seconds=deadline_seconds))[0]

    async def exists_many(
        self, prefixes: Sequence[PrefixLike], *, max_tokens: int | None = None, deadline_seconds: float | None = None
    ) -> Sequence[int]:
        """Return `exists` for each prefix, with one round trip per shared tier for all."""
        deadline = self._engine.begin(deadline_seconds)
        plans = [self._plan(prefix) for prefix in listed(prefixes, "prefixes")]
        asked = [(plan, token_range(plan.num_tokens, 0, max_tokens)) for plan in plans]
        found = await find_cached(self._engine, asked, deadline, exact=self._engine.settings.lossless)
        return [cached.usable() for cached in found]

    async def get_many(
        self, requests: Sequence[GetRequest | PrefixLike], *, deadline_seconds: float | None = None
    ) -> Sequence[Hit | None]:
        """Run several gets at once; a bare prefix stands for `GetRequest(prefix)`. Raises as `get`."""
        self._engine.guard()
        asked = [item if isinstance(item, GetRequest) else GetRequest(item) for item in listed(requests, "requests")]
        calls = [
            self.get(
                item.prefix,
                start=item.start,
                max_tokens=item.max_tokens,
                out=item.out,
                device=item.device,
                hint=item.hint,
                min_benefit_seconds=item.min_benefit_seconds,
                deadline_seconds=deadline_seconds,
            )
            for item in asked
        ]
        try:  # a group, because it waits for all of them, also when one failed or the caller is cancelled
            async with asyncio.TaskGroup() as group:
                gets = [group.create_task(call) for call in calls]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [get.result() for get in gets]

    @asynccontextmanager
    async def lease(
        self,
        prefix: PrefixLike,
        *,
        start: int = 0,
        max_tokens: int | None = None,
        deadline_seconds: float | None = None,
    ) -> AsyncIterator[Lease]:
        """Lend the cached chunks of a prefix in place: no copy from memory tiers, and no eviction meanwhile.

        All leases together hold at most `lease_share` of the arena; beyond that the lease is partial. A view keeps its
        memory as long as it lives, also after the scope.
        """
        engine = self._engine
        deadline = engine.begin(deadline_seconds)
        plan = self._plan(prefix)
        cached = await self._cached(plan, token_range(plan.num_tokens, start, max_tokens), deadline)
        count_absent(engine, int(cached.missing is not None))
        leasing = Leasing(engine, self.layout, cached, start=start, deadline=deadline)
        try:
            yield await leasing.take()
        finally:
            if leasing.hold is not None:
                leasing.hold.release()

    async def stream(
        self,
        prefix: PrefixLike,
        *,
        start: int = 0,
        max_tokens: int | None = None,
        by: Literal["chunk", "layer"] = "chunk",
        deadline_seconds: float | None = None,
    ) -> AsyncIterator[Part]:
        """Yield the cached KV of a prefix in order, as it arrives: no more is held in memory than has to be.

        By chunk: each part is one chunk of one layer group, full groups first. By layer: each part is one layer, with
        all its tokens, of [start, the usable length); the next layer groups load meanwhile. A fault ends the stream.
        """
        engine = self._engine
        deadline = engine.begin(deadline_seconds)
        plan = self._plan(prefix)
        cap = token_range(plan.num_tokens, start, max_tokens)
        cached = await wait_cached(engine, plan, cap, deadline)
        async for part in stream_parts(engine, self.layout, cached, start=start, by=by, deadline=deadline):
            yield part

    async def prefetch(
        self,
        prefix: PrefixLike,
        *,
        to: str | None = None,
        max_tokens: int | None = None,
        deadline_seconds: float | None = None,
    ) -> int:
        """Bring the cached chunks of a prefix up to the tier named `to` (else the first), in the background class.

        Returns:
            How many leading tokens stand in that tier when the call ends.

        Raises:
            InvalidValueError: no tier is called `to`.
        """
        engine = self._engine
        deadline = engine.begin(deadline_seconds)
        plan = self._plan(prefix)
        cached = await wait_cached(engine, plan, token_range(plan.num_tokens, 0, max_tokens), deadline)
        return await prefetch_cached(engine, cached, engine.tier(to), deadline)

    # --- writing

    async def put(
        self,
        prefix: PrefixLike,
        kv: PutKV,
        *,
        start: int = 0,
        wait: str | None = None,
        ttl_seconds: float | None = None,
        partial: bool | None = None,
        lossy: bool = False,
        deadline_seconds: float | None = None,
        hint: Hint | None = None,
    ) -> PutResult:
        """Store the KV of [start, len(prefix)): a snapshot now, lower tiers in the background.

        Args:
            prefix: tokens from position 0.
            kv: tensors of exactly these tokens (a windowed group: or its last `window - 1`), or `PagedLayout.source`.
            start: position of the first token in `kv`; chunks that begin before it are skipped.
            wait: None; "durable" (on a persistent tier); or a tier's name.
            ttl_seconds: after this the chunks are misses; a second put sets the later of two expiries.
            partial: store the incomplete last chunk too, found only by a prefix that ends exactly there.
            lossy: the KV was computed on top of a lossy hit (`hit.lossy`).
            deadline_seconds: the call ends by then.
            hint: what the policies may use.

        Raises:
            InvalidKeyError, LayoutMismatchError, InvalidValueError: the caller's mistake; nothing was stored.
            BackendError: a `wait` that failed.
            ClosedError: the store does not serve calls.
        """
        engine = self._engine
        deadline = engine.begin(deadline_seconds)
        plan = self._plan(prefix)
        terms = PutTerms(start=start, wait=wait, ttl_seconds=ttl_seconds, tail=bool(partial), lossy=lossy, hint=hint)
        terms.check(engine, plan)
        source = source_of(self.layout, kv, start=start, stop=plan.num_tokens)
        chunks = await put_source(engine, plan, self.layout, source, terms=terms, deadline=deadline)
        return PutResult(chunks=tuple(chunks), skipped=terms.skipped(plan))

    def put_layers(
        self,
        prefix: PrefixLike,
        *,
        start: int = 0,
        wait: str | None = None,
        ttl_seconds: float | None = None,
        partial: bool | None = None,
        lossy: bool = False,
        deadline_seconds: float | None = None,
        hint: Hint | None = None,
    ) -> LayerPuts:
        """As `put`, layer by layer while the model computes: `async with store.put_layers(prefix) as layers`.

        `layers.add(layer, kv)` returns at once; a layer group is stored as soon as its layers are there, while the next
        ones are computed. Leaving the scope waits for all. `deadline_seconds` counts from a group's last layer on.
        """
        terms = PutTerms(start=start, wait=wait, ttl_seconds=ttl_seconds, tail=bool(partial), lossy=lossy, hint=hint)
        return LayerPuts(self._engine, self._plan(prefix), self.layout, terms, deadline_seconds)

    async def delete(self, prefix: PrefixLike, *, start: int = 0, deadline_seconds: float | None = None) -> int:
        """Remove the chunks of `prefix` that lie wholly behind `start` from every tier; return how many there were.

        Raises:
            PartialDeleteError: a tier did not confirm; the chunks are hidden in this store all the same.
        """
        deadline = self._engine.begin(deadline_seconds)
        plan = self._plan(prefix)
        token_range(plan.num_tokens, start, None)
        pieces = plan.to_store(start, self.layout.groups)
        return sum(await delete_keys(self._engine, [plan.key(piece) for piece in pieces], deadline))

    async def touch(self, prefix: PrefixLike, *, ttl_seconds: float | None = None, hint: Hint | None = None) -> int:
        """Note a use of the cached chunks of `prefix`, and let them live `ttl_seconds` from now if that is later.

        Returns:
            How many leading tokens are cached.
        """
        engine = self._engine
        deadline = engine.begin(None)
        check_hint(hint)
        expiry(engine, ttl_seconds)
        plan = self._plan(prefix)
        cached = await self._cached(plan, plan.num_tokens, deadline)
        keys = [plan.key(piece) for piece in cached.where]
        if ttl_seconds is not None:
            report.extend_life(engine, keys, expiry(engine, ttl_seconds))
        touch(engine, keys)
        advise(engine, hint, keys)
        return cached.usable()

    async def pin(self, prefix: PrefixLike, *, tier: str | None = None, ttl_seconds: float) -> int:
        """Exempt the cached chunks of `prefix` from eviction for a time, in one tier or in all that hold them.

        Returns how many leading tokens are cached, and pinned now.

        Raises:
            InvalidValueError: no tier is called `tier`, or `ttl_seconds` is not a finite number above 0.
        """
        if ttl_seconds is None:  # what takes a pin back
            raise InvalidValueError("ttl_seconds=None: must be a finite number of seconds above 0; unpin takes back")
        return await self._set_pins(prefix, tier, ttl_seconds)

    async def unpin(self, prefix: PrefixLike, *, tier: str | None = None) -> int:
        """Take back what `pin` did."""
        return await self._set_pins(prefix, tier, None)

    async def _set_pins(self, prefix: PrefixLike, tier: str | None, ttl_seconds: float | None) -> int:
        engine = self._engine
        deadline = engine.begin(None)
        expiry(engine, ttl_seconds)
        plan = self._plan(prefix)
        chosen = engine.tiers if tier is None else [engine.tier(tier)]
        cached = await self._cached(plan, plan.num_tokens, deadline)
        report.set_pins(chosen, [plan.key(piece) for piece in cached.where], ttl_seconds)
        return cached.usable()
