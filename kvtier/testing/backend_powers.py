"""Tests of the two extra powers a backend may have: entries that are slots, and a journal."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import pytest

from kvtier.backends.base import Backend, JournalBackend, JournalFollower, Read, SlotBackend
from kvtier.errors import BackendError, ClosedError
from kvtier.testing.backend_kit import BackendKit
from kvtier.testing.subject import value_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvtier.backends.base import BackendContext
    from kvtier.buffers.arena import Arena, Slot

    MakeBackend = Callable[[], Backend]


class SlotConformance(BackendKit):
    """Everything `SlotBackend` promises; that no slot is kept is checked at the end of every test."""

    arena_bytes: ClassVar[int] = 16 << 20

    @asynccontextmanager
    async def lent(self, make_backend: MakeBackend) -> AsyncIterator[tuple[Backend, SlotBackend, Arena]]:
        """Open a backend for the block: the same object as a `Backend` and as a `SlotBackend`, and its arena."""
        async with self.context() as context, self.opened_in(context, make_backend) as subject:
            backend = subject.backend
            assert isinstance(backend, SlotBackend)
            yield backend, backend, context.arena

    async def test_adopted_slot_is_lent(self, make_backend: MakeBackend) -> None:
        async with self.lent(make_backend) as (_, slots, arena):
            slot = filled(arena, value_of("adopted", 8192))
            slots.adopt("entry", slot)
            assert slot.references == 1, "adopt takes over the caller's reference"
            lent = slots.lend("entry")
            assert lent is slot
            assert slot.references == 2
            assert bytes(lent.view()) == value_of("adopted", 8192)
            lent.release()
            assert slots.lend("absent") is None

    async def test_adopted_slot_is_an_entry(self, make_backend: MakeBackend) -> None:
        async with self.lent(make_backend) as (backend, slots, arena):
            value = value_of("entry", 12288)
            slots.adopt("entry", filled(arena, value))
            into = bytearray(12288)
            assert list(await backend.read_many([Read("entry", [memoryview(into)])])) == [12288]
            assert bytes(into) == value
            (stat,) = await backend.stat_many(["entry"])
            listed = [stat async for page in backend.scan() for stat in page]
            assert listed == [stat]
            assert listed[0].size == 12288
            assert list(await backend.delete_many(["entry"])) == [True]
            assert slots.lend("entry") is None

    async def test_drop_gives_memory_back(self, make_backend: MakeBackend) -> None:
        async with self.lent(make_backend) as (_, slots, arena):
            slots.adopt("entry", filled(arena, bytes(4096)))
            assert arena.used > 0
            assert slots.drop("entry") is True
            assert slots.drop("entry") is False
            assert slots.lend("entry") is None
            assert arena.used == 0

    async def test_replacing_drops_the_older_slot(self, make_backend: MakeBackend) -> None:
        async with self.lent(make_backend) as (_, slots, arena):
            older, newer = filled(arena, b"1" * 4096), filled(arena, b"2" * 8192)
            slots.adopt("entry", older)
            slots.adopt("entry", newer)
            assert older.references == 0
            assert arena.used == newer.size
            lent = slots.lend("entry")
            assert lent is newer
            lent.release()

    async def test_lent_slot_outlives_its_entry(self, make_backend: MakeBackend) -> None:
        async with self.lent(make_backend) as (_, slots, arena):
            value = value_of("lent", 4096)
            slots.adopt("entry", filled(arena, value))
            lent = slots.lend("entry")
            assert lent is not None
            slots.drop("entry")
            slots.adopt("entry", filled(arena, b"x" * 4096))
            assert bytes(lent.view()) == value
            assert lent.references == 1
            lent.release()

    async def test_read_outlives_a_drop(self, make_backend: MakeBackend) -> None:
        async with self.lent(make_backend) as (backend, slots, arena):
            size = arena.capacity // 4 // 4096 * 4096
            value = value_of("read", size)
            for turns in (0, 1, 2, 4, 16, 64):
                slots.adopt("entry", filled(arena, value))
                into = bytearray(size)
                read = asyncio.ensure_future(backend.read_many([Read("entry", [memoryview(into)])]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                slots.drop("entry")
                others = []  # whoever gets the memory now paints it
                while (other := arena.try_allocate(size)) is not None:
                    other.view()[:] = b"p" * size
                    others.append(other)
                (answer,) = await read
                assert answer in {None, size}
                assert answer is None or bytes(into) == value, "memory was given back while it was read"
                for other in others:
                    other.release()

    async def test_written_entry_is_lent(self, make_backend: MakeBackend) -> None:
        async with self.context() as context, self.opened_in(context, make_backend) as subject:
            slots = subject.backend
            assert isinstance(slots, SlotBackend)
            value = value_of("written", 5000)
            await subject.put("entry", value, pieces=3)
            lent = slots.lend("entry")
            assert lent is not None
            assert bytes(lent.view(0, 5000)) == value
            lent.release()

    async def test_close_gives_up_entries_but_not_loans(self, make_backend: MakeBackend) -> None:
        async with self.context() as context:
            backend = make_backend()
            assert isinstance(backend, SlotBackend)
            await backend.open(context)
            backend.adopt("entry", filled(context.arena, b"1" * 4096))
            lent = backend.lend("entry")
            assert lent is not None
            await backend.aclose()
            assert bytes(lent.view()) == b"1" * 4096
            lent.release()
            assert context.arena.used == 0
            with pytest.raises((ClosedError, BackendError)):
                backend.lend("entry")


class JournalConformance(BackendKit):
    """Everything `JournalBackend` promises, and `JournalFollower` if it is one."""

    @asynccontextmanager
    async def journal(self, context: BackendContext, make_backend: MakeBackend) -> AsyncIterator[JournalBackend]:
        """Open a backend for the block, as a journal."""
        async with self.opened_in(context, make_backend) as subject:
            backend = subject.backend
            assert isinstance(backend, JournalBackend)
            yield backend

    async def test_appends_are_read_in_order(self, make_backend: MakeBackend) -> None:
        async with self.context() as context, self.journal(context, make_backend) as journal:
            assert b"".join(await journal.read_journals()) == b""
            for record in (b"one", b"", b"two", value_of("three", 100_000)):
                await journal.append_journal(record)
            assert b"".join(await journal.read_journals()) == b"onetwo" + value_of("three", 100_000)

    async def test_parallel_appends_stay_whole(self, make_backend: MakeBackend) -> None:
        records = [f"<{i}:{'x' * i}>".encode() for i in range(50)]
        async with self.context() as context, self.journal(context, make_backend) as journal:
            await asyncio.gather(*(journal.append_journal(record) for record in records))
            log = b"".join(await journal.read_journals())
            assert len(log) == sum(map(len, records))
            assert all(record in log for record in records)

    async def test_log_outlives_the_process(self, make_backend: MakeBackend) -> None:
        async with self.context() as context:
            for record in (b"first", b"second"):
                async with self.journal(context, make_backend) as journal:
                    await journal.append_journal(record)
            async with self.journal(context, make_backend) as journal:
                await journal.append_journal(b"third")
                assert b"|".join(log for log in await journal.read_journals() if log) == b"first|second|third"

    async def test_logs_of_the_living_are_their_own(self, make_backend: MakeBackend) -> None:
        async with self.context() as context, self.journal(context, make_backend) as living:
            await living.append_journal(b"living")
            async with self.journal(context, make_backend) as other:
                await other.append_journal(b"other")
                assert b"".join(await other.read_journals()) == b"other"
                await other.replace_journals(b"compact")
                assert b"".join(await other.read_journals()) == b"compact"
            assert b"living" in b"".join(await living.read_journals())
            await living.append_journal(b"+")
            assert b"living+" in b"".join(await living.read_journals())

    async def test_replace_takes_the_place_of_what_was_read(self, make_backend: MakeBackend) -> None:
        async with self.context() as context:
            async with self.journal(context, make_backend) as journal:
                await journal.append_journal(b"ended")
            async with self.journal(context, make_backend) as journal:
                await journal.append_journal(b"mine")
                await journal.read_journals()
                await journal.append_journal(b"since")
                await journal.replace_journals(b"compact")
                await journal.append_journal(b"after")
                assert b"".join(await journal.read_journals()) == b"compactsinceafter"
            async with self.journal(context, make_backend) as journal:
                assert b"".join(await journal.read_journals()) == b"compactsinceafter"

    async def test_replace_of_nothing_read_loses_nothing(self, make_backend: MakeBackend) -> None:
        async with self.context() as context:
            async with self.journal(context, make_backend) as journal:
                await journal.append_journal(b"ended")
            async with self.journal(context, make_backend) as journal:
                await journal.append_journal(b"mine")
                await journal.replace_journals(b"compact")
                logs = b"".join(await journal.read_journals())
                assert logs in {b"endedcompactmine", b"compactmineended"}

    async def test_journal_is_no_entry(self, make_backend: MakeBackend) -> None:
        async with self.context() as context, self.opened_in(context, make_backend) as subject:
            journal = subject.backend
            assert isinstance(journal, JournalBackend)
            await journal.append_journal(b"record")
            await subject.put("entry", b"x")
            assert [stat.name for stat in await subject.listing()] == ["entry"]

    async def test_use_after_close_is_refused(self, make_backend: MakeBackend) -> None:
        async with self.context() as context:
            async with self.journal(context, make_backend) as journal:
                await journal.append_journal(b"record")
            for call in (journal.append_journal(b"x"), journal.read_journals(), journal.replace_journals(b"x")):
                with pytest.raises((ClosedError, BackendError)):
                    await call

    async def test_others_are_followed(self, make_backend: MakeBackend) -> None:
        async with self.context() as context, self.journal(context, make_backend) as listener:
            if not isinstance(listener, JournalFollower):
                pytest.skip("not a `JournalFollower`")
            async with self.journal(context, make_backend) as speaker:
                await speaker.append_journal(b"before")
                assert await listener.follow_journals() == {}, "the first call only begins"
                await listener.append_journal(b"my own")
                await speaker.append_journal(b"one")
                await speaker.append_journal(b"two")
                assert list((await listener.follow_journals()).values()) == [b"onetwo"]
                assert await listener.follow_journals() == {}
                await speaker.append_journal(b"last words")
            assert list((await listener.follow_journals()).values()) == [b"last words"]
            async with self.journal(context, make_backend) as speaker:
                await speaker.append_journal(b"begun later")
                assert list((await listener.follow_journals()).values()) == [b"begun later"]

    @pytest.mark.parametrize("size", [1, 1_000])
    async def test_replaced_log_is_heard_from_its_front(self, make_backend: MakeBackend, size: int) -> None:
        async with self.context() as context, self.journal(context, make_backend) as listener:
            if not isinstance(listener, JournalFollower):
                pytest.skip("not a `JournalFollower`")
            async with self.journal(context, make_backend) as speaker:
                await speaker.append_journal(b"x" * 100)
                await listener.follow_journals()
                for turn in range(3):
                    compact = bytes([turn]) * size
                    await speaker.read_journals()
                    await speaker.replace_journals(compact)
                    await speaker.append_journal(b"since")
                    assert list((await listener.follow_journals()).values()) == [compact + b"since"]
                    await speaker.append_journal(b"more")
                    assert list((await listener.follow_journals()).values()) == [b"more"]


def filled(arena: Arena, value: bytes) -> Slot:
    """Return a slot that holds `value`, with one reference."""
    slot = arena.try_allocate(len(value), entry=True)
    assert slot is not None
    slot.view(0, len(value))[:] = value
    return slot
