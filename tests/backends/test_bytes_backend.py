"""`BytesBackend`: what an author's few methods are turned into, and what becomes of their mistakes."""

import asyncio
from typing import ClassVar

import pytest

from kvtier.backends.base import Read, Stat, Traits, Write, Written
from kvtier.backends.bytes_backend import BytesBackend
from kvtier.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CapacityError,
    ClosedError,
    ConfigError,
)
from kvtier.testing.backends import BackendConformance
from kvtier.testing.subject import Subject


class SharedDict(BytesBackend):
    """A richer one: a medium that is shared, with expiry and sizes of its own."""

    traits = Traits(persistent=True, shared=True, max_value_bytes=1 << 20)
    parallel = 4

    def __init__(self, medium):
        self._medium = medium
        self.busy = self.busiest = 0

    async def get(self, name):
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        await asyncio.sleep(0)
        self.busy -= 1
        return self._medium[name][0] if name in self._medium else None

    async def put(self, name, value, expires):
        await asyncio.sleep(0)
        self._medium[name] = (value, expires)

    async def delete(self, name):
        return self._medium.pop(name, None) is not None

    async def names(self):
        return [*self._medium, "NOT A NAME"]

    async def stat(self, name):
        value, expires = self._medium.get(name, (None, None))
        return None if value is None else Stat(name, len(value), expires)

    async def set_expiry_many(self, items):
        for name, expires in items:
            if name in self._medium:
                self._medium[name] = (self._medium[name][0], expires)


class TestSharedDict(BackendConformance):
    race_bytes = 512 << 10

    @pytest.fixture
    def medium(self):
        return {}

    @pytest.fixture
    def make_backend(self, medium):
        return lambda: SharedDict(medium)

    @pytest.fixture
    def raw_read(self, medium):
        return lambda name: medium[name][0] if name in medium else None


class Raising(SharedDict):
    """Raises what it is told, from every method."""

    foreign: ClassVar = {LookupError: CapacityError}
    error = None

    def _fail(self):
        if self.error is not None:
            raise self.error

    async def get(self, name):
        self._fail()
        return await super().get(name)

    async def put(self, name, value, expires):
        self._fail()
        await super().put(name, value, expires)

    async def delete(self, name):
        self._fail()
        return await super().delete(name)

    async def names(self):
        self._fail()
        return await super().names()

    async def stat(self, name):
        self._fail()
        return await super().stat(name)


KINDS = [
    (KeyError("k"), CapacityError),  # its own table comes first
    (ConnectionResetError("reset"), BackendUnavailableError),
    (TimeoutError(), BackendTimeoutError),
    (OSError(28, "No space left on device"), CapacityError),
    (MemoryError(), CapacityError),
    (ZeroDivisionError("odd"), BackendError),
    (BackendTimeoutError("its own"), BackendTimeoutError),
]


@pytest.mark.parametrize(("error", "kind"), KINDS)
async def test_whatever_is_raised_becomes_a_backend_error(context, error, kind):
    backend = Raising({})
    await backend.open(context)
    disk = Subject(backend)
    await disk.put("entry", b"12345")
    backend.error = error
    for call in (
        disk.get("entry", 10),
        disk.put("entry", b"x"),
        disk.stat("entry"),
        disk.delete("entry"),
        disk.listing(),
    ):
        with pytest.raises(BackendError) as caught:
            await call
        assert type(caught.value) is kind
    answers = await backend.stat_many(["entry", "other"])
    assert [type(answer) for answer in answers] == [kind, kind]
    backend.error = None
    assert await disk.get("entry", 10) == b"12345"
    await backend.aclose()


async def test_batches_are_worked_through_a_few_at_a_time(context):
    backend = SharedDict({})
    await backend.open(context)
    disk = Subject(backend)
    await disk.put_all({f"n{i}": b"x" for i in range(50)})
    assert [await disk.get(f"n{i}", 1) for i in range(3)] == [b"x"] * 3
    backend.busiest = 0
    await asyncio.gather(*(disk.get(f"n{i}", 1) for i in range(3)))
    assert backend.busiest == 3
    backend.busiest = 0
    await backend.read_many([Read(f"n{i}", [memoryview(bytearray(1))]) for i in range(50)])
    assert backend.busiest == 4
    await backend.aclose()


class Connecting(SharedDict):
    """Counts its connections."""

    def __init__(self, medium, error=None):
        super().__init__(medium)
        self.connected, self.error = [], error

    async def connect(self):
        self.connected.append(self.context.tier)
        if self.error is not None:
            raise self.error

    async def disconnect(self):
        self.connected.append("closed")


async def test_connects_once_and_disconnects_once(context):
    backend = Connecting({})
    with pytest.raises(ClosedError):
        await backend.read_many([])
    await backend.open(context)
    with pytest.raises(ConfigError, match="open already"):
        await backend.open(context)
    await backend.aclose()
    await backend.aclose()
    assert backend.connected == ["kit", "closed"]
    with pytest.raises(ClosedError):
        _ = backend.context


async def test_failed_connect_is_disconnected(context):
    backend = Connecting({}, error=ConnectionRefusedError("refused"))
    with pytest.raises(BackendUnavailableError, match="Connecting: refused"):
        await backend.open(context)
    await backend.aclose()
    assert backend.connected == ["kit", "closed"]


async def test_config_errors_of_connect_pass(context):
    backend = Connecting({}, error=ConfigError("url= is no URL"))
    with pytest.raises(ConfigError, match="url= is no URL"):
        await backend.open(context)
    await backend.aclose()


async def test_values_that_are_no_bytes_are_faults(context):
    backend = SharedDict({"entry": ("text", None)})
    await backend.open(context)
    with pytest.raises(BackendError, match="TypeError"):
        await Subject(backend).get("entry", 10)
    await backend.aclose()


async def test_value_given_to_put_is_the_authors_own(context):
    medium = {}
    backend = SharedDict(medium)
    await backend.open(context)
    source = bytearray(b"12345")
    assert await backend.write_many([Write("entry", [memoryview(source)])]) == [Written(5)]
    source[:] = b"-----"
    assert medium["entry"] == (b"12345", None)
    assert type(medium["entry"][0]) is bytes
    await backend.aclose()
