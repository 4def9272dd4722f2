"""The wire: one blocking connection that speaks RESP2 and moves bulk bytes straight between socket and buffers.

Methods block and are called in threads. A plain socket is left to the kernel's own timeouts, so that a part of
megabytes is one system call without the interpreter's lock; an encrypted one reads record by record.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from kvtier.backends.redis_faults import Redirected, ReplyError, raise_reply
from kvtier.errors import BackendTimeoutError, BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtier.backends.redis_address import Access, Endpoint

    Word: TypeAlias = bytes | memoryview
    Reply: TypeAlias = bytes | int | list["Reply"] | None

_PING: Final = b"*1\r\n$4\r\nPING\r\n"
_PONG: Final = b"+PONG\r\n"
_ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"
_BUFFER_BYTES: Final = 8 << 10  # what is read ahead of a line; of a bulk string behind it, so much is copied once more
_DIRECT_BYTES: Final = 16 << 10  # words that are longer are sent from where they lie
_MOST_VECTORS: Final = 512
_WORD_BYTES: Final = 160  # for one of many strings, with its frame; more is no fault
_MOST_ROOM: Final = 1 << 20  # before anything came: how many strings will come is only what the server says
_TIMEVAL: Final = struct.Struct("ll")
_LEAST_SECONDS: Final = 0.001
_SLACK_SECONDS: Final = 0.01  # that a call may end behind its deadline, for one system call less per call
_MOST_ELEMENTS: Final = 1 << 20
_MOST_REPLY: Final = 1 << 30


class Framed(NamedTuple):
    """A command as it is sent: what stands before its one long word, the word, and what stands behind."""

    front: bytes
    views: Sequence[memoryview]
    end: bytes


class Wire:
    """One connection to one server. After any exception but `ReplyError` it is of no use any more: close it."""

    def __init__(self, access: Access, endpoint: Endpoint, deadline: float) -> None:
        """Connect and log in; `deadline` is in seconds of `time.monotonic`.

        Raises:
            BackendUnavailableError, BackendTimeoutError: it cannot be reached.
            ReplyError: it does not let us in.
        """
        self.endpoint = endpoint
        self._deadline = deadline
        self._asking = False
        self._replies_due: list[bool] = []  # per reply to come, oldest first: whether it is that of an ASKING
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = self._end = 0
        self._armed = dict.fromkeys((socket.SO_SNDTIMEO, socket.SO_RCVTIMEO), 0.0)
        try:
            self._socket = access.connect(endpoint, deadline - time.monotonic())
        except OSError as exc:
            raise _unavailable(endpoint, exc) from exc
        self._plain = not isinstance(self._socket, ssl.SSLSocket)
        if self._plain:
            self._socket.settimeout(None)
        try:
            self._log_in(access)
        except BaseException:
            self.close()
            raise

    def _log_in(self, access: Access) -> None:
        credentials = access.credentials
        if credentials.password is not None:
            user = [credentials.username.encode()] if credentials.username is not None else []
            self.command(b"AUTH", *user, credentials.password.reveal().encode())
        if access.database:
            self.command(b"SELECT", b"%d" % access.database)

    def begin(self, deadline: float, *, asking: bool = False) -> None:
        """Take up work that must end by `deadline`; with `asking`, on keys that are on their way to this node."""
        self._deadline = deadline
        self._asking = asking

    @property
    def idle(self) -> bool:
        """Whether no reply is due and the server has said nothing, not even goodbye."""
        if self._replies_due or self._start != self._end:
            return False
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return not waiting.poll(0)

    def shutdown(self) -> None:
        """Wake whoever is blocked on this connection, from another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    # --- sending

    def send(self, *words: Word | Sequence[memoryview]) -> None:
        """Send one command; a word may be a sequence of views that together are the word. Its reply is due then.

        Raises:
            BackendUnavailableError, BackendTimeoutError: the connection broke or took too long.
        """
        self._send_all(self._taken(words))

    def command_each(self, commands: Iterable[Framed]) -> None:
        """Send commands with one long word each, and read every reply.

        A server takes what has come: a long word that comes together with the words before it has to be moved, and a
        whole one copied. So the front of each command goes with the end of the one before, and its long word only once
        that one is answered, for by then the server has read the front.

        Raises:
            ReplyError, Redirected: the first refusal, when all have been answered.
            BackendUnavailableError, BackendTimeoutError: the connection broke or took too long.
        """
        asking, due = (_ASKING, [True, False]) if self._asking else (b"", [False])
        views: Sequence[memoryview] = ()
        end = _PING
        self._replies_due.append(False)
        refusals = []
        coming = iter(commands)
        command = next(coming, None)
        while end:
            if command is None:
                self._send_all([*views, end])
                views, end = (), b""
            else:
                self._send_all([*views, end + asking + command.front])
                self._replies_due += due
                views, end = command.views, command.end
            command = next(coming, None)  # made while the server reads: it waits for every step behind its answer
            refusals.append(self._refusal())
        for refusal in refusals:
            if refusal is not None:
                raise refusal

    def _refusal(self) -> ReplyError | Redirected | None:
        try:
            self.reply()
        except (ReplyError, Redirected) as refusal:
            return refusal
        return None

    def _taken(self, words: Sequence[Word | Sequence[memoryview]]) -> list[Word]:
        """Return what to send for one command, whose reply is due from now on; long words stand alone."""
        pieces: list[Word] = []
        small = bytearray()
        if self._asking:
            small += _ASKING
            self._replies_due.append(True)
        small += b"*%d\r\n" % len(words)
        for word in words:
            views = [word] if isinstance(word, bytes | memoryview) else word
            size = sum(len(view) for view in views)
            small += b"$%d\r\n" % size
            if size <= _DIRECT_BYTES:
                for view in views:
                    small += view
            else:
                pieces += [bytes(small), *views]
                small = bytearray()
            small += b"\r\n"
        self._replies_due.append(False)
        return [*pieces, bytes(small)]

    def _send_all(self, pieces: Sequence[Word]) -> None:
        try:
            if not self._plain:
                for piece in pieces:
                    self._socket.settimeout(self._seconds_left())
                    self._socket.sendall(piece)
                return
            while pieces:
                self._arm(socket.SO_SNDTIMEO)
                pieces = _behind(pieces, self._socket.sendmsg(pieces[:_MOST_VECTORS]))
        except OSError as exc:
            raise _unavailable(self.endpoint, exc) from exc

    # --- receiving

    def command(self, *words: Word | Sequence[memoryview]) -> Reply:
        """Send one command and return its reply; raises as `send` and `reply`."""
        self.send(*words)
        return self.reply()

    def reply(self) -> Reply:
        """Return the next reply.

        Raises:
            ReplyError, Redirected: the server says so; the connection is in order.
            BackendUnavailableError, BackendTimeoutError: the connection broke or took too long.
        """
        self._begin_reply()
        return self._reply()

    def bulk_size(self) -> int | None:
        """Begin the next reply, which is a bulk string: return its length, `None` for none. `fill` follows.

        Raises: as `reply`.
        """
        self._begin_reply()
        line = self._line()
        if line[:1] == b"-":
            raise_reply(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise self._senseless(line)
        size = self._number(line)
        return None if size < 0 else size

    def fill(self, view: memoryview) -> None:
        """Fill `view` with the next bytes of a bulk string; raises as `send`."""
        while len(view):
            if self._start != self._end:
                size = min(len(view), self._end - self._start)
                view[:size] = memoryview(self._buffer)[self._start : self._start + size]
                self._start += size
            elif len(view) < _BUFFER_BYTES:
                self._refill()
                continue
            else:
                size = self._receive(view)
            view = view[size:]

    def skip(self, size: int) -> None:
        """Pass over bytes of a bulk string."""
        while size:
            if self._start == self._end:
                self._refill()
            step = min(size, self._end - self._start)
            self._start += step
            size -= step

    def words(self) -> tuple[int, str]:
        """Return the next reply, an array of strings without line ends: how many, and the array as it came.

        To take ten thousand strings out of their frames one by one would take longer than all the rest, and to count
        their lines a tenth of it: a `PING` must have been sent behind the command, whose reply tells the end, and
        nothing else. Raises: as `reply`.
        """
        self._begin_reply()
        line = self._line()
        if line[:1] == b"-":
            raise_reply(line[1:].decode(errors="replace"))
        if line[:1] != b"*" or not 0 <= (count := self._number(line)) <= _MOST_ELEMENTS:
            raise self._senseless(line)
        size = self._end - self._start
        room = bytearray(size + min(count * _WORD_BYTES, _MOST_ROOM) + _BUFFER_BYTES)
        room[:size] = memoryview(self._buffer)[self._start : self._end]
        self._start = self._end = 0
        end = b"\r\n" + _PONG if count else _PONG
        while not room.endswith(end, 0, size):
            if size > _MOST_REPLY:
                raise self._senseless(b"more strings than fit")
            if len(room) - size < _BUFFER_BYTES:
                room += bytes(len(room))
            with memoryview(room) as views:
                size += self._receive(views[size:], whole=False)
        self._replies_due.pop(0)
        del room[size - len(_PONG) :]
        return count, room.decode(errors="replace")

    def end_bulk(self) -> None:
        """End a bulk string."""
        if self._line() != b"":
            raise self._senseless(b"more bytes than announced")

    def _begin_reply(self) -> None:
        while self._replies_due.pop(0):
            try:
                self._reply()
            except ReplyError:
                continue  # the command behind it tells

    def _reply(self) -> Reply:
        line = self._line()
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            raise_reply(line[1:].decode(errors="replace"))
        if kind == b":":
            return self._number(line)
        if kind == b"$":
            size = self._number(line)
            if size < 0:
                return None
            content = bytearray(size)
            self.fill(memoryview(content))
            self.end_bulk()
            return bytes(content)
        if kind == b"*" and (count := self._number(line)) <= _MOST_ELEMENTS:
            return None if count < 0 else [self._reply() for _ in range(count)]
        raise self._senseless(line)

    def _number(self, line: bytes) -> int:
        try:
            number = int(line[1:])
        except ValueError:
            raise self._senseless(line) from None
        if number > _MOST_REPLY and line[:1] == b"$":
            raise self._senseless(line)
        return number

    def _line(self) -> bytes:
        while True:
            end = self._buffer.find(b"\r\n", self._start, self._end)
            if end >= 0:
                line = bytes(memoryview(self._buffer)[self._start : end])
                self._start = end + 2
                return line
            if self._end - self._start >= _BUFFER_BYTES - 1:
                raise self._senseless(b"a line without end")
            self._refill()

    def _refill(self) -> None:
        """Receive something behind what the buffer holds."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _BUFFER_BYTES:
            rest = bytes(memoryview(self._buffer)[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._end += self._receive(memoryview(self._buffer)[self._end :], whole=False)

    def _receive(self, view: memoryview, *, whole: bool = True) -> int:
        try:
            if self._plain:
                self._arm(socket.SO_RCVTIMEO)
                size = self._socket.recv_into(view, 0, socket.MSG_WAITALL if whole else 0)
            else:
                self._socket.settimeout(self._seconds_left())
                size = self._socket.recv_into(view)
        except OSError as exc:
            raise _unavailable(self.endpoint, exc) from exc
        if size == 0:
            raise BackendUnavailableError(f"{self.endpoint}: the server closed the connection")
        return size

    def _arm(self, which: int) -> None:
        seconds = self._seconds_left()
        if 0 <= self._armed[which] - seconds < _SLACK_SECONDS:
            return
        self._armed[which] = seconds
        whole = int(seconds)
        self._socket.setsockopt(socket.SOL_SOCKET, which, _TIMEVAL.pack(whole, int((seconds - whole) * 1e6) or 1))

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise BackendTimeoutError(f"{self.endpoint}: no answer in time")
        return max(left, _LEAST_SECONDS)

    def _senseless(self, what: bytes) -> BackendUnavailableError:
        return BackendUnavailableError(f"{self.endpoint}: this is no reply: {what[:40]!r}")


def framed(before: Sequence[bytes], views: Sequence[memoryview], behind: Sequence[bytes]) -> Framed:
    """Return a command of some words, a long one that the views together are, and some more words."""
    count, size = len(before) + 1 + len(behind), sum(map(len, views))
    front = b"*%d\r\n%b$%d\r\n" % (count, _frames(before), size)
    return Framed(front, views, b"\r\n" + _frames(behind))


def _frames(words: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def _behind(pieces: Sequence[Word], sent: int) -> Sequence[Word]:
    """Return what is left of pieces once `sent` bytes went: as a rule nothing."""
    for number, piece in enumerate(pieces):
        if sent < len(piece):
            return [memoryview(piece)[sent:], *pieces[number + 1 :]]
        sent -= len(piece)
    return ()


def _unavailable(endpoint: Endpoint, exc: OSError) -> BackendUnavailableError | BackendTimeoutError:
    if isinstance(exc, TimeoutError | BlockingIOError):  # the kernel's own timeouts come as EAGAIN
        return BackendTimeoutError(f"{endpoint}: no answer in time")
    return BackendUnavailableError(f"{endpoint}: {exc.strerror or exc}")
