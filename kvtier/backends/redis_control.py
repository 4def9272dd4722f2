"""The control side, over redis-py: logging in, who serves what, scripts and small commands, subscriptions."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import redis.asyncio as redis_py
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisError
from redis.exceptions import ConnectionError as LostError
from redis.exceptions import TimeoutError as LateError

from kvtier.backends.redis_address import Access, Credentials, Endpoint, Tls
from kvtier.backends.redis_faults import NOT_MASTER, Redirected, ReplyError, text_of
from kvtier.errors import BackendTimeoutError, BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence

    from kvtier.backends.redis_scripts import Script

    Word: TypeAlias = str | bytes | int
    T = TypeVar("T")

CONNECTIONS: Final = 8  # per server, for control alone
MOST_TURNS: Final = 8
REFRESH_SECONDS: Final = 0.5  # at most, for finding out who serves what now
AGAIN_SECONDS: Final = 0.05


class Clients:
    """One redis-py client per server, made when first used: no retries, every call bounded."""

    def __init__(self, access: Access, tls: Tls | None, seconds: float) -> None:
        self._access = access
        self._tls = tls
        self.seconds = seconds
        self._clients: dict[Endpoint, redis_py.Redis] = {}

    def of(self, endpoint: Endpoint) -> redis_py.Redis:
        """Return the server's client."""
        if endpoint not in self._clients:
            self._clients[endpoint] = redis_py.Redis(connection_pool=self._pool(endpoint))
        return self._clients[endpoint]

    def _pool(self, endpoint: Endpoint) -> redis_py.BlockingConnectionPool:
        where: dict[str, Any] = {"host": endpoint.host, "port": endpoint.port}
        kind: type[redis_py.Connection | redis_py.UnixDomainSocketConnection] = redis_py.Connection
        if endpoint.is_socket:
            where, kind = {"path": endpoint.host}, redis_py.UnixDomainSocketConnection
        elif self._tls is not None:
            kind = redis_py.SSLConnection
            where |= tls_options(self._tls)
        return redis_py.BlockingConnectionPool(
            max_connections=CONNECTIONS,
            timeout=self.seconds,
            connection_class=kind,
            db=self._access.database,
            **where,
            **self.manners(self._access.credentials),
        )

    def manners(self, credentials: Credentials) -> dict[str, Any]:
        """Return the options every connection has: who asks, how long it may take, no tries behind our back."""
        password = credentials.password
        return {
            "username": credentials.username,
            "password": password.reveal() if password is not None else None,
            "socket_timeout": self.seconds,
            "socket_connect_timeout": min(self.seconds, self._access.connect_seconds),
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }

    async def close(self) -> None:
        """Close every connection."""
        clients, self._clients = self._clients, {}
        for each in clients.values():
            with suppress(RedisError, OSError):
                await each.aclose()
                await each.connection_pool.disconnect()


def tls_options(tls: Tls) -> dict[str, Any]:
    """Return the options of redis-py that say what `tls` says."""
    return {
        "ssl_ca_certs": str(tls.ca) if tls.ca is not None else None,
        "ssl_certfile": str(tls.certificate) if tls.certificate is not None else None,
        "ssl_keyfile": str(tls.key) if tls.key is not None else None,
        "ssl_cert_reqs": "required" if tls.verify else "none",
        "ssl_check_hostname": tls.verify,
    }


