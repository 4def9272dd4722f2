"""Broken twins of `MemoryBackend`: each breaks one promise; `caught_by` names the kit's tests that must fail on it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, ClassVar

from kvtier.backends.base import Read, Stat, Write, Written
from kvtier.backends.views import host_view, total_bytes, writable_views
from kvtier.errors import BackendUnavailableError, InvalidValueError
from kvtier.testing.memory import MemoryBackend, Stored, joined

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvtier.errors import BackendError
    from kvtier.testing.memory import Medium

_PIECES = 8


class BrokenTwin(MemoryBackend):
    """Base of the twins."""

    caught_by: ClassVar[tuple[str, ...]] = ()


class WritesInPlace(BrokenTwin):
    """A value grows piece by piece where readers can see it."""

    caught_by: ClassVar[tuple[str, ...]] = (
        "test_reader_beside_a_writer_sees_whole_values",
        "test_reader_and_writer_in_two_instances",
        "test_cancelled_put_leaves_old_or_new",
        "test_cancelled_first_put_leaves_nothing_or_all",
    )

    async def _do_write(self, write: Write) -> Written | BackendError:
        value = joined(write)
        old = self.medium.get(write.name, Stored(b"", None, 0.0)).value.ljust(len(value), b"\0")[: len(value)]
        for piece in range(1, _PIECES + 1):
            stop = len(value) * piece // _PIECES
            self._keep(write.name, value[:stop] + old[stop:], write.expires)
            await asyncio.sleep(0)
        return Written(len(value))


class DeletesBeforeItReplaces(BrokenTwin):
    """Between the old and the new value there is none."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_reader_beside_a_writer_sees_whole_values",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        if not write.if_absent:
            self.medium.pop(write.name, None)
        await asyncio.sleep(0)
        return await super()._do_write(write)


class AppendsPieces(BrokenTwin):
    """Two writers of one name append to the same place."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_parallel_puts_of_one_name",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        value = joined(write)
        self._keep(write.name, b"", write.expires)
        for start in range(0, len(value), 64 << 10):
            await asyncio.sleep(0)
            self._keep(write.name, self.medium[write.name].value + value[start : start + (64 << 10)], write.expires)
        return Written(len(value))


class WritesTwice(BrokenTwin):
    """Makes sure by writing again when the answer is out, which undoes a delete in between."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_everything_at_once",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        answer = await super()._do_write(write)
        again = self.medium[write.name]
        asyncio.get_running_loop().call_later(0.005, self.medium.__setitem__, write.name, again)
        return answer


class ReadsTheSourceLate(BrokenTwin):
    """Keeps the buffers of a write and copies them when somebody asks."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_sources_may_change_after_the_call",)

    def __init__(self, medium: Medium | None = None) -> None:
        super().__init__(medium)
        self._late: dict[str, Write] = {}

    async def _do_write(self, write: Write) -> Written | BackendError:
        self._late[write.name] = write
        return Written(total_bytes(host_view(part) for part in write.parts))

    async def _do_read(self, read: Read) -> int | BackendError | None:
        if read.name in self._late:
            await super()._do_write(self._late[read.name])
        return await super()._do_read(read)


class FillsBuffersLate(BrokenTwin):
    """A thread writes the end of the value into the buffers after the answer."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_buffers_are_let_go_when_a_read_ends",)

    async def _do_read(self, read: Read) -> int | BackendError | None:
        answer = await super()._do_read(read)
        if isinstance(answer, int) and answer:
            into = writable_views(read.into)
            late = threading.Timer(0.01, lambda: into[0].__setitem__(0, 1) if into[0].nbytes else None)
            late.daemon = True
            late.start()
        return answer


class FillsBuffersAfterCancel(BrokenTwin):
    """The copy runs on in the loop when the read is cancelled."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_buffers_are_let_go_when_a_read_is_cancelled",)

    async def _do_read(self, read: Read) -> int | BackendError | None:
        copy = asyncio.ensure_future(self._copy(read))
        return await asyncio.shield(copy)

    async def _copy(self, read: Read) -> int | BackendError | None:
        for _ in range(3):
            await asyncio.sleep(0)
        return await super()._do_read(read)


class WritesBeyondTheBuffers(BrokenTwin):
    """Zeroes the byte behind each buffer that it fills."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_value_comes_back", "test_parts_of_odd_sizes")

    async def _do_read(self, read: Read) -> int | BackendError | None:
        answer = await super()._do_read(read)
        for view in writable_views(read.into):
            whole = memoryview(view.obj).cast("B")
            if answer and whole.nbytes > view.nbytes:
                whole[whole.nbytes - 1] = 0
        return answer


