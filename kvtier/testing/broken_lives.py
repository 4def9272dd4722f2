"""More broken twins of `MemoryBackend`: parts and offsets, conditions and expiry, opening and closing."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, ClassVar

import msgspec

from kvtier.backends.base import Read, Stat, TooLongError, Traits, Write, Written
from kvtier.backends.views import host_view
from kvtier.errors import BackendUnavailableError
from kvtier.testing.broken_backends import BrokenTwin
from kvtier.testing.memory import DOWN, PAGE_ENTRIES, Stored, joined

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvtier.backends.base import BackendContext
    from kvtier.errors import BackendError
    from kvtier.testing.memory import Medium


class StoresTheFirstPart(BrokenTwin):
    """Forgets that an entry may come in parts."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_parts_of_odd_sizes", "test_read_only_and_unaligned_sources")

    async def _do_write(self, write: Write) -> Written | BackendError:
        return await super()._do_write(Write(write.name, write.parts[:1], write.expires, write.if_absent))


class StoresAThousandParts(BrokenTwin):
    """Hands all parts to one system call, which takes 1,024."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_very_many_parts",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        return await super()._do_write(Write(write.name, write.parts[:1024], write.expires, write.if_absent))


class NeedsWritableSources(BrokenTwin):
    """Takes the address of every part."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_read_only_and_unaligned_sources",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        if any(host_view(part).readonly for part in write.parts):
            return BackendUnavailableError("a part is read-only")
        return await super()._do_write(write)


class IgnoresOffset(BrokenTwin):
    """Reads from the start."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_offset", "test_partial")

    async def _do_read(self, read: Read) -> int | BackendError | None:
        return await super()._do_read(Read(read.name, read.into, 0, read.partial))


class IgnoresPartial(BrokenTwin):
    """Finds a part of an entry too little."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_partial",)

    async def _do_read(self, read: Read) -> int | BackendError | None:
        return await super()._do_read(Read(read.name, read.into, read.offset))


class TruncatesSilently(BrokenTwin):
    """Fills what there is room for, and says nothing."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_too_long_says_the_size", "test_failed_item_does_not_fail_its_batch")

    async def _do_read(self, read: Read) -> int | BackendError | None:
        return await super()._do_read(Read(read.name, read.into, read.offset, partial=True))


class FailsTheWholeBatch(BrokenTwin):
    """Raises what should be one item's answer."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_failed_item_does_not_fail_its_batch",)

    async def _do_read(self, read: Read) -> int | BackendError | None:
        answer = await super()._do_read(read)
        if isinstance(answer, TooLongError):
            raise answer
        return answer


class EmptyIsAMiss(BrokenTwin):
    """Cannot tell an empty value from none."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_value_comes_back", "test_no_parts_at_all")

    async def _do_read(self, read: Read) -> int | BackendError | None:
        return await super()._do_read(read) or None


class MissIsAnError(BrokenTwin):
    """Raises what the medium raised."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_misses_are_values",)

    async def _do_read(self, read: Read) -> int | BackendError | None:
        if read.name not in self.medium:
            raise FileNotFoundError(read.name)
        return await super()._do_read(read)


class StatLies(BrokenTwin):
    """Reports whole blocks."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_value_comes_back", "test_scan_lists_each_entry_once")

    def _do_stat(self, name: str) -> Stat | None:
        stat = super()._do_stat(name)
        return None if stat is None else msgspec.structs.replace(stat, size=(stat.size + 511) // 512 * 512)


class IfAbsentReplaces(BrokenTwin):
    """Ignores the condition."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_if_absent_leaves_what_is_there",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        return self._keep(write.name, joined(write), write.expires)


class IfAbsentLooksThenLeaps(BrokenTwin):
    """Lets others in between the look and the write."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_one_of_parallel_puts_if_absent_wins",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        if write.if_absent and write.name in self.medium:
            return Written(len(self.medium[write.name].value), stored=False)
        await asyncio.sleep(0)
        return self._keep(write.name, joined(write), write.expires)


class ForgetsExpiry(BrokenTwin):
    """Stores the value alone."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_expiry_is_kept_and_changed", "test_reopen_finds_everything")

    async def _do_write(self, write: Write) -> Written | BackendError:
        return await super()._do_write(Write(write.name, write.parts, None, write.if_absent))


class KeepsTheOldExpiry(BrokenTwin):
    """A new value without expiry inherits that of the old one."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_expiry_is_kept_and_changed",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        old = self.medium.get(write.name, Stored(b"", None, 0.0)).expires
        return await super()._do_write(Write(write.name, write.parts, write.expires or old, write.if_absent))


class ListsUnfinishedEntries(BrokenTwin):
    """Writes under a name of its own first, and lists that too."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_cancelled_put_leaves_old_or_new",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        self._keep("unfinished", b"", None)
        await asyncio.sleep(0)
        answer = await super()._do_write(write)
        del self.medium["unfinished"]
        return answer


