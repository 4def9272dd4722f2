"""How the redis backend gets in: users, passwords, certificates, and what it finds wrong before it keeps anything."""

import contextlib
import logging
import ssl
from pathlib import Path

import pytest

from kvtier.backends.redis_address import Access, Credentials, Endpoint, Tls, parse_url
from kvtier.errors import BackendError, ConfigError
from kvtier.options import Secret, SecretUrl
from kvtier.testing.servers.fixtures import program_of
from kvtier.testing.servers.process import ServerDiedError, free_port
from kvtier.testing.servers.redis_servers import RedisServer
from kvtier.testing.servers.redis_tiers import make_redis, new_prefix, opened_redis
from kvtier.testing.servers.tls import TlsFront, self_signed
from kvtier.testing.subject import value_of

pytestmark = pytest.mark.redis

MIB = 1 << 20
PAGE = Path(__file__).parents[2] / "docs/how-to/redis.md"
BIG = value_of("big", 5 * MIB)


async def test_password_and_user(server_folder):
    with RedisServer(program_of("valkey"), server_folder, options={"requirepass": "s3cret/@:"}) as server:
        where = f"127.0.0.1:{server.port}"
        prefix = new_prefix()
        line = next(line for line in PAGE.read_text().splitlines() if line.startswith("ACL SETUSER"))
        server.call(*line.replace("kvtier:", f"{prefix}:").replace(">secret", ">pa55").split())
        good = [
            {"url": f"redis://:s3cret%2F%40%3A@{where}"},
            {"url": f"redis://{where}", "password": Secret("s3cret/@:")},
            {"url": f"redis://kv:pa55@{where}"},
            {"url": f"redis://{where}", "username": "kv", "password": Secret("pa55"), "client": "redis-py"},
        ]
        for options in good:
            async with opened_redis(options.pop("url"), prefix=prefix, **options) as subject:
                await subject.put("entry", BIG)
                assert await subject.get("entry", len(BIG)) == BIG
        for url in (f"redis://{where}", f"redis://:wr0ng@{where}", f"redis://kv:wr0ng@{where}"):
            with pytest.raises(ConfigError) as caught:
                async with opened_redis(url, prefix=prefix):
                    pass
            assert "wr0ng" not in str(caught.value)


async def test_no_secret_is_shown(valkey, server_folder, caplog):
    caplog.set_level(logging.DEBUG)
    secret = "pa55w0rd"
    backend = make_redis(f"redis://user:{secret}@127.0.0.1:1", sentinel_password=Secret(secret))
    shown = [repr(backend), str(backend), repr(vars(backend)), repr(backend.url)]
    with RedisServer(program_of("valkey"), server_folder, options={"requirepass": "other"}) as server:
        for url in (
            f"redis://user:{secret}@127.0.0.1:1",
            f"redis://user:{secret}@127.0.0.1:{server.port}",
            f"redis://{secret}@127.0.0.1:{server.port}/x",
            f"ftp://user:{secret}@host",
            f"redis://user:{secret}@host:port",
        ):
            with pytest.raises((BackendError, ConfigError)) as caught:
                async with opened_redis(url):
                    pass
            error = caught.value
            while error is not None:
                shown += [str(error), repr(error)]
                error = error.__cause__
    assert not [text for text in shown if secret in text]
    assert secret not in caplog.text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"url": "http://host"}, "url"),
        ({"url": "redis://a:1,b:2"}, "topology"),
        ({"url": "redis://a:1/3", "topology": "cluster"}, "databases"),
        ({"url": "redis://a:1/x"}, "database"),
        ({"url": "unix://"}, "socket"),
        ({"url": "redis://a:1", "prefix": "a{b"}, "prefix"),
        ({"url": "redis://a:1", "prefix": ""}, "prefix"),
        ({"url": "redis://a:1", "part_bytes": 1}, "part_bytes"),
    ],
)
def test_wrong_options(options, named):
    with pytest.raises(ConfigError, match=named):
        make_redis(options.pop("url"), **options)


