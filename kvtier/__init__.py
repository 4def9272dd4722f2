"""kvtier keeps the KV cache of LLM prompts in tiers, so that a prefix computed once is loaded, not recomputed.

Importing this package imports neither torch nor any client library: every name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from kvtier.blocking import BlockingChunkStore, BlockingStore, open_blocking
    from kvtier.chunk.layout import KVLayout, LayerGroup, TensorSpec
    from kvtier.config import StoreConfig, TierConfig
    from kvtier.errors import (
        BackendError,
        BackendTimeoutError,
        BackendUnavailableError,
        CapacityError,
        ClosedError,
        CodecError,
        ConfigError,
        CorruptChunkError,
        InvalidKeyError,
        InvalidValueError,
        KVTierError,
        LayoutMismatchError,
        PartialDeleteError,
        UnknownPluginError,
    )
    from kvtier.events import Event, Observer
    from kvtier.keys import BlockHashes, Hint, Namespace, Prefix
    from kvtier.planner import LoadPlan, Prefill
    from kvtier.store.chunks import ChunkStore
    from kvtier.store.kv import KVStore
    from kvtier.store.leases import Lease, LeasedChunk
    from kvtier.store.opening import open_chunks
    from kvtier.store.opening import open_store as open  # noqa: A004  # `kvtier.open` reads as what it does
    from kvtier.store.requests import GetRequest
    from kvtier.store.results import FlushResult, Hit, ListEntry, PutResult, Stats

_HOMES = {
    "kvtier.blocking": ("BlockingChunkStore", "BlockingStore", "open_blocking"),
    "kvtier.chunk.layout": ("KVLayout", "LayerGroup", "TensorSpec"),
    "kvtier.config": ("StoreConfig", "TierConfig"),
    "kvtier.errors": (
        "BackendError",
        "BackendTimeoutError",
        "BackendUnavailableError",
        "CapacityError",
        "ClosedError",
        "CodecError",
        "ConfigError",
        "CorruptChunkError",
        "InvalidKeyError",
        "InvalidValueError",
        "KVTierError",
        "LayoutMismatchError",
        "PartialDeleteError",
        "UnknownPluginError",
    ),
    "kvtier.events": ("Event", "Observer"),
    "kvtier.keys": ("BlockHashes", "Hint", "Namespace", "Prefix"),
    "kvtier.planner": ("LoadPlan", "Prefill"),
    "kvtier.store.chunks": ("ChunkStore",),
    "kvtier.store.kv": ("KVStore",),
    "kvtier.store.leases": ("Lease", "LeasedChunk"),
    "kvtier.store.opening": ("open", "open_chunks"),
    "kvtier.store.requests": ("GetRequest",),
    "kvtier.store.results": ("FlushResult", "Hit", "ListEntry", "PutResult", "Stats"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_REAL_NAMES = {"open": "open_store"}

__all__ = [
    "BackendError",
    "BackendTimeoutError",
    "BackendUnavailableError",
    "BlockHashes",
    "BlockingChunkStore",
    "BlockingStore",
    "CapacityError",
    "ChunkStore",
    "ClosedError",
    "CodecError",
    "ConfigError",
    "CorruptChunkError",
    "Event",
    "FlushResult",
    "GetRequest",
    "Hint",
    "Hit",
    "InvalidKeyError",
    "InvalidValueError",
    "KVLayout",
    "KVStore",
    "KVTierError",
    "LayerGroup",
    "LayoutMismatchError",
    "Lease",
    "LeasedChunk",
    "ListEntry",
    "LoadPlan",
    "Namespace",
    "Observer",
    "PartialDeleteError",
    "Prefill",
    "Prefix",
    "PutResult",
    "Stats",
    "StoreConfig",
    "TensorSpec",
    "TierConfig",
    "UnknownPluginError",
    "__version__",
    "open",
    "open_blocking",
    "open_chunks",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    home = _HOME_OF.get(name)
    if home is None:
        msg = f"module 'kvtier' has no attribute {name!r}"
        raise AttributeError(msg)
    value: object = getattr(import_module(home), _REAL_NAMES.get(name, name))
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  # costs more than all the rest

    try:
        return version("kvtier")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0.0.0"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
