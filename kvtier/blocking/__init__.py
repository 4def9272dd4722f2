"""The store for code that blocks: one event loop in a thread of its own, called from any other."""

from kvtier.blocking.chunks import BlockingChunkStore
from kvtier.blocking.layer_puts import BlockingLayerPuts
from kvtier.blocking.loop_thread import CallCounts
from kvtier.blocking.opening import open_blocking
from kvtier.blocking.store import BlockingStore

__all__ = ["BlockingChunkStore", "BlockingLayerPuts", "BlockingStore", "CallCounts", "open_blocking"]
