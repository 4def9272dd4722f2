"""From a config to a blocking store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.blocking.loop_thread import LoopThread
from kvtier.blocking.store import BlockingStore
from kvtier.errors import ConfigError
from kvtier.store.opening import open_store

if TYPE_CHECKING:
    from kvtier.chunk.layout import KVLayout
    from kvtier.events import Observer
    from kvtier.keys import Namespace
    from kvtier.store.opening import AnyConfig

QUEUE_CALLS = 1024


def open_blocking(
    config: AnyConfig = None,
    *,
    layout: KVLayout | None = None,
    namespace: Namespace | None = None,
    observer: Observer | None = None,
    strict: bool | None = None,
    lossless: bool | None = None,
    queue_calls: int = QUEUE_CALLS,
) -> BlockingStore:
    """Return a store for code that blocks, usable from any thread; its loop runs in a thread of its own.

    Nothing is started before `with` or the first call, so a process may fork in between. A store that is still open
    when the interpreter ends is closed then.

    Args:
        config: as for `kvtier.open`.
        layout: as for `kvtier.open`.
        namespace: as for `kvtier.open`.
        observer: told of every event, in the loop's thread: it must not call this store.
        strict: as for `kvtier.open`.
        lossless: as for `kvtier.open`.
        queue_calls: how many calls may be under way at a time. Blocking calls wait for a place until their deadline,
            submitted ones are dropped.

    Raises:
        ConfigError: anything wrong, with the option's name and the way out.
    """
    given: object = queue_calls
    if type(given) is not int or given < 1:
        raise ConfigError(f"queue_calls={queue_calls!r}: must be a number of calls, 1 or more")
    store = open_store(config, layout=layout, namespace=namespace, observer=observer, strict=strict, lossless=lossless)
    return BlockingStore(LoopThread(store, queue_calls=queue_calls), store)
