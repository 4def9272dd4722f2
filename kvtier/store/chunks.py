"""ChunkStore: any blob under any key, over all tiers; the level below `KVStore`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch

from kvtier.chunk.blob import BlobParts, copy_part, describe_blob, rebuild
from kvtier.chunk.tensors import check_tensors
from kvtier.chunk.transfer import copy_out
from kvtier.concurrency.gate import gate_of_call
from kvtier.errors import BackendError, CodecError, InvalidKeyError, InvalidValueError, KVTierError
from kvtier.keys.names import check_key
from kvtier.store.arguments import check_hint, check_key_prefix, check_mapping, listed
from kvtier.store.damage import drop_undecodable
from kvtier.store.face import Face
from kvtier.store.listing import list_keys
from kvtier.store.loads import Loads, count_absent, touch
from kvtier.store.lookup import locate_all
from kvtier.store.placing import Placing, Put
from kvtier.store.removal import delete_keys
from kvtier.store.results import ListEntry, PutResult
from kvtier.store.waiting import check_wait, expiry, settle_puts
from kvtier.tier.encode import decode_segments, raw_header

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractContextManager

    from kvtier.chunk.blob import Blob
    from kvtier.chunk.segments import Segment
    from kvtier.concurrency.deadline import Deadline
    from kvtier.keys.hint import Hint
    from kvtier.store.engine import Engine
    from kvtier.store.placing import Placed
    from kvtier.tier.value import Value

    Into: TypeAlias = Mapping[str, torch.Tensor] | torch.Tensor
    Got: TypeAlias = torch.Tensor | dict[str, torch.Tensor] | bytes


T = TypeVar("T")


class ChunkStore:
    """Key to blob. A blob is a tensor, a mapping of named tensors or bytes-like, and comes back as what it was.

    Keys are `str` of 1 to 1024 characters without NUL or lone surrogates; every such text is a key of its own.
    `put` replaces; a reader gets the old or the new value whole. Misses are values: `None`, `False`.

    The keys of a `KVStore`'s KV are keys here too: they exist, are listed and can be deleted. KV is no blob, so `get`
    gives None for them.
    """

    def __init__(self, engine: Engine, *, namespace: str = "") -> None:
        self._engine = engine
        self._namespace = namespace

    async def put(
        self,
        key: str,
        blob: Blob,
        *,
        wait: str | None = None,
        ttl_seconds: float | None = None,
        deadline_seconds: float | None = None,
        hint: Hint | None = None,
    ) -> PutResult:
        """Store one blob; see `put_many`. Raises at once for a wrong key or value."""
        deadline = self._engine.begin(deadline_seconds)
        check_wait(self._engine, wait)
        check_hint(hint)
        placed = await self._place([(check_key(key), describe_blob(blob))], ttl_seconds, deadline, hint)
        await settle_puts(self._engine, placed, wait, deadline)
        return PutResult(chunks=(placed[0].result(),))

    async def put_many(
        self,
        blobs: Mapping[str, Blob],
        *,
        wait: str | None = None,
        ttl_seconds: float | None = None,
        deadline_seconds: float | None = None,
        hint: Hint | None = None,
    ) -> dict[str, PutResult | KVTierError]:
        """Store blobs: a snapshot is taken now, lower tiers follow in the background.

        Args:
            blobs: key to blob.
            wait: None; "durable" (on a persistent tier); or a tier's name.
            ttl_seconds: after this the values are misses.
            deadline_seconds: the call ends by then.
            hint: what the policies may use.

        Returns:
            Per key the result, or the error that this key alone had (a wrong key or value, a failed `wait`).

        Raises:
            InvalidValueError: a `wait` or `ttl_seconds` that makes no sense.
            ClosedError: the store does not serve calls.
        """
        deadline = self._engine.begin(deadline_seconds)
        check_wait(self._engine, wait)
        check_hint(hint)
        check_mapping(blobs, "blobs")
        results: dict[str, PutResult | KVTierError] = {}
        items: list[tuple[str, BlobParts]] = []
        for key, blob in blobs.items():
            try:
                items.append((check_key(key), describe_blob(blob)))
            except KVTierError as exc:
                results[key] = exc
        for item in await self._place(items, ttl_seconds, deadline, hint):
            try:
                await settle_puts(self._engine, [item], wait, deadline)
                results[item.key] = PutResult(chunks=(item.result(),))
            except BackendError as exc:
                results[item.key] = exc
        return {key: results[key] for key in blobs}

    async def _place(
        self, items: Sequence[tuple[str, BlobParts]], ttl_seconds: float | None, deadline: Deadline, hint: Hint | None
    ) -> Sequence[Placed]:
        expires = expiry(self._engine, ttl_seconds)
        placing = Placing(self._engine, expires=expires, priority=hint.priority if hint else 0, deadline=deadline)
        return await placing.place([self._as_put(key, parts) for key, parts in items])

    def _as_put(self, key: str, parts: BlobParts) -> Put:
        return Put(
            key=key,
            namespace=self._namespace,
            parent=None,
            kind=parts.kind,
            specs=parts.specs,
            tokens=0,
            lossy=False,
            fill=partial(_copy_parts, parts),
            replace=True,
        )

    async def get(self, key: str, *, into: Into | None = None, deadline_seconds: float | None = None) -> Got | None:
        """Return the blob of `key`, or None. Tensors own their memory (recycled when they die)."""
        into_key = None if into is None else {key: into}
        return (await self.get_many([check_key(key)], into=into_key, deadline_seconds=deadline_seconds))[0]

    async def get_many(
        self, keys: Sequence[str], *, into: Mapping[str, Into] | None = None, deadline_seconds: float | None = None
    ) -> Sequence[Got | None]:
        """Return each key's blob or None, in order.

        Args:
            keys: what to read; all at once. A text that is no key holds nothing: None, told as an event.
            into: per key the tensor (or mapping of tensors) to fill; it is returned in place of a new one. Nothing
                touches it once the call returned, raised or was cancelled; after a miss its content is undefined.
            deadline_seconds: the call ends by then; what has not arrived is None.

        Raises:
            InvalidValueError: `into` does not fit the stored value.
            ClosedError: the store does not serve calls.
        """
        engine = self._engine
        deadline = engine.begin(deadline_seconds)
        keys = listed(keys, "keys")
        if into is not None:
            check_mapping(into, "into")
        asked = self._usable(keys)
        located = await locate_all(engine, asked, deadline, exact=engine.settings.lossless)
        held = [where for where in located if where is not None]
        found: dict[str, Got] = {}
        with engine.reads, Loads(engine, held) as loads:
            for i, where in enumerate(held):
                value = await loads.value(i, deadline)
                if value is not None and self._servable(value):
                    target = into.get(where.key) if into is not None else None
                    blob = await self._deliver(value, target, deadline)
                    if blob is not None:
                        found[where.key] = blob
                loads.drop(i)
        count_absent(engine, sum(where is None for where in located))
        touch(engine, list(found))
        return _by_key(keys, found, otherwise=None)

    def _usable(self, keys: Sequence[object]) -> list[str]:
        """Return those that are keys: one bad key does not fail a batch."""
        usable = []
        for key in keys:
            try:
                usable.append(check_key(key))
            except InvalidKeyError as exc:
                self._engine.events.emit("error", reason=f"in a batch: {exc}", error=exc)
        return usable

    def _servable(self, value: Value) -> bool:
        return value.header.kind != "kv" and not (self._engine.settings.lossless and value.header.lossy)

    async def _deliver(self, value: Value, into: Into | None, deadline: Deadline) -> Got | None:
        """Copy a value out: into the caller's tensors, or into a recycled buffer that the result then owns."""
        engine, header = self._engine, value.header
        targets = None if into is None else _targets(value, into)
        if targets is not None and not header.chain:
            await engine.services.workers.run(_copy_out, gate_of_call(), header.segments, value.views(), targets)
            return _filled(into)
        views = await engine.result_views([segment.raw for segment in header.segments], deadline)
        if views is None:
            return None
        try:
            await engine.services.workers.run(decode_segments, value, engine.services, views)
        except CodecError as exc:
            drop_undecodable(engine, value, exc)
            return None
        if targets is None:
            return rebuild(raw_header(header), views)
        await engine.services.workers.run(_copy_out, gate_of_call(), header.segments, views, targets)
        return _filled(into)

    async def delete(self, key: str, *, deadline_seconds: float | None = None) -> bool:
        """Remove `key` from every tier; tell whether it was there.

        Raises:
            PartialDeleteError: a tier did not confirm; the key is hidden in this store all the same.
        """
        return (await self.delete_many([check_key(key)], deadline_seconds=deadline_seconds))[0]

    async def delete_many(self, keys: Sequence[str], *, deadline_seconds: float | None = None) -> Sequence[bool]:
        """Remove keys; tell for each whether it was there (False for what is no key). Raises as `delete`."""
        deadline = self._engine.begin(deadline_seconds)
        keys = listed(keys, "keys")
        usable = self._usable(keys)
        was_there = dict(zip(usable, await delete_keys(self._engine, usable, deadline), strict=True))
        return _by_key(keys, was_there, otherwise=False)

    async def exists(self, key: str, *, deadline_seconds: float | None = None) -> bool:
        """Tell whether `get` would find `key`, as far as can be told without reading the value."""
        return (await self.exists_many([check_key(key)], deadline_seconds=deadline_seconds))[0]

    async def exists_many(self, keys: Sequence[str], *, deadline_seconds: float | None = None) -> Sequence[bool]:
        """Tell for each key whether it is there (False for what is no key); one round trip per shared tier for all."""
        deadline = self._engine.begin(deadline_seconds)
        keys = listed(keys, "keys")
        asked = self._usable(keys)
        located = await locate_all(self._engine, asked, deadline, exact=self._engine.settings.lossless)
        there = {key: where is not None for key, where in zip(asked, located, strict=True)}
        return _by_key(keys, there, otherwise=False)

    async def list(self, prefix: str = "", *, deadline_seconds: float | None = None) -> AsyncIterator[ListEntry]:
        """Iterate the keys that begin with `prefix`, literally; each once, in no particular order."""
        deadline = self._engine.begin(deadline_seconds)
        check_key_prefix(prefix)
        async for entry in list_keys(self._engine, prefix, deadline):
            yield entry


