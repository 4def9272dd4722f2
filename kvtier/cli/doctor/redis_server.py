"""What bites on a Redis or Valkey server: eviction, memory, what a restart forgets, who may come in."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvtier.cli.doctor.finding import Finding
from kvtier.cli.doctor.round_trip import SKEW_SECONDS, clock_finding
from kvtier.cli.output import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtier.concurrency.clock import Clock
    from kvtier.config import TierConfig

HEADROOM = 1.1  # keys, indexes and the server's own memory beside the values
_LOOPBACK = ("127.", "localhost", "::1")


async def check_redis(tier: TierConfig, *, seconds: float, clock: Clock) -> Sequence[Finding]:
    """Ask the server for its settings; nothing is found where it does not tell (a managed one, or Sentinels)."""
    from redis.exceptions import RedisError

    from kvtier.backends.redis_address import Access, Credentials, Tls, parse_url
    from kvtier.backends.redis_control import Clients
    from kvtier.options import Secret, SecretUrl

    options = tier.options
    url, password = options["url"], options["password"]
    if not isinstance(url, SecretUrl) or options["topology"] == "sentinel" or url.reveal().startswith("embedded:"):
        return []
    address = parse_url(url)
    username = options["username"]
    credentials = Credentials(
        username if isinstance(username, str) else address.credentials.username,
        password if isinstance(password, Secret) else address.credentials.password,
    )
    tls = (
        Tls(options["tls_ca"], options["tls_certificate"], options["tls_key"], bool(options["tls_verify"]))  # type: ignore[arg-type]  # validated as paths
        if address.encrypted
        else None
    )
    clients = Clients(Access(credentials, address.database, None, seconds), tls, seconds)
    about: dict[str, object] = {}
    try:
        with suppress(RedisError, OSError, TimeoutError):
            about = await clients.of(address.endpoints[0]).info("all")
    finally:
        await clients.close()
    host = address.endpoints[0].host
    open_to_all = credentials.password is None and not address.endpoints[0].is_socket
    return [
        *_memory(tier, about),
        *_persistence(tier, about),
        *_clock(tier, about, clock),
        *([_unguarded(tier, host)] if open_to_all and not host.startswith(_LOOPBACK) else []),
    ]


def _memory(tier: TierConfig, about: Mapping[str, object]) -> Iterator[Finding]:
    limit, policy = about.get("maxmemory"), about.get("maxmemory_policy")
    if not isinstance(limit, int) or not isinstance(policy, str):
        return
    wanted = int(tier.capacity * HEADROOM)
    evicts = policy != "noeviction"
    most = human_bytes(limit) if limit else "not set"
    said = f"the server's maxmemory is {most}, its policy {policy}, the tier's capacity {human_bytes(tier.capacity)}"
    if limit and limit < wanted:
        what = (
            "it evicts parts of values, and what lost a part is a miss" if evicts else "it refuses writes before that"
        )
        yield Finding(
            level="problem",
            check="maxmemory",
            tier=tier.name,
            text=f"{said}: {what}",
            fix=f"lower the tier's capacity to {human_bytes(limit / HEADROOM)}, or set maxmemory to "
            f"{human_bytes(wanted)} and maxmemory-policy noeviction",
        )
    elif limit and evicts:
        yield Finding(
            level="warning",
            check="eviction-policy",
            tier=tier.name,
            text=f"{said}: beside the tier's own policy the server may evict parts of values",
            fix="CONFIG SET maxmemory-policy noeviction",
        )
    elif not limit and about.get("total_system_memory") and wanted > int(str(about["total_system_memory"])):
        yield Finding(
            level="problem",
            check="maxmemory",
            tier=tier.name,
            text=f"the capacity is {human_bytes(tier.capacity)}, the server's whole machine has "
            f"{human_bytes(int(str(about['total_system_memory'])))}",
            fix="lower the tier's capacity",
        )
    else:
        yield Finding(level="ok", check="maxmemory", tier=tier.name, text=said)
    evicted = about.get("evicted_keys")
    if isinstance(evicted, int) and evicted:
        yield Finding(
            level="warning",
            check="evicted",
            tier=tier.name,
            text=f"the server has evicted {evicted:,} keys since it started",
            fix="give it more memory, or the tier a smaller capacity",
        )


def _persistence(tier: TierConfig, about: Mapping[str, object]) -> Iterator[Finding]:
    if about.get("aof_enabled") == 0:
        yield Finding(
            level="note",
            check="persistence",
            tier=tier.name,
            text="the server keeps no append-only file: when it ends, what came since its last snapshot is lost",
            fix="appendonly yes, if that matters",
        )


def _clock(tier: TierConfig, about: Mapping[str, object], clock: Clock) -> Iterator[Finding]:
    told = about.get("server_time_usec")
    skew = clock.wall() - told / 1e6 if isinstance(told, int) else 0.0
    if abs(skew) > SKEW_SECONDS:
        yield clock_finding(tier.name, skew)


def _unguarded(tier: TierConfig, host: str) -> Finding:
    return Finding(
        level="warning",
        check="no-password",
        tier=tier.name,
        text=f"{host} takes anybody in, without a password",
        fix="set a password (requirepass or an ACL) and write it into url",
    )
