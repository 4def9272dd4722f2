"""Backend tests: open and close, reopen, two instances, and media that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.backends.base import Read, Write
from kvtier.errors import BackendError, ClosedError, ConfigError
from kvtier.testing.backend_listing import FAR, expect_expiry
from kvtier.testing.backend_races import RaceTests
from kvtier.testing.subject import value_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvtier.backends.base import Backend

    MakeBackend = Callable[[], Backend]


class LifecycleTests(RaceTests):
    """What holds beyond one quiet, open instance."""

    async def test_close_twice_and_unopened(self, make_backend: MakeBackend) -> None:
        async with self.context() as context:
            backend = make_backend()
            await backend.aclose()  # never opened
            backend = make_backend()
            await backend.open(context)
            await backend.write_many([Write("entry", [memoryview(b"x")])])
            await backend.aclose()
            await backend.aclose()

    async def test_close_after_failed_open(self, make_unopenable: MakeBackend | None) -> None:
        if make_unopenable is None:
            pytest.skip("no fixture `make_unopenable`")
        async with self.context() as context:
            backend = make_unopenable()
            with pytest.raises((ConfigError, BackendError)):
                await backend.open(context)
            await backend.aclose()
            await backend.aclose()

    async def test_use_after_close_is_refused(self, make_backend: MakeBackend) -> None:
        async with self.context() as context:
            backend = make_backend()
            await backend.open(context)
            await backend.write_many([Write("entry", [memoryview(b"x")])])
            await backend.aclose()
            into = bytearray(8)
            for call in _every_verb(backend, into):
                with pytest.raises((ClosedError, BackendError)):
                    await call()
            assert into == bytearray(8)

    async def test_nothing_is_left_open(self, make_backend: MakeBackend) -> None:
        if _descriptors() == 0:
            pytest.skip("needs /proc")
        async with self.opened(make_backend) as subject:
            await subject.put("entry", b"x")  # whatever is opened once per process is open now
        before = _descriptors()
        for _ in range(3):
            async with self.opened(make_backend) as subject:
                await subject.put_all({f"n{i}": b"x" for i in range(20)})
                await subject.get("n1", 10)
                await subject.get("absent", 10)
                await subject.listing()
                async for _page in subject.backend.scan():
                    break
        assert _descriptors() <= before, "file descriptors are left open"

    async def test_reopen_finds_everything(self, make_backend: MakeBackend) -> None:
        if not make_backend().traits.persistent:
            pytest.skip("entries do not outlive the process")
        values = {f"n{i}": value_of(i, 1_000 * i) for i in range(20)}
        async with self.opened(make_backend) as subject:
            await subject.put_all(values)
            await subject.put("mortal", b"x", expires=FAR)
            await subject.put("gone", b"x")
            await subject.delete("gone")
            await subject.put("n3", b"overwritten")
            await subject.backend.sync([*values, "mortal"])
        values |= {"n3": b"overwritten", "mortal": b"x"}
        async with self.opened(make_backend) as subject:
            for name, value in values.items():
                assert await subject.get(name, 20_000) == value
            assert await subject.get("gone", 10) is None
            listed = {stat.name: stat.size for stat in await subject.listing()}
            assert listed == {name: len(value) for name, value in values.items()}
            await expect_expiry(subject, "mortal", FAR)
            await expect_expiry(subject, "n3", None)

    async def test_two_instances_share_entries(self, make_backend: MakeBackend) -> None:
        if not make_backend().traits.shared:
            pytest.skip("the medium belongs to one process")
        async with (
            self.context() as context,
            self.opened_in(context, make_backend) as one,
            self.opened_in(context, make_backend) as other,
        ):
            for writer, value in ((one, b"one"), (other, b"other, longer"), (one, b"last")):
                await writer.put("entry", value)
                for reader in (one, other):
                    assert await reader.get("entry", 100) == value
                    stat = await reader.stat("entry")
                    assert stat is not None
                    assert stat.size == len(value)
                    assert [stat.name for stat in await reader.listing()] == ["entry"]
            assert not (await other.put("entry", b"third", if_absent=True)).stored
            assert await one.delete("entry") is True
            assert await other.delete("entry") is False
            for reader in (one, other):
                assert await reader.get("entry", 100) is None
                assert await reader.listing() == []

    async def test_reader_and_writer_in_two_instances(self, make_backend: MakeBackend) -> None:
        if not make_backend().traits.shared:
            pytest.skip("the medium belongs to one process")
        async with (
            self.context() as context,
            self.opened_in(context, make_backend) as writer,
            self.opened_in(context, make_backend) as reader,
        ):
            await self.alternate(writer, reader)

    async def test_closing_one_instance_leaves_the_other(self, make_backend: MakeBackend) -> None:
        if not make_backend().traits.shared:
            pytest.skip("the medium belongs to one process")
        async with self.context() as context, self.opened_in(context, make_backend) as other:
            async with self.opened_in(context, make_backend) as one:
                await one.put("entry", b"one")
                putting = asyncio.ensure_future(other.put("large", value_of("large", 1 << 20)))
            await putting
            assert await other.get("entry", 100) == b"one"
            assert await other.get("large", 1 << 20) == value_of("large", 1 << 20)

    async def test_faults_are_backend_errors(
        self, make_backend: MakeBackend, break_medium: Callable[[], None] | None
    ) -> None:
        if break_medium is None:
            pytest.skip("no fixture `break_medium`")
        async with self.opened(make_backend) as subject:
            await subject.put("entry", b"12345")
            break_medium()
            into = bytearray(8)
            for call in _every_verb(subject.backend, into):
                try:
                    answers = await call()
                except BackendError:
                    continue
                for answer in answers or ():
                    assert answer is None or isinstance(answer, BackendError), f"answered {answer!r} on a broken medium"


def _descriptors() -> int:
    numbers = Path("/proc/self/fd")
    return len(list(numbers.iterdir())) if numbers.exists() else 0


def _every_verb(backend: Backend, into: bytearray) -> Sequence[Callable[[], Awaitable[Sequence[object] | None]]]:
    async def scan() -> Sequence[object]:
        return [page async for page in backend.scan()]

    return [
        lambda: backend.read_many([Read("entry", [memoryview(into)])]),
        lambda: backend.write_many([Write("other", [memoryview(b"y")])]),
        lambda: backend.stat_many(["entry"]),
        lambda: backend.delete_many(["entry"]),
        scan,
    ]
