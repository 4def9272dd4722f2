"""The fault proxy does to a connection what it says, and nothing when healed."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from kvtier.testing.fault_proxy import Fault, FaultProxy


@pytest.fixture
def echo():
    """An echo server's address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(client: socket.socket) -> None:
            with client:
                try:
                    while piece := client.recv(1 << 16):
                        client.sendall(piece)
                except OSError:
                    pass

        def accept() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(client,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(echo):
    with FaultProxy(echo) as proxy:
        yield proxy


def connect(proxy: FaultProxy) -> socket.socket:
    client = socket.create_connection(proxy.address)
    client.settimeout(20)
    return client


def roundtrip(client: socket.socket, sent: bytes) -> bytes:
    threading.Thread(target=client.sendall, args=(sent,), daemon=True).start()
    return receive(client, len(sent))


def receive(client: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size and (piece := client.recv(size - len(got))):
        got += piece
    return got


def test_passes_everything(proxy):
    sent = os.urandom(3 << 20)
    with connect(proxy) as client:
        assert roundtrip(client, sent) == sent
    assert (proxy.connections, proxy.request_bytes, proxy.reply_bytes) == (1, len(sent), len(sent))


def test_cut_and_reset(proxy):
    with connect(proxy) as client:
        assert roundtrip(client, b"x" * 100) == b"x" * 100
        proxy.replies = Fault(cut_after=1000)
        assert roundtrip(client, b"y" * 5000) == b"y" * 1000
        assert client.recv(1) == b""
    proxy.replies = Fault(cut_after=0, reset=True)
    with connect(proxy) as client, pytest.raises(ConnectionResetError):
        roundtrip(client, b"y")
    proxy.heal()
    with connect(proxy) as client:
        assert roundtrip(client, b"z") == b"z"


def test_silence_ends_with_healing(proxy):
    with connect(proxy) as client:
        proxy.requests = Fault(silent=True)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            roundtrip(client, b"hello")
        client.settimeout(20)
        proxy.heal()
        assert receive(client, 5) == b"hello"


def test_wrong_bytes(proxy):
    with connect(proxy) as client:
        proxy.replies = Fault(flip_at=2, flip_every=4)
        assert roundtrip(client, bytes(8)) == b"\0\0\1\0\0\0\1\0"
        proxy.replies = Fault(flip_at=1)
        assert roundtrip(client, bytes(3)) == b"\0\1\0"
        assert roundtrip(client, bytes(3)) == b"\0\0\0"


def test_late_and_slow(proxy):
    with connect(proxy) as client:
        proxy.replies = Fault(delay_seconds=0.1)
        begun = time.monotonic()
        assert roundtrip(client, b"x") == b"x"
        assert time.monotonic() - begun >= 0.1
        proxy.replies = Fault(bytes_per_second=10_000)
        begun = time.monotonic()
        assert roundtrip(client, b"x" * 2000) == b"x" * 2000
        assert time.monotonic() - begun >= 0.2


def test_refused_and_dropped(proxy):
    with connect(proxy) as client:
        assert roundtrip(client, b"x") == b"x"
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        assert roundtrip(client, b"x") == b"x"
        proxy.drop_connections()
        assert client.recv(1) == b""
    proxy.heal()
    with connect(proxy) as client:
        assert roundtrip(client, b"x") == b"x"
        proxy.drop_connections(reset=True)
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_answers_instead(proxy):
    reply = b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\n\r\n"
    proxy.answer_instead(reply, share=0.5)
    answers = []
    for _ in range(20):
        with connect(proxy) as client:
            client.sendall(b"x")
            client.shutdown(socket.SHUT_WR)
            answers.append(receive(client, 100))
    assert set(answers) == {reply, b"x"}
