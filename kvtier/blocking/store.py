"""KVStore for code that blocks: the same calls, made in any thread, run on one loop."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from kvtier.blocking.call import OverdueError
from kvtier.blocking.chunks import BlockingChunkStore
from kvtier.blocking.face import BlockingFace, checked_seconds
from kvtier.blocking.layer_puts import BlockingLayerPuts
from kvtier.planner import NOTHING_CACHED
from kvtier.store.kv import KVStore
from kvtier.store.kv_puts import dropped_puts
from kvtier.store.leases import Lease

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self

    import torch

    from kvtier.blocking.loop_thread import CallCounts, LoopThread
    from kvtier.chunk.layout import KVLayout
    from kvtier.keys import Hint, Namespace, PrefixLike
    from kvtier.planner import LoadPlan, Prefill
    from kvtier.store.requests import GetRequest
    from kvtier.store.results import ChunkPut, FlushResult, Hit, ListEntry, OutKV, Pressure, PutKV, PutResult, Stats
    from kvtier.store.streaming import Part


class BlockingStore(BlockingFace[KVStore]):
    """As `KVStore`, from any thread. Made by `kvtier.open_blocking`; `with` opens it at once, else the first call does.

    Every call ends by its deadline, whatever the loop does: reads are then misses, puts are dropped (in a strict store
    `BackendTimeoutError` is raised), and what must not be lost silently (`delete`, `clear`, `flush`, a `wait`) raises
    `BackendTimeoutError`. Memory that a caller gave is not touched once the call is over.

    Attributes:
        chunks: the key level on the same tiers.
    """

    def __init__(self, thread: LoopThread, store: KVStore) -> None:
        options: dict[str, Any] = {"deadline_seconds": store.deadline_seconds, "strict": store.strict}
        super().__init__(thread, store, **options)
        self.chunks: BlockingChunkStore = BlockingChunkStore(thread, store.chunks, **options)

    # --- life

    def open(self) -> None:
        """Open all tiers or none, and wait for it. Raises as entering a `KVStore`."""
        self._thread.open()

    def close(self) -> None:
        """As `KVStore.aclose`; ends within `close_seconds` and a second more, also when the loop is stuck."""
        self._thread.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def with_namespace(self, namespace: Namespace, *, layout: KVLayout | None = None) -> BlockingStore:
        """As `KVStore.with_namespace`: another model's face on the same tiers and the same thread."""
        return BlockingStore(self._thread, self._subject.with_namespace(namespace, layout=layout))

    @property
    def namespace(self) -> Namespace:
        """Which model this is."""
        return self._subject.namespace

    @property
    def layout(self) -> KVLayout:
        """What the model's KV looks like."""
        return self._subject.layout

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk."""
        return self._subject.chunk_tokens

    @property
    def prefill(self) -> Prefill | None:
        """As `KVStore.prefill`; may be set at any time."""
        return self._subject.prefill

    @prefill.setter
    def prefill(self, prefill: Prefill | None) -> None:
        self._subject.prefill = prefill

    # --- submitted calls

    def poll(self) -> list[Future[Any]]:
        """Return the futures from `submit` that have finished since the last poll, in the order they did.

        Futures that nobody holds any more are left out. Never waits.
        """
        return self._thread.poll()

    def drain(self, *, deadline_seconds: float | None = None) -> bool:
        """Wait until no call is in the queue or on the loop; tell whether that came by the deadline."""
        seconds = self._deadline_seconds if deadline_seconds is None else checked_seconds(deadline_seconds)
        return self._thread.drain(seconds)

    @property
    def calls(self) -> CallCounts:
        """How many calls came through here, and how they ended."""
        return self._thread.counts

    # --- reading

    def get(
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
        """As `KVStore.get`."""
        return self._ask(
            None,
            KVStore.get,
            prefix,
            start=start,
            max_tokens=max_tokens,
            out=out,
            device=device,
            deadline_seconds=deadline_seconds,
            wait_seconds=wait_seconds,
            min_benefit_seconds=min_benefit_seconds,
            hint=hint,
        )

    def plan(
        self,
        prefix: PrefixLike,
        *,
        start: int = 0,
        max_tokens: int | None = None,
        split: bool = False,
        deadline_seconds: float | None = None,
    ) -> LoadPlan:
        """As `KVStore.plan`; where the loop does not answer in time, nothing is cached."""
        return self._ask(
            NOTHING_CACHED,
            KVStore.plan,
            prefix,
            start=start,
            max_tokens=max_tokens,
            split=split,
            deadline_seconds=deadline_seconds,
        )

    def get_many(
        self, requests: Sequence[GetRequest | PrefixLike], *, deadline_seconds: float | None = None
    ) -> Sequence[Hit | None]:
        """As `KVStore.get_many`."""
        return self._ask([None] * len(requests), KVStore.get_many, requests, deadline_seconds=deadline_seconds)

    def exists(
        self, prefix: PrefixLike, *, max_tokens: int | None = None, deadline_seconds: float | None = None
    ) -> int:
        """As `KVStore.exists`."""
        return self._ask(0, KVStore.exists, prefix, max_tokens=max_tokens, deadline_seconds=deadline_seconds)

    def exists_many(
        self, prefixes: Sequence[PrefixLike], *, max_tokens: int | None = None, deadline_seconds: float | None = None
    ) -> Sequence[int]:
        """As `KVStore.exists_many`."""
        return self._ask(
            [0] * len(prefixes),
            KVStore.exists_many,
            prefixes,
            max_tokens=max_tokens,
            deadline_seconds=deadline_seconds,
        )

    @contextmanager
    def lease(
        self,
        prefix: PrefixLike,
        *,
        start: int = 0,
        max_tokens: int | None = None,
        deadline_seconds: float | None = None,
    ) -> Iterator[Lease]:
        """As `KVStore.lease`; an overdue lease is empty."""
        wanted: dict[str, Any] = {"start": start, "max_tokens": max_tokens}
        entered: list[AbstractAsyncContextManager[Lease]] = []
        turn = asyncio.Lock()  # leaving waits for an entry that was given up and is still on its way

        async def enter(store: KVStore, *, deadline_seconds: float | None = None) -> Lease:
            async with turn:
                scope = store.lease(prefix, deadline_seconds=deadline_seconds, **wanted)
                lease = await scope.__aenter__()
                entered.append(scope)
                return lease

        async def leave() -> None:
            async with turn:
                while entered:
                    await entered.pop().__aexit__(None, None, None)

        try:
            yield self._ask(Lease(num_tokens=0, chunks=(), complete=False), enter, deadline_seconds=deadline_seconds)
        finally:
            self._thread.run_later(leave)

    def stream(
        self,
        prefix: PrefixLike,
        *,
        start: int = 0,
        max_tokens: int | None = None,
        by: Literal["chunk", "layer"] = "chunk",
        deadline_seconds: float | None = None,
    ) -> Iterator[Part]:
        """As `KVStore.stream`."""
        parts = self._subject.stream(
            prefix, start=start, max_tokens=max_tokens, by=by, deadline_seconds=deadline_seconds
        )
        return self._iterate(parts, deadline_seconds)

    def prefetch(
        self,
        prefix: PrefixLike,
        *,
        to: str | None = None,
        max_tokens: int | None = None,
        deadline_seconds: float | None = None,
    ) -> int:
        """As `KVStore.prefetch`."""
        return self._ask(0, KVStore.prefetch, prefix, to=to, max_tokens=max_tokens, deadline_seconds=deadline_seconds)

    # --- writing

    def put(
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
        """As `KVStore.put`; an overdue put is dropped, as far as its caller can tell."""
        try:
            return self._must(
                KVStore.put,
                prefix,
                kv,
                start=start,
                wait=wait,
                ttl_seconds=ttl_seconds,
                partial=partial,
                lossy=lossy,
                deadline_seconds=deadline_seconds,
                hint=hint,
            )
        except OverdueError:
            if self._strict or wait is not None:
                raise
            return dropped_puts(self._subject, prefix, start=start, tail=bool(partial), reason="overdue")

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
    ) -> BlockingLayerPuts:
        """As `KVStore.put_layers`, a scope without `async`; what is overdue, or finds the queue full, is dropped."""
        terms: dict[str, Any] = {"wait": wait, "ttl_seconds": ttl_seconds, "partial": partial, "lossy": lossy}
        layers = self._subject.put_layers(prefix, start=start, hint=hint, **terms)

        def submit(group: str) -> Future[Sequence[ChunkPut]]:
            async def put(_: KVStore, *, deadline_seconds: float | None = None) -> Sequence[ChunkPut]:
                return await layers.put_group(group, deadline_seconds=deadline_seconds)

            return self.submit(put, deadline_seconds=deadline_seconds)

        return BlockingLayerPuts(layers, submit, patient=self._strict or wait is not None)

    def delete(self, prefix: PrefixLike, *, start: int = 0, deadline_seconds: float | None = None) -> int:
        """As `KVStore.delete`."""
        return self._must(KVStore.delete, prefix, start=start, deadline_seconds=deadline_seconds)

    def touch(self, prefix: PrefixLike, *, ttl_seconds: float | None = None, hint: Hint | None = None) -> int:
        """As `KVStore.touch`."""
        return self._ask(0, KVStore.touch, prefix, ttl_seconds=ttl_seconds, hint=hint)

    def pin(self, prefix: PrefixLike, *, tier: str | None = None, ttl_seconds: float) -> int:
        """As `KVStore.pin`."""
        return self._ask(0, KVStore.pin, prefix, tier=tier, ttl_seconds=ttl_seconds)

    def unpin(self, prefix: PrefixLike, *, tier: str | None = None) -> int:
        """As `KVStore.unpin`."""
        return self._ask(0, KVStore.unpin, prefix, tier=tier)

    # --- the store as a whole

    def list(self, prefix: str = "", *, deadline_seconds: float | None = None) -> Iterator[ListEntry]:
        """As `KVStore.list`; the deadline is for the whole iteration."""
        return self._iterate(self._subject.list(prefix, deadline_seconds=deadline_seconds), deadline_seconds)

    def clear(
        self,
        *,
        namespace: Namespace | None = None,
        salt: str | bytes | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        """As `KVStore.clear`."""
        self._must(KVStore.clear, namespace=namespace, salt=salt, deadline_seconds=deadline_seconds)

    def end_session(self, session: str) -> int:
        """As `KVStore.end_session`."""
        return self._must(KVStore.end_session, session)

    def namespaces(self) -> Mapping[str, int]:
        """As `KVStore.namespaces`."""
        return self._must(KVStore.namespaces)

    def flush(self, *, deadline_seconds: float | None = None) -> FlushResult:
        """As `KVStore.flush`."""
        return self._must(KVStore.flush, deadline_seconds=deadline_seconds)

    def stats(self) -> Stats:
        """As `KVStore.stats`."""
        return self._must(_stats)

    def pressure(self) -> Pressure:
        """As `KVStore.pressure`."""
        return self._must(_pressure)


async def _stats(store: KVStore) -> Stats:
    return store.stats()


async def _pressure(store: KVStore) -> Pressure:
    return store.pressure()