class ListsByAge(BrokenTwin):
    """Pages count from the oldest, and an overwritten entry becomes the youngest."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_scan_beside_writes",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        value = joined(write)
        self.medium.pop(write.name, None)
        return self._keep(write.name, value, write.expires)

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        start = 0
        while page := list(self.medium)[start : start + PAGE_ENTRIES]:
            stats = [self._do_stat(name) for name in page]
            await asyncio.sleep(0)
            yield [stat for stat in stats if stat is not None and (after is None or stat.name > after)]
            start += PAGE_ENTRIES


class LosesAllOnReopen(BrokenTwin):
    """Calls itself persistent and keeps everything in the process."""

    traits: Traits = Traits(persistent=True, ranges=True)
    caught_by: ClassVar[tuple[str, ...]] = ("test_reopen_finds_everything",)

    def __init__(self, medium: Medium | None = None) -> None:
        del medium
        super().__init__()


class CachesForItself(BrokenTwin):
    """Serves what it has read before, whatever another instance did meanwhile."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_two_instances_share_entries",)

    def __init__(self, medium: Medium | None = None) -> None:
        super().__init__(medium)
        self._mine: Medium = {}

    async def _do_read(self, read: Read) -> int | BackendError | None:
        shared = self.medium
        self._mine.update({read.name: shared[read.name]} if read.name in shared and read.name not in self._mine else {})
        self.medium = self._mine
        try:
            return await super()._do_read(read)
        finally:
            self.medium: Medium = shared

    def _keep(self, name: str, value: bytes, expires: float | None) -> Written:
        self._mine.pop(name, None)
        return super()._keep(name, value, expires)

    def _do_delete(self, name: str) -> bool:
        self._mine.pop(name, None)
        return super()._do_delete(name)


class ServesAfterClose(BrokenTwin):
    """Does not notice that it was closed."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_use_after_close_is_refused",)

    async def aclose(self) -> None:
        return


class CannotCloseTwice(BrokenTwin):
    """Takes a second close for a mistake."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_close_twice_and_unopened",)

    async def aclose(self) -> None:
        if self._context is None:
            raise BackendUnavailableError("not open")
        await super().aclose()


class LeavesADescriptor(BrokenTwin):
    """Opens something per open, and never closes it."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_nothing_is_left_open",)

    async def open(self, context: BackendContext) -> None:
        await super().open(context)
        os.open("/dev/null", os.O_RDONLY)


class LeavesATask(BrokenTwin):
    """Starts a task of its own, and forgets it."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_nothing_is_left_open",)

    async def open(self, context: BackendContext) -> None:
        await super().open(context)
        self._janitor = asyncio.get_running_loop().create_task(asyncio.sleep(60))


class CloseEmptiesTheMedium(BrokenTwin):
    """Cleans up what is not its own."""

    caught_by: ClassVar[tuple[str, ...]] = (
        "test_closing_one_instance_leaves_the_other",
        "test_reopen_finds_everything",
    )

    async def aclose(self) -> None:
        self.medium.clear()
        await super().aclose()


class ClosesOnlyWhatItOpened(BrokenTwin):
    """Its close relies on an open that went well."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_close_after_failed_open", "test_close_twice_and_unopened")

    async def open(self, context: BackendContext) -> None:
        await super().open(context)
        self._session = "open"

    async def aclose(self) -> None:
        if not self._session:
            raise BackendUnavailableError("unreachable")
        await super().aclose()


class RaisesWhatTheMediumRaised(BrokenTwin):
    """Has no table of errors."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_faults_are_backend_errors",)

    async def _turn(self) -> BackendContext:
        if DOWN in self.medium:
            raise ConnectionResetError("connection reset by peer")
        return await super()._turn()


class SaysStoredWhenDown(BrokenTwin):
    """Answers before it knows."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_faults_are_backend_errors",)

    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        if DOWN in self.medium:
            return [Written(len(joined(write))) for write in writes]
        return await super().write_many(writes)


class ExpiryIsNotNative(BrokenTwin):
    """Says that entries expire by themselves."""

    traits: Traits = Traits(native_expiry=True)
    caught_by: ClassVar[tuple[str, ...]] = ("test_native_expiry",)


class TakesTooLargeValues(BrokenTwin):
    """Says that values are limited, and does not look."""

    traits: Traits = Traits(max_value_bytes=1 << 20)
    caught_by: ClassVar[tuple[str, ...]] = ("test_too_large_value_is_refused",)

    async def _do_write(self, write: Write) -> Written | BackendError:
        return self._keep(write.name, joined(write), write.expires)
