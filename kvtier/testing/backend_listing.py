"""Backend tests: listings, and the expiry they report."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from kvtier.testing.backend_kit import BackendKit

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.backends.base import Backend
    from kvtier.testing.subject import Subject

    MakeBackend = Callable[[], Backend]

FAR = 4_102_444_800.0  # the year 2100
TOLERANCE_SECONDS = 1.0  # some media keep whole seconds


class ListingTests(BackendKit):
    """`scan`, `stat_many` and `set_expiry_many`."""

    async def test_scan_of_nothing(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            assert await subject.listing() == []
            assert await subject.listing(after="anything") == []

    async def test_scan_lists_each_entry_once(self, make_backend: MakeBackend) -> None:
        values = {f"entry-{i:05}": b"x" * (i % 50) for i in range(self.listing_entries)}
        async with self.opened(make_backend) as subject:
            await subject.put_all(values)
            pages = [page async for page in subject.backend.scan()]
            assert all(pages), "an empty page"
            listed = [stat for page in pages for stat in page]
            assert sorted((stat.name, stat.size) for stat in listed) == sorted((n, len(v)) for n, v in values.items())

    async def test_scan_resumes_behind_a_name(self, make_backend: MakeBackend) -> None:
        values = {f"entry-{i:05}": b"x" for i in range(self.listing_entries)}
        async with self.opened(make_backend) as subject:
            await subject.put_all(values)
            order = [stat.name for stat in await subject.listing()]
            for index in (0, 1, len(order) // 2, len(order) - 2, len(order) - 1):
                assert [stat.name for stat in await subject.listing(after=order[index])] == order[index + 1 :]
            gone = order[len(order) // 3]
            await subject.delete(gone)
            assert [stat.name for stat in await subject.listing(after=gone)] == order[len(order) // 3 + 1 :]

    async def test_scan_beside_writes(self, make_backend: MakeBackend) -> None:
        steady = [f"steady-{i:05}" for i in range(self.listing_entries)]
        async with self.opened(make_backend) as subject:
            await subject.put_all(dict.fromkeys(steady, b"old"))
            done = False

            async def churn() -> None:
                turn = 0
                while not done:
                    turn += 1
                    await subject.put(steady[turn * 7 % len(steady)], b"newer")
                    await subject.put(f"passing-{turn % 50}", b"x")
                    await subject.delete(f"passing-{(turn + 25) % 50}")

            churning = asyncio.ensure_future(churn())
            try:
                for _ in range(5):
                    names = [stat.name for stat in await subject.listing()]
                    assert len(names) == len(set(names)), "an entry was listed twice"
                    assert sorted(name for name in names if name.startswith("steady")) == steady
            finally:
                done = True
                await churning

    async def test_expiry_is_kept_and_changed(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            await subject.put("mortal", b"12345", expires=FAR)
            await subject.put("immortal", b"x")
            if not await self.keeps_expiry(subject):
                pytest.skip("this medium stores no expiry")
            await expect_expiry(subject, "mortal", FAR)
            await expect_expiry(subject, "immortal", None)
            await subject.backend.set_expiry_many([("mortal", FAR + 500), ("immortal", FAR + 900), ("absent", FAR)])
            await expect_expiry(subject, "mortal", FAR + 500)
            await expect_expiry(subject, "immortal", FAR + 900)
            assert await subject.get("mortal", 10) == b"12345"
            await subject.backend.set_expiry_many([("mortal", None)])
            await expect_expiry(subject, "mortal", None)
            await subject.put("immortal", b"y")  # a new value brings its own expiry
            await expect_expiry(subject, "immortal", None)
            assert await subject.stat("absent") is None

    async def keeps_expiry(self, subject: Subject) -> bool:
        """Tell whether the medium keeps expiry; persistent ones and those that expire by themselves must."""
        stat = await subject.stat("mortal")
        assert stat is not None
        traits = subject.backend.traits
        if traits.persistent or traits.native_expiry:
            assert stat.expires is not None, "a persistent medium must keep the expiry of its entries"
        return stat.expires is not None

    async def test_expired_entries_do_no_harm(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            for name, expires in (("past", time.time() - 100), ("long past", 1.0), ("before the epoch", -5.0)):
                await subject.put(name.replace(" ", "-"), b"12345", expires=expires)
                assert await subject.get(name.replace(" ", "-"), 10) in {None, b"12345"}
            await subject.listing()

    async def test_native_expiry(self, make_backend: MakeBackend) -> None:
        async with self.opened(make_backend) as subject:
            if not subject.backend.traits.native_expiry:
                pytest.skip("the medium does not drop entries by itself")
            await subject.put("mortal", b"12345", expires=time.time() + 0.3)
            await subject.put("immortal", b"12345", expires=FAR)
            for _ in range(100):
                if await subject.get("mortal", 10) is None:
                    break
                await asyncio.sleep(0.05)  # the medium's own clock: nothing here can advance it
            assert await subject.get("mortal", 10) is None
            assert await subject.get("immortal", 10) == b"12345"


async def expect_expiry(subject: Subject, name: str, expires: float | None) -> None:
    """Fail unless `stat_many` and `scan` agree that `name` expires at that second, or never."""
    listed = {stat.name: stat for stat in await subject.listing()}
    for stat in (await subject.stat(name), listed.get(name)):
        assert stat is not None
        if expires is None:
            assert stat.expires is None
        else:
            assert stat.expires == pytest.approx(expires, abs=TOLERANCE_SECONDS)
