"""Backend tests: what is put comes back, and nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.backends.base import Read, Stat, TooLongError, Write, Written
from kvtier.errors import CapacityError
from kvtier.testing.backend_kit import BackendKit
from kvtier.testing.subject import value_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.backends.base import Backend

    MakeBackend = Callable[[], Backend]


class ValueTests(BackendKit):
    """One process, one instance, no faults."""

    async def test_misses_are_values(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            assert await subject.get("absent", 10) is None
            assert await subject.stat("absent") is None
            assert await subject.delete("absent") is False
            await subject.backend.sync(["absent"])
            await subject.backend.set_expiry_many([("absent", 5e9), ("absent", None)])
            assert await subject.stat("absent") is None

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_003])
    async def test_value_comes_back(self, make_backend: MakeBackend, size: int) -> None:
        value = value_of(size, size)
        async with self.opened(make_backend) as subject:
            written = await subject.put("entry", value)
            assert written == Written(size)
            assert await subject.get("entry", size) == value
            assert await subject.get("entry", size + 999) == value
            stat = await subject.stat("entry")
            assert stat is not None
            assert (stat.name, stat.size) == ("entry", size)

    async def test_large_value_comes_back(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            size = self.large(subject.backend)
            value = value_of("large", size)
            await subject.put("large", value)
            assert await subject.get("large", size, pieces=3) == value

    async def test_what_a_watched_read_shows_stays(self, make_backend: MakeBackend) -> None:
        """Bytes that were shown are not looked at again: they must be those that the caller gets."""
        async with self.opened(make_backend) as subject:
            size = self.large(subject.backend)
            await subject.put("entry", value_of("watched", size))
            into = bytearray(size)
            shown, order = bytearray(), list[int]()

            def watch(count: int) -> bool:
                if count == 0:
                    shown.clear()
                order.append(count - len(shown))
                shown.extend(into[len(shown) : count])
                return True

            for _ in range(3):
                assert list(await subject.backend.read_many([Read("entry", [memoryview(into)], watch=watch)])) == [size]
                assert all(step >= 0 for step in order), "fewer bytes are there than were shown before"
                assert bytes(shown) == bytes(into[: len(shown)]), "bytes changed after they were shown"
                assert bytes(into) == value_of("watched", size)

    async def test_too_large_value_is_refused(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            most = subject.backend.traits.max_value_bytes
            if most is None or most >= 1 << 30:
                pytest.skip("values may be of any size")
            (answer,) = await subject.backend.write_many([Write("large", [memoryview(bytes(most + 1))])])
            assert isinstance(answer, CapacityError)
            assert await subject.stat("large") is None

    async def test_overwrite_replaces(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            for version, size in enumerate([500, 90_000, 3, 0, 700]):
                value = value_of(version, size)
                assert (await subject.put("entry", value)).stored
                assert await subject.get("entry", size) == value
            assert [(stat.name, stat.size) for stat in await subject.listing()] == [("entry", 700)]

    async def test_delete_removes_and_says_so_once(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            await subject.put_all({"a": b"1", "b": b"2"})
            answers = await subject.backend.delete_many(["a", "absent"])
            assert list(answers) == [True, False]
            assert await subject.delete("a") is False
            assert await subject.get("a", 10) is None
            assert await subject.stat("a") is None
            assert [stat.name for stat in await subject.listing()] == ["b"]
            await subject.put("a", b"again")
            assert await subject.get("a", 10) == b"again"

    async def test_names_are_kept_apart(self, make_backend: MakeBackend) -> None:
        digest = "0123456789abcdef"
        names = [
            "a",
            "a.",
            "a-",
            "a.b",
            "a-b",
            "ab",
            "0",
            "00",
            "0.0",
            f"{digest}.{digest}.{digest}{digest}",
            "con",
            "x-1",
        ]
        names += ["z" * 120, "z" * 119 + "y", "z" * 119, "9" + "." * 119, "9" + "-" * 119]
        values = {name: f"value of {name}".encode() for name in names}
        async with self.opened(make_backend) as subject:
            await subject.put_all(values)
            for name, value in values.items():
                assert await subject.get(name, 200) == value
            assert sorted(stat.name for stat in await subject.listing()) == sorted(names)
            await subject.delete("a")
            assert await subject.get("a.b", 200) == values["a.b"]

    async def test_batch_answers_are_in_order_with_holes(self, make_backend: MakeBackend) -> None:
        values = {f"n{i}": value_of(i, 100 + i) for i in range(40)}
        wanted = [f"n{i}" for i in (39, 3, 77, 0, 12, 99, 5, 5)]  # holes, and one name twice
        async with self.opened(make_backend) as subject:
            written = await subject.backend.write_many([Write(name, [memoryview(v)]) for name, v in values.items()])
            assert list(written) == [Written(len(value)) for value in values.values()]
            into = [bytearray(200) for _ in wanted]
            answers = await subject.backend.read_many(
                [Read(name, [memoryview(buffer)]) for name, buffer in zip(wanted, into, strict=True)]
            )
            sizes = [len(values[name]) if name in values else None for name in wanted]
            assert list(answers) == sizes
            for name, buffer, size in zip(wanted, into, sizes, strict=True):
                if size is not None:
                    assert bytes(buffer[:size]) == values[name]
            stats = await subject.backend.stat_many(wanted)
            assert [stat.size if isinstance(stat, Stat) else stat for stat in stats] == sizes
            deleted = await subject.backend.delete_many(["n3", "absent", "n7"])
            assert list(deleted) == [True, False, True]

    async def test_failed_item_does_not_fail_its_batch(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            await subject.put_all({"short": b"12345", "long": b"x" * 5000})
            into = [bytearray(10), bytearray(4999), bytearray(10), bytearray(5000)]
            names = ["short", "long", "absent", "long"]
            answers = await subject.backend.read_many(
                [Read(name, [memoryview(buffer)]) for name, buffer in zip(names, into, strict=True)]
            )
            assert answers[0] == 5
            assert isinstance(answers[1], TooLongError)
            assert answers[1].size == 5000
            assert answers[2] is None
            assert answers[3] == 5000
            assert bytes(into[0][:5]) == b"12345"
            assert bytes(into[3]) == b"x" * 5000

    async def test_empty_batches(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            backend = subject.backend
            assert len(await backend.read_many([])) == 0
            assert len(await backend.write_many([])) == 0
            assert len(await backend.delete_many([])) == 0
            assert len(await backend.stat_many([])) == 0
            await backend.sync([])
            await backend.set_expiry_many([])

    async def test_large_batch(self, make_backend: MakeBackend) -> None:
        values = {f"n{i}": value_of(i, i) for i in range(300)}
        async with self.opened(make_backend) as subject:
            await subject.put_all(values)
            into = [bytearray(300) for _ in values]
            answers = await subject.backend.read_many(
                [Read(name, [memoryview(buffer)]) for name, buffer in zip(values, into, strict=True)]
            )
            for answer, value, buffer in zip(answers, values.values(), into, strict=True):
                assert answer == len(value)
                assert bytes(buffer[: len(value)]) == value

    async def test_if_absent_leaves_what_is_there(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            assert (await subject.put("entry", b"first", if_absent=True)).stored
            assert not (await subject.put("entry", b"second, longer", if_absent=True)).stored
            assert await subject.get("entry", 50) == b"first"
            await subject.delete("entry")
            assert (await subject.put("entry", b"third", if_absent=True)).stored
            assert await subject.get("entry", 50) == b"third"

    async def test_raw_bytes_are_the_value(
        self, make_backend: MakeBackend, raw_read: Callable[[str], bytes | None] | None
    ) -> None:
        if raw_read is None:
            pytest.skip("no fixture `raw_read`")
        async with self.opened(make_backend) as subject:
            value = value_of("raw", 10_000)
            await subject.put("entry", value, pieces=4)
            assert raw_read("entry") == value
            await subject.put("entry", b"short")
            assert raw_read("entry") == b"short"
            await subject.delete("entry")
            assert raw_read("entry") is None
