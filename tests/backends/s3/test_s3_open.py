"""What opening finds out, and what no text gives away."""

import dataclasses
import logging
import time

import pytest

from kvtier.backends.s3 import S3Backend
from kvtier.errors import BackendError, BackendUnavailableError, ConfigError
from kvtier.options import Secret
from kvtier.store import open_chunks
from kvtier.testing.clock import FrozenClock
from kvtier.testing.context import lend_context
from kvtier.testing.s3_servers import ACCESS_KEY, SECRET_KEY, MotoServer
from kvtier.testing.servers.tls import self_signed
from kvtier.testing.subject import Subject, value_of

NO_ROLE = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


async def open_and_close(backend, *, clock=None):
    async with lend_context(clock=clock) as context:
        try:
            await backend.open(dataclasses.replace(context, deadline_seconds=20.0))
        finally:
            await backend.aclose()


async def test_a_missing_bucket(server):
    with pytest.raises(ConfigError, match=r"bucket does not exist.*NoSuchBucket"):
        await open_and_close(server.backend("nobody-made-it"))


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ({"secret_key": "wrong-secret"}, "secret_key"),
        ({"access_key": "wrong-key"}, "access_key"),
    ],
)
async def test_wrong_credentials(make_backend, wrong, advice):
    with pytest.raises(ConfigError, match=advice):
        await open_and_close(make_backend(**wrong))


async def test_no_credentials_at_all(make_backend, monkeypatch):
    for name, value in NO_ROLE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="no credentials"):
        await open_and_close(make_backend(access_key=None, secret_key=None))


@pytest.mark.parametrize(("seconds", "word"), [(3600, "ahead of"), (-3600, "behind")])
async def test_a_clock_that_differs_too_much(make_backend, seconds, word):
    with pytest.raises(ConfigError, match=f"clock is .* {word} the server's"):
        await open_and_close(make_backend(), clock=FrozenClock(wall=time.time() + seconds))
    await open_and_close(make_backend(), clock=FrozenClock(wall=time.time() + seconds / 10))


async def test_lazy_looks_at_nothing(server):
    await open_and_close(server.backend("nobody-made-it", lazy=True, secret_key="wrong-secret"))


async def test_a_server_out_of_reach_is_no_mistake_of_the_config(make_backend, proxy, proxy_url):
    proxy.refuse()
    with pytest.raises(BackendUnavailableError):
        await open_and_close(make_backend(endpoint=proxy_url))


async def test_a_failed_open_may_be_tried_again(make_backend, proxy, proxy_url):
    backend = make_backend(endpoint=proxy_url)
    async with lend_context() as context:
        proxy.refuse()
        with pytest.raises(BackendUnavailableError):
            await backend.open(context)
        proxy.heal()
        await backend.open(dataclasses.replace(context, deadline_seconds=20.0))
        assert await backend.stat_many(["absent"]) == [None]
        await backend.aclose()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bucket": "B"}, "bucket='B'"),
        ({"prefix": "kv"}, "prefix='kv'"),
        ({"prefix": "/kv/"}, "prefix"),
        ({"prefix": "a/../"}, "prefix"),
        ({"prefix": "x" * 900 + "/"}, "1024"),
        ({"endpoint": "localhost:9000"}, "endpoint"),
        ({"endpoint": "http://user:pa55word@host"}, "credentials"),
        ({"endpoint": "http://host/path"}, "endpoint"),
        ({"part_bytes": 1 << 20}, "part_bytes"),
        ({"access_key": Secret("AK")}, "secret_key"),
    ],
)
def test_options_that_work_with_no_server(options, named):
    with pytest.raises(ConfigError, match=named) as caught:
        S3Backend(**{"bucket": "bucket", **options})
    assert "pa55word" not in str(caught.value)


async def test_the_configuration_file_knows_the_options(server, folder):
    tier = {"backend": "s3", "capacity": "1GiB", "prefix": folder, "whole_bytes": "32MiB", **server.options("shared")}
    async with open_chunks({"tiers": [tier], "deadline_seconds": 20}) as store:
        await store.put("key", b"value", wait="durable")
        assert await store.get("key") == b"value"
        assert SECRET_KEY not in repr(store)
    with pytest.raises(ConfigError, match="secret_key") as caught:
        open_chunks({"tiers": [tier | {"secret_key": 17}]})
    assert ACCESS_KEY not in str(caught.value)


