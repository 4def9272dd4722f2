"""TLS for servers in tests: a certificate of one's own, and a front that speaks TLS for a server that does not."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_DAY = datetime.timedelta(days=1)
_PIECE_BYTES = 256 << 10


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for localhost that is its own authority; return the paths of it and of its key (PEM)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    paths[0].write_bytes(certificate.public_bytes(pem))
    paths[1].write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    return paths


class TlsFront:
    """Takes TLS connections on a free loopback port and passes what they say to `target`; a context manager.

    Args:
        target: host and port of a server that speaks no TLS.
        certificate: PEM, with its `key`.
        key: see `certificate`.
        trust: certificates of the authorities whose clients are let in; anybody's are if not given.
    """

    def __init__(self, target: tuple[str, int], certificate: Path, key: Path, *, trust: Path | None = None) -> None:
        self.port: int = 0
        self._target = target
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=trust)
        self._context.load_cert_chain(certificate, key)
        if trust is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._loop = asyncio.new_event_loop()
        self._serving: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls-front", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _end(self) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        to_server = None
        try:
            with suppress(OSError, asyncio.CancelledError):
                server, to_server = await asyncio.open_connection(*self._target)
                pumps = [asyncio.create_task(_pump(client, to_server)), asyncio.create_task(_pump(server, to_client))]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            for writer in (to_client, to_server):
                if writer is not None:
                    writer.transport.abort()
            self._serving.discard(task)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE_BYTES):
        sink.write(piece)
        await sink.drain()