class ChunkFace(ChunkStore, Face):
    """A `ChunkStore` that owns its tiers: what `kvtier.open_chunks` returns."""


def _by_key(keys: Sequence[object], found: Mapping[str, T], otherwise: T) -> list[T]:
    return [found.get(key, otherwise) if isinstance(key, str) else otherwise for key in keys]


def _copy_parts(parts: BlobParts, views: Sequence[memoryview]) -> None:
    for source, view in zip(parts.sources, views, strict=True):
        copy_part(source, view)


def _targets(value: Value, into: Into) -> list[torch.Tensor]:
    if value.header.kind == "bytes":
        raise InvalidValueError(
            f"into: the value of {value.key!r} is bytes, which come in memory of their own; leave it out"
        )
    named = into if isinstance(into, Mapping) else {"": into}
    check_tensors(named, "into")
    names = [segment.spec.name for segment in value.header.segments]
    if set(names) != set(named):
        raise InvalidValueError(
            f"into has {sorted(named)!r}, the value of {value.key!r} is {value.header.kind} {sorted(names)!r}"
        )
    return [named[name] for name in names]


def _filled(into: Into | None) -> torch.Tensor | dict[str, torch.Tensor]:
    if into is None or isinstance(into, torch.Tensor):
        return into if into is not None else {}
    return dict(into)


def _copy_out(
    gate: AbstractContextManager[None],
    segments: Sequence[Segment],
    views: Sequence[memoryview],
    targets: Sequence[torch.Tensor],
) -> None:
    with gate:
        for segment, view, target in zip(segments, views, targets, strict=True):
            copy_out(view, segment.spec, target)
