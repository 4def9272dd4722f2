"""What the tiers hold, told to routers: stored and removed chunks in the msgpack form of vLLM's KV events."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal

import msgpack  # type: ignore[import-untyped]  # it has no stubs

from kvtier.errors import ConfigError
from kvtier.events import ChangeObserver
from kvtier.keys.names import key_of, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.events import Change, Event, Observer, RequestSeen

    Sink = Callable[[int, bytes], None]  # the batch's number and its msgpack form; called on the store's event loop
    TokensOf = Callable[[str], Sequence[int]]

INT_BYTES = 8


class KVEvents:
    """An observer for `kvtier.open(..., observer=)` that makes batches of events for routers.

    A batch is `[seconds since 1970, [event, ...], rank]` with events `["BlockStored", hashes, parent, token ids, tokens
    per block, LoRA id, medium]` and `["BlockRemoved", hashes, medium]`: what subscribers of the vLLM family decode.
    A block is a chunk, its hash the last 16 bytes of its key (`kvtier.keys.chunk_keys` gives them, so that a router
    can work out which it looks for); blobs are no KV and are left out. All changes of one turn of the loop make one
    batch. What is at hand when the store opens is told as stored, as it is found.

    Args:
        sink: takes each batch, numbered from 0; must be quick. `ZmqSink` publishes them.
        chunk_tokens: tokens in a chunk, as in the config.
        media: tier name to what routers call such a medium ("GPU", "CPU", "DISK", ...); else the tier's name.
        hashes: "bytes", or "int" for routers that take 64-bit numbers (the last 8 bytes, big-endian).
        tokens_of: gives the token ids of a chunk's key, for routers that hash them anew; the store keeps none.
        rank: the data-parallel rank told in each batch.
        observer: told of everything, too: events, and requests and changes if it listens to them.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        chunk_tokens: int = 256,
        media: Mapping[str, str] | None = None,
        hashes: Literal["bytes", "int"] = "bytes",
        tokens_of: TokensOf | None = None,
        rank: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._sink = sink
        self._chunk_tokens = chunk_tokens
        self._media = dict(media or {})
        self._as_int = hashes == "int"
        self._tokens_of = tokens_of
        self._rank = rank
        self._observer = observer
        self._changes: list[Change] = []
        self._number = 0

    def on_event(self, event: Event) -> None:
        """Pass on."""
        if self._observer is not None:
            self._observer.on_event(event)

    @property
    def on_request(self) -> Callable[[RequestSeen], None] | None:
        """What the store calls for each `get`: `observer`'s own; None if it has none, so that it costs nothing."""
        heard: Callable[[RequestSeen], None] | None = getattr(self._observer, "on_request", None)
        return heard

    def on_change(self, change: Change) -> None:
        """Take note and pass on; the batch follows in the loop's next turn."""
        if key_of(name_of(change.key)) is not None:  # else a blob
            if not self._changes:
                asyncio.get_running_loop().call_soon(self.flush)
            self._changes.append(change)
        observer: object = self._observer
        if isinstance(observer, ChangeObserver):
            observer.on_change(change)

    def flush(self) -> None:
        """Hand what was noted to the sink now."""
        changes, self._changes = self._changes, []
        if not changes:
            return
        packed: bytes = msgpack.packb([time.time(), self._events(changes), self._rank])
        number, self._number = self._number, self._number + 1
        self._sink(number, packed)

    def cleared(self) -> None:
        """Tell routers to forget this worker: call it when the store has closed, and it is not opened again."""
        self.flush()
        packed: bytes = msgpack.packb([time.time(), [["AllBlocksCleared"]], self._rank])
        number, self._number = self._number, self._number + 1
        self._sink(number, packed)

    def _events(self, changes: Sequence[Change]) -> list[list[object]]:
        """Return events in order; neighbours that continue each other are told as one."""
        events: list[list[object]] = []
        run: list[Change] = []
        for change in changes:
            if run and not _continues(run[-1], change):
                events.append(self._event(run))
                run = []
            run.append(change)
        return [*events, self._event(run)]

    def _event(self, run: Sequence[Change]) -> list[object]:
        first = run[0]
        hashes = [self._hash(change.key) for change in run]
        medium = self._media.get(first.tier, first.tier)
        if not first.came:
            return ["BlockRemoved", hashes, medium]
        tokens = [token for change in run for token in (self._tokens_of(change.key) if self._tokens_of else ())]
        parent = None if first.parent is None else self._hash(first.parent)
        return ["BlockStored", hashes, parent, tokens, self._chunk_tokens, None, medium]

    def _hash(self, key: str) -> bytes | int:
        digest = bytes.fromhex(key.rpartition("/")[2])
        return int.from_bytes(digest[-INT_BYTES:], "big") if self._as_int else digest


def _continues(before: Change, change: Change) -> bool:
    if (before.tier, before.came) != (change.tier, change.came):
        return False
    return not change.came or change.parent == before.key


class ZmqSink:
    """Publishes batches as vLLM does: a PUB socket with messages of topic, number (8 bytes, big-endian) and batch.

    Subscribers that were not there miss what was sent: nothing is sent again. Needs the extra `zmq`.

    Args:
        endpoint: such as "tcp://*:5557"; bound if it has a `*` or is `ipc://` or `inproc://`, else connected to.
        topic: what subscribers subscribe to.
        queue: messages that may wait for a slow subscriber; what comes beyond is dropped by ZeroMQ.
    """

    def __init__(self, endpoint: str, *, topic: str = "", queue: int = 100_000) -> None:
        try:
            import zmq  # noqa: PLC0415  # an extra
        except ImportError as exc:
            raise ConfigError("ZmqSink needs pyzmq: pip install 'kvtier[zmq]'") from exc
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, queue)
        self._socket.setsockopt(zmq.LINGER, 0)
        if "*" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)

    @property
    def endpoint(self) -> str:
        """Where it is bound or connected, with the port that was chosen for `:*`."""
        import zmq  # noqa: PLC0415

        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def __call__(self, number: int, packed: bytes) -> None:
        """Publish one batch; never blocks."""
        self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), packed])

    def close(self) -> None:
        """Close the socket; what waits in it is dropped."""
        self._socket.close()
        self._context.term()
