"""What a store was asked for, as a trace: an observer that writes it down in the format that `read_trace` reads."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib
    from types import TracebackType
    from typing import Self

    from kvtier.events import Event, RequestSeen


class Recorder:
    """Give it to `kvtier.open(observer=...)`; every `get` becomes a line of `path`, for `kvtier simulate`.

    Keys are digests; no tokens are written. Lines are buffered: close it in the end, or use it as a context manager.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def on_event(self, event: Event) -> None:
        """Ignore it: faults and movements are not part of a trace."""

    def on_request(self, request: RequestSeen) -> None:
        """Write it down."""
        line: dict[str, object] = {
            "seconds": round(time.time(), 6),
            "tokens": request.num_tokens,
            "keys": list(request.keys),
            "block_tokens": request.chunk_tokens,
        }
        if request.session is not None:
            line["session"] = request.session
        if request.priority:
            line["priority"] = request.priority
        with self._lock:
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Write what is buffered and close the file."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
