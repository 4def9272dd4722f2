"""A TCP proxy on a free loopback port that spoils what passes through it: late, slow, cut, reset, silent or wrong."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    Address: TypeAlias = tuple[str, int] | str  # host and port, or the path of a unix socket

_PIECE_BYTES = 256 << 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: closing sends RST, and what was not sent is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to the bytes of one direction. Offsets count on each connection, from when the fault was set.

    Attributes:
        delay_seconds: before every piece that arrives.
        bytes_per_second: no more than these pass, of all connections together: they share one line.
        silent: nothing passes, and nobody is told: a black hole. Once healed, what was held back passes.
        cut_after: both sides are closed behind this many bytes.
        reset: the cut is an RST instead of an orderly end.
        flip_at: the lowest bit of the byte at this offset is flipped.
        flip_every: and of every so manyeth byte behind it.
    """

    delay_seconds: float = 0.0
    bytes_per_second: float | None = None
    silent: bool = False
    cut_after: int | None = None
    reset: bool = False
    flip_at: int | None = None
    flip_every: int | None = None


NO_FAULT = Fault()


class FaultProxy:
    """Forwards TCP connections to `target` from a loop in a thread of its own; use it as a context manager.

    The faults in `replies` and `requests` may be set at any time from any thread; they hold for what passes from then
    on, on old connections and new ones.

        with FaultProxy(("127.0.0.1", 6379)) as proxy:
            client = connect("127.0.0.1", proxy.port)
            proxy.replies = Fault(cut_after=1000, reset=True)
            ...
            proxy.heal()

    Args:
        target: where connections go.
        seed: of the draws of `answer_instead`.
    """

    def __init__(self, target: Address, *, seed: int = 0) -> None:
        self.target = target
        self.port: int = 0
        self.connections: int = 0  # accepted so far
        self.request_bytes: int = 0  # passed to the target so far
        self.reply_bytes: int = 0  # passed back so far
        self._faults: dict[str, Fault] = {"requests": NO_FAULT, "replies": NO_FAULT}
        self._free_at: dict[str, float] = {}  # when what was sent before is through, on the loop's clock
        self._instead: tuple[bytes, float] | None = None
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: dict[asyncio.Task[None], list[socket.socket]] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Where clients connect."""
        return "127.0.0.1", self.port

    @property
    def requests(self) -> Fault:
        """The fault of what clients send."""
        return self._faults["requests"]

    @requests.setter
    def requests(self, fault: Fault) -> None:
        self._set("requests", fault)

    @property
    def replies(self) -> Fault:
        """The fault of what the target sends back."""
        return self._faults["replies"]

    @replies.setter
    def replies(self, fault: Fault) -> None:
        self._set("replies", fault)

    def answer_instead(self, reply: bytes, *, share: float = 1.0) -> None:
        """Answer new connections with `reply` and an orderly end once they have sent something, not the target.

        Args:
            reply: for example a whole HTTP response of status 503 with `Connection: close`.
            share: the probability that a connection is answered so; the others are forwarded.
        """
        self._instead = (reply, share)

    def heal(self) -> None:
        """Let everything pass as it is, what was held back included, and listen again."""
        self._instead = None
        self._set("requests", NO_FAULT)
        self._set("replies", NO_FAULT)
        if self._listener is None:
            self._call(self._listen())

    def refuse(self) -> None:
        """Refuse new connections, like a machine on which nobody listens; those that are open stay."""
        self._call(self._stop_listening())

    def drop_connections(self, *, reset: bool = False) -> None:
        """Close every open connection, by RST if `reset`."""
        self._call(self._drop(reset=reset))

    def start(self) -> None:
        """Listen; the port is the same from then on."""
        self._thread.start()
        self._call(self._listen())

    def close(self) -> None:
        """Stop, and close everything."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _set(self, direction: str, fault: Fault) -> None:
        self._faults[direction] = fault
        self._free_at[direction] = 0.0
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        listener.settimeout(0)
        self._listener, self.port = listener, listener.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(listener))

    async def _stop_listening(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if self._listener is not None:
            self._listener.close()
        self._accepting = self._listener = None

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            client, _ = await self._loop.sock_accept(listener)
            client.settimeout(0)
            self.connections += 1
            sockets = [client]
            serving = asyncio.create_task(self._serve(client, sockets))
            self._serving[serving] = sockets
            serving.add_done_callback(self._ended)

    def _ended(self, serving: asyncio.Task[None]) -> None:
        for each in self._serving.pop(serving):
            each.close()
        if not serving.cancelled():
            serving.exception()  # a connection that broke is no news here

    async def _drop(self, *, reset: bool) -> None:
        dropped = list(self._serving)
        for serving in dropped:
            if reset:
                _arm_reset(self._serving[serving])
            serving.cancel()
        if dropped:
            await asyncio.wait(dropped)

    async def _end(self) -> None:
        await self._stop_listening()
        await self._drop(reset=False)

    async def _serve(self, client: socket.socket, sockets: list[socket.socket]) -> None:
        if self._instead is not None and self._random.random() < self._instead[1]:
            await self._loop.sock_recv(client, _PIECE_BYTES)
            await self._loop.sock_sendall(client, self._instead[0])
            client.shutdown(socket.SHUT_WR)
            while await self._loop.sock_recv(client, _PIECE_BYTES):  # closing on unread bytes would be a reset
                pass
            return
        family = socket.AF_UNIX if isinstance(self.target, str) else socket.AF_INET
        target = socket.socket(family)
        sockets.append(target)
        target.settimeout(0)
        await self._loop.sock_connect(target, self.target)
        pumps = [
            asyncio.create_task(self._pump("requests", client, target, sockets)),
            asyncio.create_task(self._pump("replies", target, client, sockets)),
        ]
        try:
            await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)

    async def _pump(
        self, direction: str, source: socket.socket, sink: socket.socket, both: list[socket.socket]
    ) -> None:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        passed, since = 0, self._faults[direction]
        while True:
            count = await self._loop.sock_recv_into(source, buffer)
            while (fault := self._faults[direction]).silent:
                await self._changed.wait()
            if fault is not since:
                passed, since = 0, fault
            if count == 0:
                with suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                return
            await self._pass_on(direction, buffer[:count], passed, lambda piece: self._loop.sock_sendall(sink, piece))
            passed += count
            if fault.cut_after is not None and passed >= fault.cut_after:
                if fault.reset:
                    _arm_reset(both)
                raise ConnectionResetError

    async def _pass_on(
        self, direction: str, piece: memoryview, passed: int, send: Callable[[memoryview], Coroutine[None, None, None]]
    ) -> None:
        fault = self._faults[direction]
        if fault.cut_after is not None:
            piece = piece[: max(0, fault.cut_after - passed)]
        _flip(piece, passed, fault)
        if fault.delay_seconds:
            await asyncio.sleep(fault.delay_seconds)
        while piece:
            step = piece if fault.bytes_per_second is None else piece[: max(1, int(fault.bytes_per_second / 20))]
            if fault.bytes_per_second is not None:
                now = self._loop.time()
                through = max(now, self._free_at[direction]) + len(step) / fault.bytes_per_second
                self._free_at[direction] = through
                await asyncio.sleep(through - now)
            await send(step)
            if direction == "requests":
                self.request_bytes += len(step)
            else:
                self.reply_bytes += len(step)
            piece = piece[len(step) :]
            fault = self._faults[direction]


def _flip(piece: memoryview, passed: int, fault: Fault) -> None:
    if fault.flip_at is None:
        return
    at = fault.flip_at - passed
    while at < len(piece):
        if at >= 0:
            piece[at] ^= 1
        if fault.flip_every is None:
            return
        at += fault.flip_every


def _arm_reset(sockets: list[socket.socket]) -> None:
    for each in sockets:
        if each.family != socket.AF_UNIX:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
