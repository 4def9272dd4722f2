"""What a Redis benchmark is measured against: a raw loopback stream, and plain threads on the same server."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from benchmarks.harness import MIB, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

VALUE = 32 * MIB
VALUES = 6
BEAT_SECONDS = 0.001
PLAIN_THREADS = 2


def blank() -> memoryview:
    view = memoryview(mmap.mmap(-1, VALUE))
    for page in range(0, VALUE, mmap.PAGESIZE):
        view[page] = 0
    return view


def memory(count: int) -> list[memoryview]:
    views = []
    for seed in range(count):
        views.append(memoryview(mmap.mmap(-1, VALUE)))
        fill(views[-1], seed=seed)
    return views


class Stream:
    """The raw stream: one connection, `sendall` of each value into a process that drops it, or keeps it."""

    def __init__(self, values: Sequence[memoryview], *, keeps: bool) -> None:
        self._values = values
        self._keeps = keeps
        self._sink = socket.create_server(("127.0.0.1", 0))
        self._pid = os.fork()
        if self._pid == 0:
            self._drain()
        self._connection = socket.create_connection(self._sink.getsockname())

    def _drain(self) -> None:
        connection, _ = self._sink.accept()
        kept = [blank() for _ in range(VALUES)] if self._keeps else [memoryview(bytearray(4 * MIB))]
        total = 0
        while True:
            place, start = (total // VALUE % VALUES, total % VALUE) if self._keeps else (0, 0)
            count = connection.recv_into(kept[place][start:])
            if not count:
                break
            connection.sendall(b"+" * ((total + count) // VALUE - total // VALUE))
            total += count
        os._exit(0)

    def send(self) -> None:
        """Send every value, and wait until the sink has read them."""
        for value in self._values:
            self._connection.sendall(value)
        answered = 0
        while answered < len(self._values):
            answered += len(self._connection.recv(64))

    def close(self) -> None:
        """End the sink."""
        self._connection.close()
        self._sink.close()
        os.waitpid(self._pid, 0)


class Loop:
    """An event loop in a thread of its own; while `beats`, with a heart that says how long it was kept from beating."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.late: list[float] = []
        self.beats: bool = False  # not while work is timed: a beat per millisecond takes its share of a core

    def run(self, work: Coroutine[None, None, object]) -> object:
        """Run `work` on the loop, beside the heart, and wait for it."""

        async def beside_heart() -> object:
            if not self.beats:
                return await work
            heart = asyncio.create_task(self._beat())
            try:
                return await work
            finally:
                heart.cancel()

        return asyncio.run_coroutine_threadsafe(beside_heart(), self.loop).result()

    async def _beat(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(BEAT_SECONDS)
            self.late.append(time.perf_counter() - began - BEAT_SECONDS)


class Plain:
    """The bare minimum: blocking sockets in threads, strings of 2 MiB written in place. What the server can do."""

    def __init__(self, port: int, values: Sequence[memoryview], into: Sequence[memoryview]) -> None:
        self.loop = Loop()
        self._values, self._into = values, into
        self._connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(PLAIN_THREADS)]
        for connection in self._connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self) -> None:
        """Put every value."""
        self.loop.run(self._each(self._put))

    def get(self) -> None:
        """Get every value."""
        self.loop.run(self._each(self._get))

    async def _each(self, lane: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=lane, args=(number,)) for number in range(PLAIN_THREADS)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])

    def _put(self, number: int) -> None:
        connection = self._connections[number]
        for key, place, stop, i in self._strings(number):
            value = self._values[i][place:stop]
            connection.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value)))
            connection.sendall(value)
            connection.sendall(b"\r\n")
            self._require(connection, b"+OK\r\n")

    def _get(self, number: int) -> None:
        connection = self._connections[number]
        for key, place, stop, i in self._strings(number):
            connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
            self._require(connection, b"$%d\r\n" % (stop - place))
            connection.recv_into(self._into[i][place:stop], 0, socket.MSG_WAITALL)
            self._require(connection, b"\r\n")

    def _key(self, i: int, place: int) -> bytes:
        return b"bare%d:%d" % (i, place)

    @staticmethod
    def _require(connection: socket.socket, reply: bytes) -> None:
        found = connection.recv(len(reply), socket.MSG_WAITALL)
        if found != reply:
            raise RuntimeError(f"{found!r} instead of {reply!r}")

    def _strings(self, number: int, values: Sequence[int] = range(VALUES)) -> list[tuple[bytes, int, int, int]]:
        step = 2 * MIB - 4096  # more would not fit a size that the server's allocator has
        return [
            (self._key(i, place), place, min(place + step, VALUE), i)
            for i in values
            for place in range(number * step, VALUE, PLAIN_THREADS * step)
        ]

    def close(self) -> None:
        """End."""
        for connection in self._connections:
            connection.close()


class Anew(Plain):
    """As little as a client can do whose readers never see half a value: new strings, and the old ones go afterwards.

    One value after the other, and the front of each string goes with the end of the one before, as the backend does it.
    """

    def __init__(self, port: int, values: Sequence[memoryview], into: Sequence[memoryview]) -> None:
        super().__init__(port, values, into)
        self._together = threading.Barrier(PLAIN_THREADS)
        self._puts = 0

    def put(self) -> None:
        """Put every value."""
        self._puts += 1
        super().put()

    def _key(self, i: int, place: int) -> bytes:
        return b"anew%d:%d:%d" % (self._puts, i, place)

    def _put(self, number: int) -> None:
        connection = self._connections[number]
        for i in range(VALUES):
            end, expected = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"
            for key, place, stop, _ in self._strings(number, [i]):
                front = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, stop - place)
                connection.sendall(end + front)
                self._require(connection, expected)
                connection.sendall(self._values[i][place:stop])
                end, expected = b"\r\n$2\r\nPX\r\n$6\r\n120000\r\n", b"+OK\r\n"
            connection.sendall(end)
            self._require(connection, expected)
            if self._together.wait() == 0:
                self._unlink(connection, i)
            self._together.wait()

    def _unlink(self, connection: socket.socket, i: int) -> None:
        new = b"anew%d:" % self._puts
        old = b"anew%d:" % (self._puts - 1)
        keys = [key.replace(new, old) for number in range(PLAIN_THREADS) for key, *_ in self._strings(number, [i])]
        words = b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in keys)
        connection.sendall(b"*%d\r\n$6\r\nUNLINK\r\n%b" % (len(keys) + 1, words))
        self._require(connection, b":%d\r\n" % (len(keys) if self._puts > 1 else 0))
