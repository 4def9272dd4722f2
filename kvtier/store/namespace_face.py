"""One model's keys on a store's tiers: what concerns all of them, whatever prompt they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.events import RequestSeen
from kvtier.keys import Prefix, chunk_keys, salt_text
from kvtier.store import report
from kvtier.store.arguments import check_key_prefix, check_namespace_kind
from kvtier.store.chunks import ChunkStore
from kvtier.store.face import Face
from kvtier.store.listing import list_keys
from kvtier.store.plan import PrefixPlan
from kvtier.store.prefixes import find_cached
from kvtier.store.removal import clear_prefix

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtier.chunk.layout import KVLayout
    from kvtier.concurrency.deadline import Deadline
    from kvtier.keys import Hint, Namespace, NamespaceDigest, PrefixLike
    from kvtier.planner import Prefill
    from kvtier.store.engine import Engine
    from kvtier.store.prefixes import Cached
    from kvtier.store.results import ListEntry


class NamespaceFace(Face):
    """A face of the store that names its keys by a namespace, a layout and a chunk size."""

    def __init__(self, engine: Engine, *, namespace: Namespace, layout: KVLayout, chunk_tokens: int) -> None:
        super().__init__(engine)
        self.namespace = namespace
        self.layout = layout
        self.chunk_tokens = chunk_tokens
        self._digest: NamespaceDigest = namespace.fingerprint(layout=layout.describe(), chunk_tokens=chunk_tokens)
        self.chunks: ChunkStore = ChunkStore(engine)
        self.prefill: Prefill | None = None

    async def list(self, prefix: str = "", *, deadline_seconds: float | None = None) -> AsyncIterator[ListEntry]:
        """Iterate this namespace's chunk keys that begin with `prefix`, literally; each key once."""
        deadline = self._engine.begin(deadline_seconds)
        check_key_prefix(prefix)
        own = self._digest.text16 + "/"
        if own.startswith(prefix) or prefix.startswith(own):
            async for entry in list_keys(self._engine, max(own, prefix, key=len), deadline):
                yield entry

    async def clear(
        self,
        *,
        namespace: Namespace | None = None,
        salt: str | bytes | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        """Remove everything of this namespace (or another with the same layout), or only what was stored under `salt`.

        Raises:
            PartialDeleteError: as `delete`.
        """
        deadline = self._engine.begin(deadline_seconds)
        digest = self._digest
        if namespace is not None:
            check_namespace_kind(namespace)
            digest = namespace.fingerprint(layout=self.layout.describe(), chunk_tokens=self.chunk_tokens)
        under = f"{digest.text16}/" if salt is None else f"{digest.text16}/{salt_text(salt)}/"
        await clear_prefix(self._engine, under, deadline)

    async def namespaces(self) -> dict[str, int]:
        """Return the namespaces that have chunks here, as their 16 hex digits, with the number of keys of each."""
        self._engine.guard()
        return report.namespaces(self._engine)

    def _plan(self, prefix: PrefixLike) -> PrefixPlan:
        keys = chunk_keys(Prefix.coerce(prefix), namespace=self._digest, chunk_tokens=self.chunk_tokens)
        return PrefixPlan(keys, self.layout)

    def _tell(self, plan: PrefixPlan, hint: Hint | None) -> None:
        """Tell an observer that listens for requests."""
        if self._engine.events.hears_requests:
            session, priority = (hint.session, hint.priority) if hint is not None else (None, 0)
            self._engine.events.request(
                RequestSeen(
                    keys=plan.whole,
                    num_tokens=plan.num_tokens,
                    chunk_tokens=self.chunk_tokens,
                    session=session,
                    priority=priority,
                )
            )

    async def _cached(self, plan: PrefixPlan, cap: int, deadline: Deadline) -> Cached:
        found = await find_cached(self._engine, [(plan, cap)], deadline, exact=self._engine.settings.lossless)
        return found[0]
