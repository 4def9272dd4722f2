"""Broken twins with slots or a journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvtier.backends.base import Stat
from kvtier.backends.pinned_cpu import PinnedCpuBackend
from kvtier.testing.memory_journal import MemoryJournalBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from kvtier.buffers.arena import Slot


class BrokenSlots(PinnedCpuBackend):
    """Base of the twins with slots."""

    caught_by: ClassVar[tuple[str, ...]] = ()


class AdoptsWithAReferenceOfItsOwn(BrokenSlots):
    """Adds a reference where it should take one over."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_adopted_slot_is_lent", "test_drop_gives_memory_back")

    def adopt(self, name: str, slot: Slot) -> None:
        super().adopt(name, slot.retain())


class LendsWithoutAReference(BrokenSlots):
    """Lends what may go away under the borrower."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_adopted_slot_is_lent", "test_lent_slot_outlives_its_entry")

    def lend(self, name: str) -> Slot | None:
        slot = super().lend(name)
        if slot is not None:
            slot.release()
        return slot


class KeepsReplacedSlots(BrokenSlots):
    """Forgets the older slot without giving it up."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_replacing_drops_the_older_slot",)

    def adopt(self, name: str, slot: Slot) -> None:
        older = self.lend(name)
        super().adopt(name, slot)
        del older  # its reference is lost


class DropLies(BrokenSlots):
    """Always says that it was there."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_drop_gives_memory_back",)

    def drop(self, name: str) -> bool:
        super().drop(name)
        return True


class BrokenJournal(MemoryJournalBackend):
    """Base of the twins with a journal."""

    caught_by: ClassVar[tuple[str, ...]] = ()


class ReadsLivingLogs(BrokenJournal):
    """Takes every log for an ended process's, and compacts it away."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_logs_of_the_living_are_their_own",)

    def _is_readable(self, name: str) -> bool:
        del name
        return True


class ForgetsTheDead(BrokenJournal):
    """Reads its own log only."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_log_outlives_the_process",)

    def _is_readable(self, name: str) -> bool:
        return name == self._log


class ReplaceLosesLaterAppends(BrokenJournal):
    """Replaces the whole log, not what was read of it."""

    caught_by: ClassVar[tuple[str, ...]] = (
        "test_replace_takes_the_place_of_what_was_read",
        "test_replace_of_nothing_read_loses_nothing",
    )

    async def replace_journals(self, records: bytes) -> None:
        await super().replace_journals(records)
        self._set_log(records, living=True)


class ReplaceKeepsTheOldLogs(BrokenJournal):
    """Adds a compacted log to those it was made of."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_replace_takes_the_place_of_what_was_read",)

    async def replace_journals(self, records: bytes) -> None:
        self._read = {}
        await super().replace_journals(records)


class HearsItself(BrokenJournal):
    """Follows every log, its own among them."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_others_are_followed",)

    async def follow_journals(self) -> Mapping[str, bytes]:
        mine, self._log = self._log, ""
        try:
            return await super().follow_journals()
        finally:
            self._log = mine


class HearsEverythingAgain(BrokenJournal):
    """Does not remember how far it was."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_others_are_followed", "test_replaced_log_is_heard_from_its_front")

    async def follow_journals(self) -> Mapping[str, bytes]:
        begun = self._followed is not None
        self._followed = {}
        heard = await super().follow_journals()
        return heard if begun else {}


class ReplacesInPlace(BrokenJournal):
    """A compacted log keeps its name: who follows it goes on in the middle."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_replaced_log_is_heard_from_its_front",)

    async def replace_journals(self, records: bytes) -> None:
        name = self._log
        await super().replace_journals(records)
        self.medium[name] = self.medium.pop(self._log)
        self._log = name


class ListsItsJournal(BrokenJournal):
    """Takes its log for an entry."""

    caught_by: ClassVar[tuple[str, ...]] = ("test_journal_is_no_entry",)

    async def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        async for page in super().scan(after):
            yield [*page, Stat(self._log, 0)]
