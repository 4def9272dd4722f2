"""Where the servers are and how to get in: one URL, the options beside it, and what may be shown of both."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from kvtier.errors import ConfigError
from kvtier.options import Secret, SecretUrl

if TYPE_CHECKING:
    from pathlib import Path

SCHEMES: Final = {"redis": False, "rediss": True, "valkey": False, "valkeys": True, "unix": False}
EMBEDDED: Final = "embedded"
DEFAULT_PORT: Final = 6379
SENTINEL_PORT: Final = 26379


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server: a host and port, or a unix socket (then `port` is 0)."""

    host: str
    port: int

    @property
    def is_socket(self) -> bool:
        """Whether `host` is the path of a unix socket."""
        return self.port == 0

    def __str__(self) -> str:
        return self.host if self.is_socket else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who asks; the password never shows."""

    username: str | None = None
    password: Secret | None = None


@dataclass(frozen=True, slots=True)
class Tls:
    """Files and strictness of an encrypted connection."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """Return a client's context.

        Raises:
            ConfigError: a file is missing or no certificate or key.
        """
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca is not None else None)
            if not self.verify:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(f"tls_ca, tls_certificate or tls_key cannot be used: {exc}") from exc
        return context


@dataclass(frozen=True, slots=True)
class Access:
    """Everything a connection needs besides its endpoint."""

    credentials: Credentials
    database: int
    tls: ssl.SSLContext | None
    connect_seconds: float

    def connect(self, endpoint: Endpoint, timeout: float) -> socket.socket:
        """Return a blocking connection, encrypted if asked for; nothing was said on it yet.

        Raises:
            OSError: it cannot be reached, or not in `timeout` or `connect_seconds`, or has no certificate we trust.
        """
        seconds = max(min(timeout, self.connect_seconds), 0.001)
        if endpoint.is_socket:
            plain = socket.socket(socket.AF_UNIX)
            try:
                plain.settimeout(seconds)
                plain.connect(endpoint.host)
            except BaseException:
                plain.close()
                raise
            return plain
        plain = socket.create_connection((endpoint.host, endpoint.port), timeout=seconds)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self.tls is None:
                return plain
            return self.tls.wrap_socket(plain, server_hostname=endpoint.host)
        except BaseException:
            plain.close()
            raise


@dataclass(frozen=True, slots=True)
class Address:
    """A URL taken apart."""

    endpoints: tuple[Endpoint, ...]
    encrypted: bool
    credentials: Credentials
    database: int
    shown: str  # without credentials, for messages
    embedded: bool = False  # no server yet: one is to be started


def parse_url(url: SecretUrl, *, default_port: int = DEFAULT_PORT) -> Address:
    """Take `redis://user:password@host:port,host:port/database` apart; also `rediss` (TLS), `valkey`, `unix:///path`.

    `embedded:` stands for a server that is to be started.

    Raises:
        ConfigError: what is wrong, without showing credentials.
    """
    text = url.reveal()
    try:
        parts = urlsplit(text)
    except ValueError:  # a bracket in the password, say
        raise ConfigError(f"url={url}: is no URL; write special characters of a password as %XX") from None
    if parts.scheme == EMBEDDED:
        return Address(
            (Endpoint("", 0),), encrypted=False, credentials=Credentials(), database=0, shown=text, embedded=True
        )
    if parts.scheme not in SCHEMES:
        known = ", ".join([*(f"{scheme}://" for scheme in SCHEMES), f"{EMBEDDED}:"])
        raise ConfigError(f"url={url}: begins with none of {known}")
    before, at, hosts = parts.netloc.rpartition("@")
    username, colon, password = before.partition(":")
    credentials = Credentials(
        unquote(username) or None if at else None, Secret(unquote(password)) if colon and password else None
    )
    if parts.scheme == "unix":
        if not parts.path or parts.path == "/":
            raise ConfigError(f"url={url}: needs the path of a socket, as in unix:///run/valkey.sock")
        database = dict(parse_qsl(parts.query)).get("db", "0")
        endpoints: tuple[Endpoint, ...] = (Endpoint(unquote(parts.path), 0),)
    else:
        database = parts.path.strip("/") or "0"
        endpoints = tuple(_endpoint(host, url, default_port) for host in (hosts or "127.0.0.1").split(","))
    if not database.isdecimal():
        raise ConfigError(f"url={url}: {database!r} is no database number")
    shown = f"{parts.scheme}://{','.join(map(str, endpoints))}" + (f"/{database}" if database != "0" else "")
    return Address(endpoints, SCHEMES[parts.scheme], credentials, int(database), shown)


def _endpoint(text: str, url: SecretUrl, default_port: int) -> Endpoint:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ConfigError(f"url={url}: give each server as host:port")
    return Endpoint(host, port if port is not None else default_port)
