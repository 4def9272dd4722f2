"""What every face of a store has: its life, its flush and its figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import InvalidValueError
from kvtier.store import report
from kvtier.store.hints import end_session

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType
    from typing import Self

    from kvtier.store.engine import Engine
    from kvtier.store.results import FlushResult, Pressure, Stats


class Face:
    """A store's life: enter it with `async with`, or `await` it and call `aclose` in the end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def deadline_seconds(self) -> float:
        """How long a call may take that names no deadline of its own."""
        return self._engine.settings.deadline_seconds

    @property
    def close_seconds(self) -> float:
        """How long closing may take."""
        return self._engine.settings.close_seconds

    @property
    def strict(self) -> bool:
        """Whether faults of a tier are raised instead of being misses."""
        return self._engine.settings.strict

    async def __aenter__(self) -> Self:
        await self._engine.open()
        return self

    def __await__(self) -> Generator[object, None, Self]:
        """Open the store without a scope: `store = await kvtier.open(...)`."""
        return self.__aenter__().__await__()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Refuse calls, let reads end, flush within `close_seconds`, drop and count the rest, close all tiers."""
        await self._engine.aclose()

    async def flush(self, *, deadline_seconds: float | None = None) -> FlushResult:
        """Bring every value to a persistent tier and wait for all writes under way.

        What the result counts as stored survives the death of the process (and power loss where the tier syncs).
        """
        deadline = self._engine.begin(deadline_seconds)
        return await self._engine.upkeep.flush(deadline)

    async def end_session(self, session: str) -> int:
        """Let the chunks that only this session used (`Hint.session`) go before all others; they stay until then.

        Whoever uses one of them again takes that back. What is not on a write-back tier yet is not written there.

        Returns:
            How many chunks that are.
        """
        self._engine.guard()
        if not isinstance(session, str):
            raise InvalidValueError(f"session is a {type(session).__name__}; give the str that hints name")
        return end_session(self._engine, session)

    def stats(self) -> Stats:
        """Return all figures at this moment."""
        self._engine.guard()
        return report.stats(self._engine)

    def pressure(self) -> Pressure:
        """Return how full memory, queues and tiers are."""
        self._engine.guard()
        return report.pressure(self._engine)
