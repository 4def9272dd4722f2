"""ChunkStore for code that blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.blocking.call import OverdueError
from kvtier.blocking.face import BlockingFace
from kvtier.store.chunks import ChunkStore
from kvtier.store.results import ChunkPut, PutResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtier.chunk.blob import Blob
    from kvtier.errors import KVTierError
    from kvtier.keys import Hint
    from kvtier.store.chunks import Got, Into
    from kvtier.store.results import ListEntry


class BlockingChunkStore(BlockingFace[ChunkStore]):
    """As `ChunkStore`, from any thread. A call that the loop does not end in time is a miss, or a dropped put."""

    def put(
        self,
        key: str,
        blob: Blob,
        *,
        wait: str | None = None,
        ttl_seconds: float | None = None,
        deadline_seconds: float | None = None,
        hint: Hint | None = None,
    ) -> PutResult:
        """As `ChunkStore.put`."""
        try:
            return self._must(
                ChunkStore.put,
                key,
                blob,
                wait=wait,
                ttl_seconds=ttl_seconds,
                deadline_seconds=deadline_seconds,
                hint=hint,
            )
        except OverdueError:
            if self._strict or wait is not None:
                raise
            return _dropped(key)

    def put_many(
        self,
        blobs: Mapping[str, Blob],
        *,
        wait: str | None = None,
        ttl_seconds: float | None = None,
        deadline_seconds: float | None = None,
        hint: Hint | None = None,
    ) -> dict[str, PutResult | KVTierError]:
        """As `ChunkStore.put_many`."""
        try:
            return self._must(
                ChunkStore.put_many,
                blobs,
                wait=wait,
                ttl_seconds=ttl_seconds,
                deadline_seconds=deadline_seconds,
                hint=hint,
            )
        except OverdueError as exc:
            if self._strict:
                raise
            return {key: _dropped(key) if wait is None else exc for key in blobs}

    def get(self, key: str, *, into: Into | None = None, deadline_seconds: float | None = None) -> Got | None:
        """As `ChunkStore.get`."""
        return self._ask(None, ChunkStore.get, key, into=into, deadline_seconds=deadline_seconds)

    def get_many(
        self, keys: Sequence[str], *, into: Mapping[str, Into] | None = None, deadline_seconds: float | None = None
    ) -> Sequence[Got | None]:
        """As `ChunkStore.get_many`."""
        return self._ask([None] * len(keys), ChunkStore.get_many, keys, into=into, deadline_seconds=deadline_seconds)

    def delete(self, key: str, *, deadline_seconds: float | None = None) -> bool:
        """As `ChunkStore.delete`; an overdue call raises `BackendTimeoutError`."""
        return self._must(ChunkStore.delete, key, deadline_seconds=deadline_seconds)

    def delete_many(self, keys: Sequence[str], *, deadline_seconds: float | None = None) -> Sequence[bool]:
        """As `ChunkStore.delete_many`; an overdue call raises `BackendTimeoutError`."""
        return self._must(ChunkStore.delete_many, keys, deadline_seconds=deadline_seconds)

    def exists(self, key: str, *, deadline_seconds: float | None = None) -> bool:
        """As `ChunkStore.exists`."""
        return self._ask(False, ChunkStore.exists, key, deadline_seconds=deadline_seconds)  # noqa: FBT003  # a miss

    def exists_many(self, keys: Sequence[str], *, deadline_seconds: float | None = None) -> Sequence[bool]:
        """As `ChunkStore.exists_many`."""
        return self._ask([False] * len(keys), ChunkStore.exists_many, keys, deadline_seconds=deadline_seconds)

    def list(self, prefix: str = "", *, deadline_seconds: float | None = None) -> Iterator[ListEntry]:
        """As `ChunkStore.list`."""
        return self._iterate(self._subject.list(prefix, deadline_seconds=deadline_seconds), deadline_seconds)


def _dropped(key: str) -> PutResult:
    return PutResult(chunks=(ChunkPut(key=key, status="dropped", reason="overdue"),))
