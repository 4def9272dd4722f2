"""Backend tests: several calls at once, and calls that are cancelled."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from kvtier.backends.base import Stat, Write, Written
from kvtier.testing.backend_kit import BackendKit
from kvtier.testing.subject import value_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.backends.base import Backend
    from kvtier.testing.subject import Subject

    MakeBackend = Callable[[], Backend]

ROUNDS = 8


class RaceTests(BackendKit):
    """Old or new, whole: never a mix, never a gap."""

    async def test_parallel_puts_of_one_name(self, make_backend: MakeBackend) -> None:
        values = [value_of(i, 200_000 + i) for i in range(6)]
        async with self.opened(make_backend) as subject:
            answers = await asyncio.gather(*(subject.put("entry", value, pieces=2) for value in values))
            assert all(answer.stored for answer in answers)
            assert await subject.get("entry", 300_000) in values
            batch = await subject.backend.write_many([Write("entry", [memoryview(value)]) for value in values])
            assert list(batch) == [Written(len(value)) for value in values]
            assert await subject.get("entry", 300_000) in values
            assert len(await subject.listing()) == 1

    async def test_one_of_parallel_puts_if_absent_wins(self, make_backend: MakeBackend) -> None:
        values = [value_of(i, 100_000) for i in range(6)]
        async with self.opened(make_backend) as subject:
            for _ in range(3):
                answers = await asyncio.gather(*(subject.put("entry", value, if_absent=True) for value in values))
                winners = [value for value, answer in zip(values, answers, strict=True) if answer.stored]
                assert len(winners) == 1
                assert await subject.get("entry", 100_000) == winners[0]
                await subject.delete("entry")

    async def test_reader_beside_a_writer_sees_whole_values(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            await self.alternate(subject, subject)

    async def alternate(self, writer: Subject, reader: Subject) -> None:
        """Let `writer` alternate two large values while `reader` polls: it must see one or the other."""
        size = min(self.race_bytes, self.large(writer.backend) - 1)
        values = [value_of("even", size), value_of("odd", size + 1)]
        await writer.put("entry", values[0])
        done = False

        async def write() -> None:
            nonlocal done
            try:
                for turn in range(1, ROUNDS + 1):
                    await writer.put("entry", values[turn % 2], pieces=1 + turn % 3)
            finally:
                done = True

        writing = asyncio.ensure_future(write())
        reads = 0
        while not done or reads < ROUNDS:
            found = await reader.get("entry", size + 1, pieces=1 + reads % 2)
            assert found is not None, "a value that was being replaced was a miss"
            assert found in values, f"read {reads} beside a writer returned neither value"
            stat = await reader.stat("entry")
            assert stat is not None
            assert stat.size in {size, size + 1}
            reads += 1
        await writing

    async def test_cancelled_put_leaves_old_or_new(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            size = min(self.race_bytes, self.large(subject.backend) - 1)
            values = [value_of("old", size), value_of("new", size + 1)]
            await subject.put("entry", values[0])
            for turns in (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256):
                put = asyncio.ensure_future(subject.put("entry", values[turns % 2], pieces=3))
                for _ in range(turns):
                    await asyncio.sleep(0)
                put.cancel()
                with suppress(asyncio.CancelledError):
                    await put
                assert await subject.get("entry", size + 1) in values
                assert [stat.name for stat in await subject.listing()] == ["entry"]

    async def test_cancelled_first_put_leaves_nothing_or_all(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            size = min(self.race_bytes, self.large(subject.backend))
            value = value_of("first", size)
            for turns in (0, 1, 2, 3, 4, 6, 8, 16, 64, 256):
                put = asyncio.ensure_future(subject.put(f"n{turns}", value, if_absent=turns % 2 == 0))
                for _ in range(turns):
                    await asyncio.sleep(0)
                put.cancel()
                with suppress(asyncio.CancelledError):
                    await put
                found = await subject.get(f"n{turns}", size)
                assert found in {None, value}
                listed = [stat for stat in await subject.listing() if stat.name == f"n{turns}"]
                assert [stat.size for stat in listed] == ([] if found is None else [size])

    async def test_everything_at_once(self, make_backend: MakeBackend) -> None:
        values = {f"n{i % 4}": value_of(i, 30_000) for i in range(4)}
        async with self.opened(make_backend) as subject:

            async def work(name: str, value: bytes) -> None:
                for _ in range(10):
                    await subject.put(name, value, pieces=2)
                    assert await subject.get(name, 40_000) in {None, value}
                    await subject.delete(name)
                    assert isinstance(await subject.stat(name), Stat | None)

            await asyncio.gather(*(work(name, value) for name, value in values.items() for _ in range(3)))
            await asyncio.sleep(self.watch_seconds)  # what comes back later, comes now
            assert await subject.listing() == []
