"""What happened, as plain values: events for observers, and log lines that repeat at most once a minute per kind.

Every record has the attribute `kvtier`, a mapping of `event`, `tier`, `key`, `reason` and `suppressed` (how many of the
kind were not logged since the last one), for handlers that write structured logs. No record holds tokens or a secret.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.concurrency.clock import Clock

    class Entry(Protocol):
        """An entry in a tier's books, as far as this module looks at it; `size` in bytes."""

        key: str
        parent: str | None
        size: int


LOG_EVERY_SECONDS = 60.0

# Kinds that mean a fault: the first of a kind per tier is logged at WARNING, later ones at most once a minute.
FAULTS = frozenset(
    {"corrupt", "error", "timeout", "dropped", "degraded", "abandoned", "lease_overdue", "partial_delete"}
)

NOTES = frozenset({"recovered", "buffered"})  # logged at INFO, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened to one tier (or to the store, `tier=None`).

    `key` is a digest or a caller's key, never tokens. `size` is in bytes. `reason` is a short fixed word or an error
    text with secrets masked.
    """

    kind: str
    tier: str | None = None
    key: str | None = None
    count: int = 1
    size: int = 0
    reason: str = ""
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSeen:
    """One `get`: the keys of its whole chunks, in order, and what its hint said."""

    keys: Sequence[str]
    num_tokens: int
    chunk_tokens: int
    session: str | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A chunk or blob that came into a tier, was found there, or left it.

    `parent` is the key of the chunk before it; None for a first chunk, a blob, and where that is not known. `size` is
    in bytes as stored. One that is written over by a new value of its key neither comes nor leaves.
    """

    tier: str
    key: str
    parent: str | None
    size: int
    came: bool


@runtime_checkable
class ChangeObserver(Protocol):
    """What an observer may be, too: told of every change in what the tiers hold."""

    def on_change(self, change: Change) -> None:
        """Take note of `change`, on the store's event loop; must be quick and must not raise."""


class Observer(Protocol):
    """Receives every event, on the store's event loop or in one of its threads; must be quick and must not raise.

    One that has a method `on_request(request: RequestSeen)` is told of every `get`, too.
    """

    def on_event(self, event: Event) -> None:
        """Take note of `event`."""


class Events:
    """Hands events to the observer and logs faults; an observer that raises is logged and never breaks the store."""

    def __init__(self, observer: Observer | None, clock: Clock) -> None:
        self._observer = observer
        self._on_request: Callable[[RequestSeen], None] | None = getattr(observer, "on_request", None)
        self._clock = clock
        self._log = logging.getLogger("kvtier")
        self._logged: dict[tuple[str, str | None], float] = {}
        self._errors: WeakSet[BaseException] = WeakSet()  # that the observer was told of, and keeps
        self._suppressed: dict[tuple[str, str | None], int] = {}

    def emit(
        self,
        kind: str,
        *,
        tier: str | None = None,
        key: str | None = None,
        count: int = 1,
        size: int = 0,
        reason: str = "",
        error: BaseException | None = None,
    ) -> None:
        """Report one event, `size` in bytes; safe from any thread."""
        if kind in FAULTS or kind in NOTES:
            level = logging.WARNING if kind in FAULTS else logging.INFO
            self._tell(level, kind, tier, key, reason or (str(error) if error else ""))
        if self._observer is None:
            return
        if error is not None:
            with suppress(TypeError):  # not every built-in error can be referred to weakly
                self._errors.add(error)
        event = Event(kind=kind, tier=tier, key=key, count=count, size=size, reason=reason, error=error)
        try:
            self._observer.on_event(event)
        except Exception as exc:  # noqa: BLE001  # a foreign observer must not break storage
            self._tell(logging.WARNING, "observer", tier, None, f"observer raised {exc!r}")

    def drop_tracebacks(self) -> None:
        """Take from the errors that the observer keeps where they were raised: frames there hold the store's memory."""
        left: list[BaseException | None] = list(self._errors)
        seen: set[int] = set()
        while left:
            error = left.pop()
            if error is not None and id(error) not in seen:
                seen.add(id(error))
                error.__traceback__ = None
                left += [error.__cause__, error.__context__]

    @property
    def hears_requests(self) -> bool:
        """Whether anybody wants to be told of each request."""
        return self._on_request is not None

    def request(self, request: RequestSeen) -> None:
        """Tell of a request."""
        if self._on_request is None:
            return
        try:
            self._on_request(request)
        except Exception as exc:  # noqa: BLE001  # a foreign observer must not break storage
            self._tell(logging.WARNING, "observer", None, None, f"observer raised {exc!r}")

    def changes_of(self, tier: str) -> Callable[[Entry, bool], None] | None:
        """Return what a tier's books call for each entry that comes (True) or goes; None if nobody wants to know."""
        observer: object = self._observer
        if not isinstance(observer, ChangeObserver):
            return None

        def tell(entry: Entry, came: bool) -> None:  # noqa: FBT001  # the shape of StoredTier.on_change
            change = Change(tier=tier, key=entry.key, parent=entry.parent, size=entry.size, came=came)
            try:
                observer.on_change(change)
            except Exception as exc:  # noqa: BLE001  # a foreign observer must not break storage
                self._tell(logging.WARNING, "observer", tier, None, f"observer raised {exc!r}")

        return tell

    def _tell(self, level: int, kind: str, tier: str | None, key: str | None, reason: str) -> None:
        now = self._clock.monotonic()
        mark = (kind, tier)
        last = self._logged.get(mark)
        if last is not None and now - last < LOG_EVERY_SECONDS:
            self._suppressed[mark] = self._suppressed.get(mark, 0) + 1
            return
        more = self._suppressed.pop(mark, 0)
        self._logged[mark] = now
        facts = {"event": kind, "tier": tier, "key": key, "reason": reason, "suppressed": more}
        text = "%s tier=%s key=%s %s (%d more since the last line)"
        self._log.log(level, text, kind, tier, key, reason, more, extra={"kvtier": facts})