def test_urls():
    address = parse_url(SecretUrl("rediss://us%40er:pa%3Ass@h1:1,[::1]:2,h3/4"))
    assert [str(endpoint) for endpoint in address.endpoints] == ["h1:1", "::1:2", "h3:6379"]
    assert address.encrypted
    assert address.database == 4
    assert address.credentials.username == "us@er"
    assert address.credentials.password.reveal() == "pa:ss"
    assert address.shown == "rediss://h1:1,::1:2,h3:6379/4"
    (local,) = parse_url(SecretUrl("unix:///run/v.sock?db=3")).endpoints
    assert local.is_socket
    assert local.host == "/run/v.sock"


def test_a_url_that_cannot_be_read_is_told_without_its_password():
    with pytest.raises(ConfigError, match=r"url=redis://.*%XX") as caught:
        make_redis("redis://us:pa[ss@host")
    assert "pa[" not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_the_wrong_topology_is_found_at_open(valkey):
    with pytest.raises(ConfigError, match="topology"):
        async with opened_redis(valkey.url, topology="cluster"):
            pass


async def test_entries_of_another_format_are_left_alone(valkey):
    prefix = new_prefix()
    valkey.call("SET", f"{prefix}:{{journal}}:format", "2")
    with pytest.raises(ConfigError, match="format"):
        async with opened_redis(valkey.url, prefix=prefix):
            pass


@pytest.fixture(params=["the server's own", "in front of it"])
def tls_server(request, server_folder, valkey):
    """The port of a server that speaks TLS, its certificate for localhost, and the key of that."""
    certificate, key = self_signed(server_folder)
    if request.param == "in front of it":
        with TlsFront(("127.0.0.1", valkey.port), certificate, key) as front:
            yield front.port, certificate, key
        return
    files = {"tls-cert-file": str(certificate), "tls-key-file": str(key), "tls-auth-clients": "no"}
    port = free_port()
    server = RedisServer(
        program_of("redis"), server_folder / "server", options={"port": "0", "tls-port": str(port), **files}, port=0
    )
    try:
        server.start()
    except ServerDiedError:
        pytest.skip("this server was built without TLS")
    with contextlib.closing(server):
        yield port, certificate, key


async def test_tls_is_verified(tls_server):
    port, certificate, _ = tls_server
    for client in ("wire", "redis-py"):
        async with opened_redis(f"rediss://localhost:{port}", tls_ca=certificate, client=client) as subject:
            await subject.put("entry", BIG, pieces=3)
            assert await subject.get("entry", len(BIG), pieces=2) == BIG
        async with opened_redis(f"rediss://localhost:{port}", tls_verify=False, client=client) as subject:
            assert await subject.get("entry", len(BIG)) is None
        with pytest.raises((BackendError, ConfigError)):
            async with opened_redis(f"rediss://localhost:{port}", client=client):
                pass
    endpoint = Endpoint("localhost", port)
    for tls, trusted in ((Tls(ca=certificate), True), (Tls(verify=False), True), (Tls(), False)):
        access = Access(Credentials(), 0, tls.context(), 5.0)
        if trusted:
            access.connect(endpoint, 5.0).close()
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                access.connect(endpoint, 5.0)
    with pytest.raises(ConfigError, match="tls_ca"):
        async with opened_redis(f"rediss://localhost:{port}", tls_ca=certificate.parent / "absent"):
            pass


async def test_a_client_that_shows_its_certificate_gets_in(server_folder, valkey):
    certificate, key = self_signed(server_folder)
    with TlsFront(("127.0.0.1", valkey.port), certificate, key, trust=certificate) as front:
        url, files = f"rediss://localhost:{front.port}", {"tls_certificate": certificate, "tls_key": key}
        for client in ("wire", "redis-py"):
            async with opened_redis(url, tls_ca=certificate, client=client, **files) as subject:
                await subject.put("entry", BIG)
                assert await subject.get("entry", len(BIG)) == BIG
        with pytest.raises(BackendError):
            async with opened_redis(url, tls_ca=certificate):
                pass
