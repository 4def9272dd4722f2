"""The shipped kit against the redis backend: both server families, every kind of connection, and a cluster."""

import os

import pytest

from kvtier.backends.redis import RedisBackend
from kvtier.options import SecretUrl
from kvtier.testing.backends import BackendConformance, JournalConformance
from kvtier.testing.servers.fixtures import program_of, short_folder
from kvtier.testing.servers.redis_servers import RedisCluster, RedisServer
from kvtier.testing.servers.redis_tiers import make_redis, new_prefix

pytestmark = pytest.mark.redis

LONG = bool(os.environ.get("KVTIER_LONG"))  # every family with every connection
long = pytest.mark.skipif(not LONG, reason="KVTIER_LONG=1 runs it")


@pytest.fixture(scope="module", params=["valkey", "redis"])
def cluster(request):
    if request.param == "redis" and not LONG:
        pytest.skip("KVTIER_LONG=1 runs it")
    with short_folder() as folder, RedisCluster(program_of(request.param), folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def oldest_server():
    with short_folder() as folder, RedisServer(program_of("redis-6.2"), folder) as server:
        yield server


class TestRedis(BackendConformance):
    listing_entries = 3_000

    @pytest.fixture
    def make_backend(self, either_server):
        prefix = new_prefix()
        return lambda: make_redis(either_server.url, prefix=prefix)

    @pytest.fixture
    def make_unopenable(self):
        return lambda: RedisBackend(url=SecretUrl("redis://127.0.0.1:1"))


class Small(BackendConformance):
    """On fewer bytes."""

    large_bytes = 3 << 20
    race_bytes = 600 << 10
    listing_entries = 100


@long
class TestUnixSocket(Small):
    @pytest.fixture
    def make_backend(self, valkey):
        prefix = new_prefix()
        return lambda: make_redis(valkey.unix_url, prefix=prefix, part_bytes=256 << 10)


class TestPlainClient(Small):
    @pytest.fixture
    def make_backend(self, valkey):
        prefix = new_prefix()
        return lambda: make_redis(valkey.url, prefix=prefix, client="redis-py")


class TestCluster(Small):
    @pytest.fixture
    def make_backend(self, cluster):
        prefix = new_prefix()
        return lambda: make_redis(cluster.url, prefix=prefix, topology="cluster")


@long
class TestOldest(Small):
    @pytest.fixture
    def make_backend(self, oldest_server):
        prefix = new_prefix()
        return lambda: make_redis(oldest_server.url, prefix=prefix)


class TestRedisJournal(JournalConformance):
    @pytest.fixture
    def make_backend(self, either_server):
        prefix = new_prefix()
        return lambda: make_redis(either_server.url, prefix=prefix)


class TestClusterJournal(JournalConformance):
    @pytest.fixture
    def make_backend(self, cluster):
        prefix = new_prefix()
        return lambda: make_redis(cluster.url, prefix=prefix, topology="cluster")
