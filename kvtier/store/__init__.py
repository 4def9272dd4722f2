"""The store: tiers in their order, and the two faces on them: KV of prefixes, and blobs by key."""

from kvtier.store.chunks import ChunkStore
from kvtier.store.kv import KVStore
from kvtier.store.opening import open_chunks, open_store
from kvtier.store.requests import GetRequest
from kvtier.store.results import FlushResult, Hit, ListEntry, PutResult, Stats

__all__ = [
    "ChunkStore",
    "FlushResult",
    "GetRequest",
    "Hit",
    "KVStore",
    "ListEntry",
    "PutResult",
    "Stats",
    "open_chunks",
    "open_store",
]
