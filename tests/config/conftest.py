"""Backends for configs: they take options and do nothing."""

from pathlib import Path
from typing import Literal

import pytest

from kvtier import registry
from kvtier.backends.base import Backend, Traits
from kvtier.codecs.raw import RawCodec
from kvtier.options import LocalPath, Seconds, Secret, SecretUrl, Size


class Idle(Backend):
    traits = Traits()

    async def open(self, context): ...
    async def read_many(self, reads): ...
    async def write_many(self, writes): ...
    async def delete_many(self, names): ...
    async def stat_many(self, names): ...
    def scan(self, after=None): ...
    async def aclose(self): ...


class RemoteBackend(Idle):
    def __init__(
        self,
        *,
        url: SecretUrl,
        password: Secret | None = None,
        pool: Size = 1 << 20,
        spool: LocalPath | None = None,
        cache: str | Path = Path("/spare"),
        linger: Seconds = 1.5,
        retries: int = 3,
        ratio: float = 0.5,
        tls: bool = False,
        mode: Literal["fast", "safe"] = "safe",
        hosts: tuple[str, ...] = (),
        threshold: int | Literal["auto"] = "auto",
    ) -> None:
        self.url = url
        self.password = password
        self.pool = pool
        self.spool = spool
        self.cache = cache
        self.linger = linger
        self.retries = retries
        self.ratio = ratio
        self.tls = tls
        self.mode = mode
        self.hosts = hosts
        self.threshold = threshold


class LossyCodec(RawCodec):
    name = "lossy"
    lossy = True


@pytest.fixture
def register(monkeypatch):
    """Return a function that makes plug-ins known for the length of a test."""

    def put(kind, name, cls):
        monkeypatch.setitem(getattr(registry, kind)._registered, name, cls)

    return put


@pytest.fixture
def remote(register):
    register("backends", "remote", RemoteBackend)
    return RemoteBackend
