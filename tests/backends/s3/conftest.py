"""Real servers, one of each kind per run with a bucket in each, and a folder per test."""

import itertools

import pytest

from kvtier.testing.fault_proxy import FaultProxy
from kvtier.testing.s3_servers import MotoServer, SeaweedServer

BUCKET = "shared"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory):
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory):
    with MotoServer(tmp_path_factory.mktemp("moto")) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def server(seaweed):
    return seaweed


@pytest.fixture
def folder():
    return f"test-{next(_numbers)}/"


@pytest.fixture
def make_backend(server, folder):
    return lambda **options: server.backend(BUCKET, **{"prefix": folder, **options})


@pytest.fixture
def client(server):
    client = server.client()
    yield client
    client.close()


@pytest.fixture
def proxy(server):
    with FaultProxy(("127.0.0.1", server.port)) as proxy:
        yield proxy


@pytest.fixture
def proxy_url(proxy):
    return f"http://127.0.0.1:{proxy.port}"
