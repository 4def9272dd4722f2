"""HTTP between sockets and buffers: kept-alive blocking connections to one server, used from threads."""

from __future__ import annotations

import http.client
import io
import select
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvtier.backends.views import total_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_IDLE_SECONDS = 15.0  # servers close idle connections after a while: older ones are not worth the try
_MOST_ERROR_BYTES = 64 << 10  # of a reply that is not the value: more is not read
_BUFFER = 64 << 10  # what is read ahead of a reply's headers; larger reads go straight into the caller's memory

BODY_STATUS = frozenset({200, 206})
PUT_STATUS = frozenset({200, 201, 204})


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `url` is presigned, so it never shows in a text; `headers` are those that were signed, and Range."""

    method: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[memoryview] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server said.

    Attributes:
        status: HTTP status.
        headers: names in lower case.
        length: bytes of the body, as the server announced them.
        fits: the body went into the buffers given; if not, nothing of it was read.
        body: of a reply that is no value, at most 64 KiB.
    """

    status: int
    headers: Mapping[str, str]
    length: int
    fits: bool = True
    body: bytes = b""


class ShortBodyError(ConnectionError):
    """The connection ended before the body did."""


class _TimedReader(io.RawIOBase):
    """A socket as a raw stream whose reads end together by one deadline, however slowly the bytes come."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__()
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)  # holds the socket open after `sock.close()`, as responses expect
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]  # what BufferedReader passes
        self._sock.settimeout(seconds_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """A response read by a deadline."""

    def __init__(self, deadline: float, sock: socket.socket, *, method: str | None = None) -> None:
        super().__init__(_Source(sock, deadline), method=method)  # type: ignore[arg-type]  # it calls `makefile` only


class _Source:
    """What `HTTPResponse` takes for a socket."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._raw = _TimedReader(sock, deadline)

    def makefile(self, mode: str) -> io.BufferedReader:
        del mode
        return io.BufferedReader(self._raw, _BUFFER)


class Wire:
    """Connections to one server. `exchange` blocks and is called from threads; a connection serves one at a time.

    A connection goes back only when its reply was read to the end: unread bodies cost a connection, never a place.
    """

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None, most_idle: int) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._most_idle = most_idle
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        self._mutex = threading.Lock()
        self._closed = False

    @property
    def idle(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    def exchange(self, request: Request, into: Sequence[memoryview], deadline: float) -> Reply:
        """Send a request, put the body of a 200 or 206 into `into`, and return what else there is.

        `deadline` is in seconds of `time.monotonic`, for all of it.

        Raises:
            TimeoutError: the deadline passed.
            OSError: no connection, a reset, a body that ended early, a certificate that does not hold.
            http.client.HTTPException: the server does not speak HTTP.
        """
        while True:
            connection, kept = self._take()
            try:
                response = _ask(connection, request, deadline)
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                if not kept:
                    raise
                self.drop_idle()  # the server went away, or closed it at this moment: once more, on a new one
                continue
            except BaseException:
                connection.close()
                raise
            try:
                reply, done = _receive(response, request, into)
            except BaseException:
                connection.close()
                raise
            self._give_back(connection, done=done and not response.will_close)
            return reply

    def drop_idle(self) -> None:
        """Close the connections that wait."""
        with self._mutex:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def close(self) -> None:
        """Close; connections in use are closed when their exchange has ended."""
        self._closed = True
        self.drop_idle()

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it was used before."""
        while True:
            with self._mutex:
                if not self._idle:
                    break
                connection, since = self._idle.pop()
            if time.monotonic() - since < _IDLE_SECONDS and not _has_ended(connection.sock):
                return connection, True
            connection.close()
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port), False
        return http.client.HTTPSConnection(self._host, self._port, context=self._tls), False

    def _give_back(self, connection: http.client.HTTPConnection, *, done: bool) -> None:
        with self._mutex:
            if done and not self._closed and len(self._idle) < self._most_idle:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()


def seconds_left(deadline: float) -> float:
    """Return how long until `deadline`; raise `TimeoutError` if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the server was too slow")
    return left


def target_of(url: str) -> str:
    """Return path and query of a URL."""
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


def _has_ended(sock: socket.socket) -> bool:
    """Tell whether an idle connection has something to read: its end, or bytes that nobody asked for."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _ask(connection: http.client.HTTPConnection, request: Request, deadline: float) -> http.client.HTTPResponse:
    """Send the request and read the head of the reply."""
    if connection.sock is None:
        connection.timeout = seconds_left(deadline)
        connection.connect()
    sock: socket.socket = connection.sock  # connected, but stubs say that it may still be None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(seconds_left(deadline))
    connection.putrequest(request.method, target_of(request.url))
    for name, value in request.headers.items():
        connection.putheader(name, value)
    if request.method == "PUT":
        connection.putheader("Content-Length", str(total_bytes(request.body)))
    connection.endheaders()
    refused: ConnectionError | None = None
    try:
        for part in request.body:
            _send(sock, part, deadline)
    except ConnectionError as exc:  # a server that refuses a body may say why before it hangs up
        refused = exc
    connection.response_class = partial(_TimedResponse, deadline)  # type: ignore[assignment]  # called like the class
    try:
        response = connection.getresponse()
    except (ConnectionError, http.client.BadStatusLine) as exc:
        raise refused or exc from None
    response.will_close = response.will_close or refused is not None
    return response


def _send(sock: socket.socket, part: memoryview, deadline: float) -> None:
    sock.settimeout(seconds_left(deadline))
    if not isinstance(sock, ssl.SSLSocket):
        sock.sendall(part)  # here the timeout is for all of it
        return
    while part:
        part = part[sock.send(part) :]
        sock.settimeout(seconds_left(deadline))


def _receive(response: http.client.HTTPResponse, request: Request, into: Sequence[memoryview]) -> tuple[Reply, bool]:
    """Read the reply's body; tell whether all of it was read."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    with response:
        if request.method == "HEAD":
            return Reply(response.status, headers, _announced(headers)), True
        if request.method != "GET" or response.status not in BODY_STATUS:
            body = response.read(_MOST_ERROR_BYTES)
            return Reply(response.status, headers, len(body), body=body), response.isclosed()
        length = _announced(headers)
        if response.length is None:
            raise http.client.HTTPException("a value of unknown length")
        if length > total_bytes(into):
            return Reply(response.status, headers, length, fits=False), False
        _fill(response, into, length)
        return Reply(response.status, headers, length), True


def _fill(response: http.client.HTTPResponse, into: Sequence[memoryview], length: int) -> None:
    left = length
    for view in into:
        room = view[: min(view.nbytes, left)]
        while room:
            count = response.readinto(room)
            if not count:
                raise ShortBodyError(f"the body ended {left} bytes early")
            room = room[count:]
            left -= count


def _announced(headers: Mapping[str, str]) -> int:
    length = headers.get("content-length", "")
    if not length.isdecimal():
        raise http.client.HTTPException("a reply without its length")
    return int(length)
