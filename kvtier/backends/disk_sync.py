"""One sync of a directory serves everybody who changed it before that sync began."""

from __future__ import annotations

import os
import threading


class GroupedSync:
    """Counts, per leaf, the syncs that have begun and the last one that ended well."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._running: set[int] = set()

    def sync(self, shard: int, leaf: int) -> None:
        """Return once what this thread changed in the open directory `leaf` survives power loss.

        Raises:
            OSError: the medium failed; whoever waited for the same sync tries its own.
        """
        with self._changed:
            serving = self._begun.get(shard, 0) + 1  # the next to begin; one that runs may have begun too early
            while shard in self._running:
                self._changed.wait()
                if self._ended.get(shard, 0) >= serving:
                    return
            mine = self._begun[shard] = self._begun.get(shard, 0) + 1
            self._running.add(shard)
        try:
            os.fsync(leaf)
        except BaseException:
            self._finish(shard, None)
            raise
        self._finish(shard, mine)

    def _finish(self, shard: int, number: int | None) -> None:
        with self._changed:
            self._running.discard(shard)
            if number is not None:
                self._ended[shard] = number
            self._changed.notify_all()
