"""Backend tests: exactly the given buffers are filled and read, and none is touched once the call has ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from kvtier.backends.base import Read, TooLongError, Write, Written
from kvtier.errors import InvalidValueError
from kvtier.testing.backend_kit import BackendKit
from kvtier.testing.paint import PaintedBuffers
from kvtier.testing.subject import split, value_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.backends.base import Backend

    MakeBackend = Callable[[], Backend]

MANY_PARTS = 2_500  # more than one system call takes


class BufferTests(BackendKit):
    """Parts, offsets, kinds of buffers; the one rule."""

    @pytest.mark.parametrize("pieces", [2, 3, 17])
    async def test_parts_of_odd_sizes(self, make_backend: MakeBackend, pieces: int) -> None:
        value = value_of(pieces, 99_991)
        async with self.opened(make_backend) as subject:
            await subject.put("entry", value, pieces=pieces)
            assert await subject.get("entry", len(value)) == value
            assert await subject.get("entry", len(value), pieces=pieces + 1) == value
            assert await subject.get("entry", len(value) + 5_000, pieces=pieces) == value

    async def test_very_many_parts(self, make_backend: MakeBackend) -> None:
        value = value_of("many", 3 * MANY_PARTS + 1)
        async with self.opened(make_backend) as subject:
            await subject.put("entry", value, pieces=MANY_PARTS)
            assert await subject.get("entry", len(value), pieces=MANY_PARTS) == value

    async def test_no_parts_at_all(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            assert list(await subject.backend.write_many([Write("empty", [])])) == [Written(0)]
            assert list(await subject.backend.read_many([Read("empty", []), Read("absent", [])])) == [0, None]
            await subject.put("full", b"x")
            (answer,) = await subject.backend.read_many([Read("full", [])])
            assert isinstance(answer, TooLongError)

    async def test_too_long_says_the_size(self, make_backend: MakeBackend) -> None:
        value = value_of("long", 10_000)
        async with self.opened(make_backend) as subject:
            await subject.put("entry", value)
            for room in (0, 1, 9_999):
                with pytest.raises(TooLongError) as caught:
                    await subject.get("entry", room, pieces=2)
                assert caught.value.size == 10_000
            assert await subject.get("entry", 10_000) == value

    async def test_offset(self, make_backend: MakeBackend) -> None:
        value = value_of("offset", 50_000)
        async with self.opened(make_backend) as subject:
            await subject.put("entry", value)
            for offset in (1, 4096, 49_999):
                assert await subject.get("entry", 50_000 - offset, pieces=3, offset=offset) == value[offset:]
            assert await subject.get("entry", 10, offset=50_000) == b""
            assert await subject.get("entry", 10, offset=60_000) == b""
            assert await subject.get("absent", 10, offset=5) is None
            with pytest.raises(TooLongError) as caught:
                await subject.get("entry", 100, offset=49_000)
            assert caught.value.size == 50_000

    async def test_partial(self, make_backend: MakeBackend) -> None:
        value = value_of("partial", 50_000)
        async with self.opened(make_backend) as subject:
            await subject.put("entry", value)
            for offset, room in ((0, 0), (0, 4096), (4096, 8192), (12_345, 1), (49_000, 5_000)):
                found = await subject.get("entry", room, pieces=2, offset=offset, partial=True)
                assert found == value[offset : offset + room]

    async def test_read_only_and_unaligned_sources(self, make_backend: MakeBackend) -> None:
        value = value_of("read-only", 70_001)
        async with self.opened(make_backend) as subject:
            parts = [memoryview(value)[:33_333], memoryview(value)[33_333:]]
            assert list(await subject.backend.write_many([Write("entry", parts)])) == [Written(len(value))]
            assert await subject.get("entry", len(value)) == value

    async def test_read_only_target_is_refused(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            await subject.put("entry", b"12345")
            target = bytes(5)
            with pytest.raises(InvalidValueError):
                await subject.backend.read_many([Read("entry", [memoryview(target)])])
            assert target == bytes(5)

    async def test_tensors_are_buffers(self, make_backend: MakeBackend) -> None:
        torch = pytest.importorskip("torch")
        value = value_of("tensor", 100_000)
        whole = torch.tensor(list(value), dtype=torch.uint8)
        async with self.opened(make_backend) as subject:
            parts = [whole[:12_345], whole[12_345:12_345], whole[12_345:]]
            assert list(await subject.backend.write_many([Write("entry", parts)])) == [Written(len(value))]
            into = [torch.zeros(size, dtype=torch.uint8) for size in split(len(value), 4)]
            assert list(await subject.backend.read_many([Read("entry", into)])) == [len(value)]
            assert torch.equal(torch.cat(into), whole)

    async def test_sources_may_change_after_the_call(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            size = min(1 << 20, self.large(subject.backend))
            for version in range(3):
                value = value_of(version, size)
                await subject.put("entry", value, pieces=3)  # the source is repainted before anything else runs
                assert await subject.get("entry", size) == value

    async def test_buffers_are_let_go_when_a_read_ends(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            size = min(1 << 20, self.large(subject.backend))
            value = value_of("let go", size)
            await subject.put("entry", value)
            for pieces in (1, 4):
                assert await subject.get("entry", size, pieces=pieces) == value
            with pytest.raises(TooLongError):
                await subject.get("entry", size - 1)
            assert await subject.get("absent", size) is None
            await asyncio.sleep(self.watch_seconds)
            subject.assert_buffers_untouched()

    async def test_buffers_are_let_go_when_a_read_is_cancelled(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            size = self.large(subject.backend)
            value = value_of("cancelled", size)
            await subject.put("entry", value)
            for turns in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256):
                into = subject.watch(PaintedBuffers(split(size, 3)))
                read = asyncio.ensure_future(subject.backend.read_many([Read("entry", into.parts)]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                read.cancel()
                with suppress(asyncio.CancelledError):
                    await read
                into.take()
            await asyncio.sleep(self.watch_seconds)
            subject.assert_buffers_untouched()
            assert await subject.get("entry", size) == value