class Control:
    """Commands on the server that serves a key, wherever that is now.

    Args:
        clients: the connections.
        endpoints: the server, the nodes of the cluster, or the Sentinels.
        keys: one key per group of keys that are served together; calls name a group by its index.
        medium: what messages call the medium.
        is_cluster: ask the nodes who serves which slots.
        sentinel: the name of the master that Sentinels watch, and who asks them.
    """

    def __init__(
        self,
        clients: Clients,
        endpoints: Sequence[Endpoint],
        *,
        keys: Sequence[str],
        medium: str,
        is_cluster: bool = False,
        sentinel: tuple[str, Credentials] | None = None,
    ) -> None:
        self.clients = clients
        self.medium = medium
        self._known: list[Endpoint] = list(endpoints)
        self._keys = list(keys)
        self._is_cluster = is_cluster
        self._sentinel = sentinel
        self._serving: list[Endpoint] = [endpoints[0]] * len(self._keys)
        self._refreshing: asyncio.Lock = asyncio.Lock()

    def endpoint(self, group: int) -> Endpoint:
        """Return who serves a group, as far as is known."""
        return self._serving[group]

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return len(self._keys)

    @property
    def servers(self) -> dict[Endpoint, list[int]]:
        """Each server and the groups it serves."""
        found: dict[Endpoint, list[int]] = {}
        for group, endpoint in enumerate(self._serving):
            found.setdefault(endpoint, []).append(group)
        return found

    async def refresh(self) -> None:
        """Find out anew who serves what.

        Raises:
            BackendUnavailableError, BackendTimeoutError, ReplyError: nobody who could tell can be reached.
        """
        if not self._is_cluster and self._sentinel is None:
            return
        async with self._refreshing:
            with self._faults():
                if self._sentinel is not None:
                    self._serving = [await self._ask_sentinels(*self._sentinel)] * len(self._keys)
                else:
                    await self._ask_nodes()

    async def _ask_sentinels(self, service: str, credentials: Credentials) -> Endpoint:
        addresses = [(each.host, each.port) for each in self._known]
        sentinel = Sentinel(addresses, sentinel_kwargs=self.clients.manners(credentials))  # type: ignore[no-untyped-call]  # half of redis-py is annotated
        try:
            host, port = await sentinel.discover_master(service)
        finally:
            for each in sentinel.sentinels:
                await each.aclose()
        return Endpoint(str(host), int(port))

    async def _ask_nodes(self) -> None:
        fault: Exception | None = None
        for node in [*dict.fromkeys([*self._serving, *self._known])]:
            try:
                slots = await _call(self.clients.of(node), "CLUSTER SLOTS")
            except (RedisError, OSError) as exc:
                fault = exc
                continue
            self._take_slots(node, _raw_slots(slots))
            return
        raise fault or LostError("no node of the cluster is known")

    def _take_slots(self, asked: Endpoint, ranges: Sequence[tuple[int, int, str, int]]) -> None:
        serving = {}
        for first, last, host, port in ranges:
            serving[first, last] = Endpoint(host or asked.host, port)
        for group, key in enumerate(self._keys):
            slot = key_slot(key.encode())
            for (first, last), endpoint in serving.items():
                if first <= slot <= last:
                    self._serving[group] = endpoint
        self._known = [*dict.fromkeys([*serving.values(), *self._known])]

    async def routed(self, group: int, work: Callable[[Endpoint, bool], Awaitable[T]]) -> T:
        """Await `work(endpoint, asking)` on whoever serves the group: follow redirections, and a change of master.

        Raises:
            BackendError: what the server said, as a tier understands it.
        """
        endpoint, asking = self._serving[group], False
        for turn in range(MOST_TURNS):
            try:
                return await work(endpoint, asking)
            except Redirected as away:
                endpoint, asking = Endpoint(away.host or endpoint.host, away.port), away.asking
                if not asking:
                    self._serving[group] = endpoint
            except ReplyError as error:
                if error.code == "TRYAGAIN" and turn < MOST_TURNS - 1:
                    await asyncio.sleep(AGAIN_SECONDS)
                elif not (error.code in NOT_MASTER and await self._moved(group, endpoint)):
                    raise error.ours(self.medium) from None
                endpoint, asking = self._serving[group], False
            except (BackendUnavailableError, BackendTimeoutError) as error:
                if not await self._moved(group, endpoint) or isinstance(error, BackendTimeoutError):
                    raise
                endpoint, asking = self._serving[group], False
        raise BackendUnavailableError(f"{self.medium}: redirected too often")

    async def _moved(self, group: int, away_from: Endpoint) -> bool:
        """Tell whether somebody else serves the group now."""
        if not self._is_cluster and self._sentinel is None:
            return False
        if self._serving[group] == away_from:
            with suppress(BackendUnavailableError, BackendTimeoutError, ReplyError, TimeoutError):
                async with asyncio.timeout(REFRESH_SECONDS):
                    await self.refresh()
        return self._serving[group] != away_from

    async def command(self, group: int, *words: Word) -> object:
        """Return a command's reply from whoever serves the group; raises `BackendError`."""

        async def call(endpoint: Endpoint, asking: bool) -> object:  # noqa: FBT001  # the shape of `routed`
            return await self.command_at(endpoint, *words, asking=asking)

        return await self.routed(group, call)

    async def command_at(self, endpoint: Endpoint, *words: Word, asking: bool = False) -> object:
        """Return a command's reply from one server; raises `ReplyError`, `Redirected`, `BackendError`."""
        with self._faults():
            async with asyncio.timeout(self.clients.seconds):
                client = self.clients.of(endpoint)
                if not asking:
                    return await _call(client, *words)
                async with client.pipeline(transaction=False) as pipeline:
                    pipeline.execute_command("ASKING")
                    pipeline.execute_command(*words)
                    return (await pipeline.execute())[1]

    async def script(self, group: int, script: Script, *words: Word) -> object:
        """Run a script with the group's key; the server learns it if it does not know it. Raises `BackendError`."""

        async def call(endpoint: Endpoint, asking: bool) -> object:  # noqa: FBT001  # the shape of `routed`
            return await self.script_at(endpoint, script, self._keys[group], *words, asking=asking)

        return await self.routed(group, call)

    async def script_at(
        self, endpoint: Endpoint, script: Script, key: str, *words: Word, asking: bool = False
    ) -> object:
        """Run a script on one server; raises as `command_at`."""
        try:
            return await self.command_at(endpoint, "EVALSHA", script.digest, 1, key, *words, asking=asking)
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
        return await self.command_at(endpoint, "EVAL", script.text, 1, key, *words, asking=asking)

    @asynccontextmanager
    async def subscription(self, channel: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Listen to a channel for the block; the messages raise `BackendError` when the connection breaks."""
        client = self.clients.of(self._serving[0])
        async with client.pubsub(ignore_subscribe_messages=True) as listening:
            with self._faults():
                await listening.subscribe(channel)

            async def messages() -> AsyncIterator[bytes]:
                while True:
                    with self._faults():
                        message = await listening.get_message(timeout=None)
                    if message is not None and isinstance(message["data"], bytes):
                        yield message["data"]

            yield messages()

    async def close(self) -> None:
        """Close every connection."""
        await self.clients.close()

    @contextmanager
    def _faults(self) -> Generator[None, None, None]:
        """Raise what redis-py raises as `ReplyError`, `Redirected`, or the `BackendError` for a broken connection."""
        try:
            yield
        except AskError as exc:  # MovedError is one
            word = "MOVED" if isinstance(exc, MovedError) else "ASK"
            raise Redirected(f"{word} {exc.slot_id} {exc.host}:{exc.port}") from None
        except (LateError, TimeoutError):
            raise BackendTimeoutError(f"{self.medium}: no answer in time") from None
        except RedisError as exc:
            code = getattr(exc, "status_code", None)
            if code is None and isinstance(exc, LostError):
                raise BackendUnavailableError(f"{self.medium}: {exc}") from exc
            raise ReplyError(f"{code} {exc}" if code is not None else str(exc)) from None
        except OSError as exc:
            raise BackendUnavailableError(f"{self.medium}: {exc.strerror or exc}") from exc


def _raw_slots(slots: object) -> list[tuple[int, int, str, int]]:
    """Return first and last slot, host and port of each range's master, from either shape that redis-py gives."""
    if isinstance(slots, dict):
        return [(int(a), int(b), text_of(n["primary"][0]), int(n["primary"][1])) for (a, b), n in slots.items()]
    if not isinstance(slots, list):
        raise LostError("CLUSTER SLOTS: not understood")
    return [(int(each[0]), int(each[1]), text_of(each[2][0]), int(each[2][1])) for each in slots]


async def _call(client: redis_py.Redis, *words: Word) -> object:
    reply: object = await client.execute_command(*words)  # type: ignore[no-untyped-call]  # half of redis-py is annotated
    return reply