async def test_secrets_are_in_no_text(server, folder, proxy, proxy_url, caplog):
    caplog.set_level(logging.DEBUG)
    secrets = {"secret_key": "Very/Secret+Key", "session_token": "Very+Secret/Token", "access_key": "VerySecretId"}
    texts = []
    for options in ({}, {"lazy": True}, {"lazy": True, "data_path": "aioboto3"}):
        backend = server.backend("shared", prefix=folder, endpoint=proxy_url, **secrets, **options)
        texts += [repr(backend), str(backend), repr(backend.options), repr(vars(backend))]
        async with lend_context() as context:
            try:
                await backend.open(dataclasses.replace(context, deadline_seconds=5.0))
            except (ConfigError, BackendError) as exc:
                texts += _texts_of(exc)
                continue
            answers = [
                *await backend.read_many([_read()]),
                *await backend.stat_many(["a"]),
                *await backend.delete_many(["a"]),
            ]
            proxy.refuse()
            proxy.drop_connections()
            answers += await backend.read_many([_read()])
            proxy.heal()
            for answer in answers:
                assert isinstance(answer, BackendError)
                texts += _texts_of(answer)
            texts.append(repr(vars(backend)))
            await backend.aclose()
    texts += [record.getMessage() for record in caplog.records]
    assert len(texts) > 50, "this looked at nothing"
    for text in texts:
        for secret in ("Very/Secret", "Very%2FSecret", "Very+Secret", "Very%2BSecret"):
            assert secret not in text


def _read():
    from kvtier.backends.base import Read

    return Read("a", [memoryview(bytearray(8))])


def _texts_of(exc):
    texts = []
    while exc is not None:
        texts += [str(exc), repr(exc)]
        exc = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
    return texts


@pytest.fixture(scope="module")
def https_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("https")
    certificate, key = self_signed(folder)
    with MotoServer(folder / "moto", certificate=certificate, key=key) as server:
        server.make_bucket("shared")
        yield server, certificate


@pytest.mark.parametrize("data_path", ["sockets", "aioboto3"])
async def test_https_with_certificates_of_ones_own(https_server, folder, data_path):
    server, certificate = https_server
    backend = server.backend("shared", prefix=folder, ca_file=certificate, data_path=data_path)
    async with lend_context() as context:
        await backend.open(dataclasses.replace(context, deadline_seconds=30.0))
        value = value_of("tls", 3 << 20)
        await Subject(backend).put("entry", value, pieces=3)
        assert await Subject(backend).get("entry", len(value), pieces=2) == value
        await backend.aclose()


@pytest.mark.parametrize("data_path", ["sockets", "aioboto3"])
async def test_a_certificate_that_nobody_vouches_for_is_refused(https_server, data_path):
    server, _ = https_server
    with pytest.raises(BackendUnavailableError):
        await open_and_close(server.backend("shared", data_path=data_path))
    backend = server.backend("shared", data_path=data_path, lazy=True)
    async with lend_context() as context:
        await backend.open(dataclasses.replace(context, deadline_seconds=30.0))
        (answer,) = await backend.read_many([_read()])
        assert isinstance(answer, BackendUnavailableError)
        assert data_path == "aioboto3" or "CERTIFICATE_VERIFY_FAILED" in str(answer)
        await backend.aclose()


@pytest.mark.parametrize(
    ("addressing", "begins"),
    [("virtual", "https://the-bucket.s3.example.com/kvtier/"), ("path", "https://s3.example.com/the-bucket/kvtier/")],
)
async def test_where_the_buckets_name_goes(server, addressing, begins):
    backend = server.backend("the-bucket", endpoint="https://s3.example.com", addressing=addressing, lazy=True)
    async with lend_context() as context:
        await backend.open(context)
        assert (await backend._use().control.presign("get_object", "kvtier/entries/a")).startswith(begins)
        await backend.aclose()
