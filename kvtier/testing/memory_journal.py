"""The memory backend with a journal: the control of the journal tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.testing.memory import MemoryBackend, Stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.backends.base import BackendContext
    from kvtier.testing.memory import Medium

_COUNT = "!count"  # an entry whose size tells how many logs there ever were


class MemoryJournalBackend(MemoryBackend):
    """A `JournalBackend` and `JournalFollower`; its logs lie in the medium, under names that no entry can have."""

    def __init__(self, medium: Medium | None = None) -> None:
        super().__init__(medium)
        self._log = ""
        self._read: dict[str, int] = {}
        self._followed: dict[str, int] | None = None

    async def open(self, context: BackendContext) -> None:
        """Begin a log."""
        await super().open(context)
        self._begin(b"")

    async def append_journal(self, records: bytes) -> None:
        """As the contract says."""
        await self._turn()
        self._set_log(self.medium[self._log].value + records, living=True)

    async def read_journals(self) -> Sequence[bytes]:
        """As the contract says."""
        await self._turn()
        logs = {name: self.medium[name].value for name in self._logs() if self._is_readable(name)}
        self._read = {name: len(log) for name, log in logs.items()}
        return list(logs.values())

    async def replace_journals(self, records: bytes) -> None:
        """As the contract says."""
        await self._turn()
        old = self._log
        self._begin(records + self.medium[old].value[self._read.get(old, 0) :])
        for name in {*self._read, old}:
            del self.medium[name]
        self._read = {}

    async def follow_journals(self) -> Mapping[str, bytes]:
        """As the contract says."""
        await self._turn()
        logs = {name: self.medium[name].value for name in self._logs() if name != self._log}
        before, self._followed = self._followed, {name: len(log) for name, log in logs.items()}
        if before is None:
            return {}
        return {name: more for name, log in logs.items() if (more := log[before.get(name, 0) :])}

    async def aclose(self) -> None:
        """End the log, which stays."""
        if self._context is not None and self._log:
            self._set_log(self.medium[self._log].value, living=False)
        await super().aclose()

    def _begin(self, records: bytes) -> None:
        count = self.medium.get(_COUNT, Stored(b"", None, 0.0)).value + b"|"
        self.medium[_COUNT] = Stored(count, None, 0.0)
        self._log = f"!log-{len(count):04}"
        self._set_log(records, living=True)

    def _set_log(self, records: bytes, *, living: bool) -> None:
        self.medium[self._log] = Stored(records, None, 1.0 if living else 0.0)

    def _logs(self) -> list[str]:
        return sorted(name for name in self.medium if name.startswith("!log"))

    def _is_readable(self, name: str) -> bool:
        return name == self._log or self.medium[name].changed == 0.0
