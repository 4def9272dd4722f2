"""Entries on Redis or Valkey, shared by many processes and machines: one server, a watched pair, or a cluster."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from kvtier.backends.base import Backend, BackendContext, Read, Stat, Traits, Write, Written, check_name
from kvtier.backends.batches import answer_each
from kvtier.backends.redis_address import SENTINEL_PORT, Access, Address, Credentials, Endpoint, Tls, parse_url
from kvtier.backends.redis_control import Clients, Control
from kvtier.backends.redis_embedded import EmbeddedServer
from kvtier.backends.redis_entries import READ_SHARE, Entries
from kvtier.backends.redis_faults import REFUSED, ReplyError, listed, text_of
from kvtier.backends.redis_journal import RedisJournal
from kvtier.backends.redis_layout import CLUSTER_BUCKETS, WHOLE_BYTES, Keys
from kvtier.backends.redis_listing import Listing
from kvtier.backends.redis_plain_path import PlainPath
from kvtier.backends.redis_pool import Wires
from kvtier.backends.redis_wire_path import WirePath
from kvtier.backends.views import host_view, writable_views
from kvtier.errors import BackendError, CapacityError, ClosedError, ConfigError
from kvtier.options import LocalPath, Seconds, Secret, SecretUrl, Size

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from kvtier.concurrency.workers import Workers

    T = "T"

FORMAT: Final = b"1"
END_SECONDS: Final = 1.0
OLDEST_SERVER: Final = (6, 2)
LEAST_PART: Final = 256 << 10
MOST_PART: Final = 64 << 20
_PREFIX_LETTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:/-")


@dataclass(frozen=True, slots=True)
class _Opened:
    """What exists between `open` and `aclose`."""

    control: Control
    wires: Wires
    keys: Keys
    entries: Entries
    listing: Listing
    journal: RedisJournal
    workers: Workers
    server: EmbeddedServer | None


class RedisBackend(Backend):
    """Redis 6.2 or later, or Valkey; also a `JournalBackend` and a `JournalFollower`.

    A value is one key, or a head and parts of `part_bytes` that come and go over several connections at once; readers
    see it whole or not at all. An entry of which the server evicted a part is a miss. Expiry is the server's own.

    Args:
        url: `redis://user:password@host:port/database`; `rediss://` for TLS, `unix:///path` for a socket; several
            `host:port` with commas between are the nodes of a cluster, or Sentinels. `embedded:` starts a Valkey server
            that only this backend uses and that ends with it (extra `embedded`).
        topology: one server, a cluster, or a master that the Sentinels in `url` name.
        service: the name of the master that the Sentinels watch.
        username: instead of the one in `url`.
        password: instead of the one in `url`.
        sentinel_username: who asks the Sentinels, if they want to know.
        sentinel_password: with which password.
        prefix: what every key begins with: stores with different prefixes do not see each other.
        part_bytes: what the longest part of a value may take on the server.
        connect_seconds: how long a connection may take to be made.
        tls_ca: certificates to trust instead of the system's.
        tls_certificate: the client's certificate, if the server wants one.
        tls_key: its key, if it is not in the same file.
        tls_verify: whether the server must prove that it is `host`.
        client: "wire" moves values over sockets of our own, "redis-py" over the client library's, which is slower.

    Raises:
        ConfigError: options that do not fit together.
    """

    traits: Traits = Traits(
        persistent=True, shared=True, scan_at_open=True, native_expiry=True, ranges=True, follow_seconds=0.25
    )

    def __init__(  # noqa: PLR0913  # these are the options of the config
        self,
        *,
        url: SecretUrl = SecretUrl("redis://127.0.0.1:6379"),  # noqa: B008  # it cannot be changed
        topology: Literal["single", "cluster", "sentinel"] = "single",
        service: str = "mymaster",
        username: str | None = None,
        password: Secret | None = None,
        sentinel_username: str | None = None,
        sentinel_password: Secret | None = None,
        prefix: str = "kvtier",
        part_bytes: Size = 2 << 20,
        connect_seconds: Seconds = 1.0,
        tls_ca: LocalPath | None = None,
        tls_certificate: LocalPath | None = None,
        tls_key: LocalPath | None = None,
        tls_verify: bool = True,
        client: Literal["wire", "redis-py"] = "wire",
    ) -> None:
        self.url: SecretUrl = SecretUrl(url)
        self.topology = topology
        self.client = client
        self.prefix = prefix
        self.part_bytes = part_bytes
        sentinels = topology == "sentinel"
        address = parse_url(self.url, default_port=SENTINEL_PORT) if sentinels else parse_url(self.url)
        self._address: Address = address
        self._check()
        self._tls: Tls | None = Tls(tls_ca, tls_certificate, tls_key, tls_verify) if address.encrypted else None
        self._credentials: Credentials = Credentials(
            username or address.credentials.username, password or address.credentials.password
        )
        asking = Credentials(sentinel_username, sentinel_password)
        self._sentinel: tuple[str, Credentials] | None = (service, asking) if sentinels else None
        self._connect_seconds = connect_seconds
        self._opened: _Opened | None = None
        if address.embedded:
            self.traits = replace(type(self).traits, persistent=False, shared=False)

    def _check(self) -> None:
        if self.topology not in {"single", "cluster", "sentinel"} or self.client not in {"wire", "redis-py"}:
            raise ConfigError(f"topology={self.topology!r}, client={self.client!r}: no such choice")
        if self.topology == "single" and len(self._address.endpoints) > 1:
            raise ConfigError(f"url={self.url}: several servers need topology = 'cluster' or 'sentinel'")
        if self.topology == "cluster" and self._address.database:
            raise ConfigError(f"url={self.url}: a cluster has no databases")
        if not self.prefix or not _PREFIX_LETTERS.issuperset(self.prefix):
            raise ConfigError(f"prefix={self.prefix!r}: give letters, digits and '_.:/-'")
        if not LEAST_PART <= self.part_bytes <= MOST_PART:
            raise ConfigError(f"part_bytes={self.part_bytes}: give {LEAST_PART} to {MOST_PART} bytes")

    def __repr__(self) -> str:
        return f"RedisBackend(url={self._address.shown!r}, topology={self.topology!r}, prefix={self.prefix!r})"

    async def open(self, context: BackendContext) -> None:
        """Connect and check that the server is one this works with.

        Raises:
            ConfigError: wrong credentials, certificates or topology; a server too old; another format of entries.
            BackendUnavailableError: it cannot be reached, or is loading.
        """
        if self._opened is not None:
            raise ConfigError(f"{self!r} is open already; one backend belongs to one tier")
        server = EmbeddedServer(context.capacity) if self._address.embedded else None
        try:
            endpoints = self._address.endpoints
            if server is not None:
                endpoints = (Endpoint(await context.workers.run(server.start), 0),)
            self._opened = await self._connect(context, endpoints, server)
        except BaseException as exc:
            if server is not None:
                await context.workers.run(server.stop)
            if isinstance(exc, ReplyError):
                raise self._refused(exc) from None
            raise

    async def _connect(
        self, context: BackendContext, endpoints: Sequence[Endpoint], server: EmbeddedServer | None
    ) -> _Opened:
        tls = await context.workers.run(self._tls.context) if self._tls is not None else None
        access = Access(self._credentials, self._address.database, tls, self._connect_seconds)
        keys = Keys(self.prefix, CLUSTER_BUCKETS if self.topology == "cluster" else 1)
        journal = f"{self.prefix}:{{journal}}"
        control = Control(
            Clients(access, self._tls, context.deadline_seconds * READ_SHARE),
            endpoints,
            keys=[*keys.counters, f"{journal}:logs"],
            medium=self._address.shown,
            is_cluster=self.topology == "cluster",
            sentinel=self._sentinel,
        )
        try:
            part_bytes = await self._greet(control)
        except BaseException:
            await control.close()
            raise
        wires = Wires(access)
        if self.client == "wire":
            seconds = context.deadline_seconds * READ_SHARE
            path: WirePath | PlainPath = WirePath(control, wires, keys, context.workers, seconds=seconds)
        else:
            path = PlainPath(control, keys, context.workers)
        listing = Listing(control, keys, capacity=context.capacity, path=path)
        entries = Entries(
            path,
            control,
            keys,
            part_bytes=part_bytes,
            seconds=context.deadline_seconds,
            allowance=listing.allowance,
        )
        logs = RedisJournal(control, keys.buckets, journal)
        return _Opened(control, wires, keys, entries, listing, logs, context.workers, server)

    async def _greet(self, control: Control) -> int:
        """Find the servers and see what they are; return the longest part that they take."""
        await control.refresh()
        endpoint = control.endpoint(0)
        about = await control.command_at(endpoint, "INFO", "server")
        if isinstance(about, dict):  # as redis-py returns it
            self._check_server(str(about.get("redis_version", "")), str(about.get("redis_mode", "")))
        await self._check_format(control)
        try:
            (_, limit) = listed(await control.command_at(endpoint, "CONFIG", "GET", "proto-max-bulk-len"), 2)
        except (BackendError, ReplyError):  # managed servers do not tell
            return self.part_bytes
        return max(WHOLE_BYTES, min(self.part_bytes, int(limit)))

    def _check_server(self, version: str, mode: str) -> None:
        numbers = tuple(int(word) for word in version.split(".")[:2] if word.isdecimal())
        if numbers and numbers < OLDEST_SERVER:
            raise ConfigError(f"{self._address.shown}: version {version}; needs Redis 6.2 or later, or Valkey")
        if mode and (mode == "cluster") != (self.topology == "cluster"):
            raise ConfigError(f"{self._address.shown} runs as {mode!r}, but topology={self.topology!r}")

    async def _check_format(self, control: Control) -> None:
        key = f"{self.prefix}:{{journal}}:format"
        found = await control.command(control.groups - 1, "GET", key)
        if found is None:
            with suppress(CapacityError):  # a replica, or a full server: nothing will be written
                await control.command(control.groups - 1, "SET", key, FORMAT, "NX")
        elif found != FORMAT:
            raise ConfigError(
                f"{self._address.shown}: prefix {self.prefix!r} holds entries of another format, {found!r}"
            )

    def _refused(self, error: ReplyError) -> Exception:
        if error.code in REFUSED or "AUTH" in str(error):
            return ConfigError(f"{self._address.shown}: {error}; check url, username and password")
        if "cluster support disabled" in str(error):
            return ConfigError(f"{self._address.shown} is no cluster, but topology='cluster'")
        return error.ours(self._address.shown)

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        """As the contract says; a value is one to some thread jobs, each on a connection of its own."""
        entries = self._use().entries
        for read in reads:
            check_name(read.name)
            writable_views(read.into)
        return await answer_each(entries.read, reads)

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        """As the contract says; with `if_absent`, what another process is writing is waited for, not sent again."""
        opened = self._use()
        for write in writes:
            check_name(write.name)
            for part in write.parts:
                host_view(part)
        await opened.listing.refresh_sums()
        return await answer_each(opened.entries.write, writes)

    async def delete_many(self, names: Sequence[str]) -> Sequence[bool | BackendError]:
        """As the contract says; the server frees the memory in its own background."""
        return await self._use().listing.delete([check_name(name) for name in names])

    async def stat_many(self, names: Sequence[str]) -> Sequence[Stat | BackendError | None]:
        """As the contract says; one command per server and some hundred names."""
        return await self._use().listing.stat([check_name(name) for name in names])

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        """Yield pages of entries, ordered by bucket, then by name; what the server evicted is credited on the way."""
        listing = self._use().listing
        async for page in listing.scan(None if after is None else check_name(after)):
            yield page

    async def scan_under(self, prefix: str) -> AsyncIterator[Sequence[Stat]]:
        """See `PrefixLister`; what the server evicted lately may be listed."""
        async for page in self._use().listing.under(prefix):
            yield page

    @asynccontextmanager
    async def arrivals(self) -> AsyncIterator[AsyncIterator[str]]:
        """See `ArrivalTeller`."""
        opened = self._use()
        async with opened.control.subscription(opened.keys.arrivals) as messages:

            async def names() -> AsyncIterator[str]:
                async for message in messages:
                    yield text_of(message)

            yield names()

    async def set_expiry_many(self, items: Sequence[tuple[str, float | None]]) -> None:
        """Change expiry of the entry's keys."""
        await self._use().listing.set_expiry([(check_name(name), expires) for name, expires in items])

    async def append_journal(self, records: bytes) -> None:
        """See `JournalBackend`."""
        await self._use().journal.append(records)

    async def read_journals(self) -> Sequence[bytes]:
        """See `JournalBackend`."""
        return await self._use().journal.read()

    async def replace_journals(self, records: bytes) -> None:
        """See `JournalBackend`."""
        await self._use().journal.replace(records)

    async def follow_journals(self) -> Mapping[str, bytes]:
        """See `JournalFollower`."""
        return await self._use().journal.follow()

    async def aclose(self) -> None:
        """Close every connection; a thread that is blocked on one wakes at once."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        opened.wires.close()
        try:
            with suppress(BackendError, TimeoutError):
                async with asyncio.timeout(END_SECONDS):  # a sign of life that is not taken back ends by itself
                    await opened.journal.end()
        finally:  # also when there is less time than that
            await opened.control.close()
        if opened.server is not None:
            try:
                await opened.workers.run(opened.server.stop)
            except ClosedError:  # the threads are gone
                opened.server.stop()

    def _use(self) -> _Opened:
        if self._opened is None:
            raise ClosedError(f"{self!r} is not open")
        return self._opened