class ReversesAnswers(BrokenTwin):
    """Answers come in the order in which they were ready."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_batch_answers_are_in_order_with_holes",)

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        return list(await super().read_many(reads[::-1]))


class LeavesOutMisses(BrokenTwin):
    """Answers only what it found."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_batch_answers_are_in_order_with_holes", "test_misses_are_values")

    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        return [answer for answer in await super().read_many(reads) if answer is not None]


class LosesLargeBatches(BrokenTwin):
    """Stores the first 256 entries of a batch and answers for all."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_large_batch",)

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        answers = await super().write_many(writes[:256])
        return [*answers, *(Written(len(joined(write))) for write in writes[256:])]


class FailsOnEmptyBatches(BrokenTwin):
    """Hands an empty list to a medium that refuses it."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_empty_batches",)

    async def delete_many(self, names: Sequence[str]) -> Sequence[bool | BackendError]:
        if not names:
            raise BackendUnavailableError("wrong number of arguments")
        return await super().delete_many(names)


class StoresAHeader(BrokenTwin):
    """What lies on the medium is not the value alone."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_raw_bytes_are_the_value",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        return self._keep(write.name, b"#" + joined(write), write.expires)


class RefusesTensors(BrokenTwin):
    """Knows memoryviews only."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_tensors_are_buffers",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        if not all(isinstance(part, memoryview) for part in write.parts):
            return BackendUnavailableError("not a memoryview")
        return await super()._do_write(write)


class LetsTheSystemRefuse(BrokenTwin):
    """Finds out that a buffer is read-only when it writes to it."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_read_only_target_is_refused",)

    async def _do_read(self, read: Read) -> int | BackendError | None:
        try:
            return await super()._do_read(read)
        except InvalidValueError as exc:
            return BackendUnavailableError(str(exc))


class LosesOverwrites(BrokenTwin):
    """Says stored, and keeps the old value."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_overwrite_replaces",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        if write.name in self.medium:
            return Written(len(joined(write)))
        return await super()._do_write(write)


class KeepsTheOldTail(BrokenTwin):
    """Overwrites without truncating."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_overwrite_replaces",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        value, old = joined(write), self.medium.get(write.name)
        return self._keep(write.name, value + (old.value[len(value) :] if old else b""), write.expires)


class MixesUpNames(BrokenTwin):
    """Takes "-" and "." for the same."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_names_are_kept_apart",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        return self._keep(write.name.replace("-", "."), joined(write), write.expires)

    async def _do_read(self, read: Read) -> int | BackendError | None:
        return await super()._do_read(Read(read.name.replace("-", "."), read.into, read.offset, read.partial))


class CutsNames(BrokenTwin):
    """Remembers the first 100 characters of a name."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_names_are_kept_apart",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        return await super()._do_write(Write(write.name[:100], write.parts, write.expires, write.if_absent))

    async def _do_read(self, read: Read) -> int | BackendError | None:
        return await super()._do_read(Read(read.name[:100], read.into, read.offset, read.partial))


class DeleteLies(BrokenTwin):
    """Says that it deleted."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_delete_removes_and_says_so_once",)

    def _do_delete(self, name: str) -> bool:
        return name in self.medium


class DeleteIsNotIdempotent(BrokenTwin):
    """Says True for what is not there."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_misses_are_values", "test_delete_removes_and_says_so_once")

    def _do_delete(self, name: str) -> bool:
        super()._do_delete(name)
        return True


class ScanOfNothingFails(BrokenTwin):
    """Has no first page."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_scan_of_nothing",)

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        empty = True
        async for page in super().scan(after):
            empty = False
            yield page
        if empty:
            raise BackendUnavailableError("no such list")


class ScanRepeats(BrokenTwin):
    """Lists the first page twice."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_scan_lists_each_entry_once",)

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        first = True
        async for page in super().scan(after):
            yield page
            if first:
                yield page
            first = False


class ScanStopsEarly(BrokenTwin):
    """Lists one page."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_scan_lists_each_entry_once", "test_scan_beside_writes")

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        async for page in super().scan(after):
            yield page
            return


class ScanNeverResumes(BrokenTwin):
    """Begins at the beginning, whatever `after` says."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_scan_resumes_behind_a_name",)

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        del after
        async for page in super().scan():
            yield page


class ScanResumesByPlace(BrokenTwin):
    """Needs the name given as `after` to be there still."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_scan_resumes_behind_a_name",)

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        seen = after is None
        async for page in super().scan():
            rest = []
            for stat in page:
                if seen:
                    rest.append(stat)
                seen = seen or stat.name == after
            if rest:
                yield rest


class ShowsBytesThatChange(BrokenTwin):
    """Reads again after a hiccup, and does not say that it begins anew."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_what_a_watched_read_shows_stays",)

    async def _do_read(self, read: Read) -> int | BackendError | None:
        if read.watch is not None:
            first = writable_views(read.into)[0]
            first[: len(first) // 2] = bytes(len(first) // 2)
            read.watch(len(first) // 2)
        return await super()._do_read(read)
