"""What a storage medium must do for a tier: move named bytes, in batches, and own every I/O it makes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import msgspec

from kvtier.errors import BackendError, InvalidKeyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    import torch

    from kvtier.buffers.arena import Arena, Slot
    from kvtier.concurrency.clock import Clock
    from kvtier.concurrency.workers import Workers
    from kvtier.events import Events

    Buffer: TypeAlias = memoryview | torch.Tensor  # one-dimensional contiguous bytes; `views.host_view` flattens both

_NAME = re.compile(r"[0-9a-z][0-9a-z.-]{0,119}")


def is_name(name: str) -> bool:
    """Tell whether `name` can name an entry: 1-120 of `[0-9a-z.-]`, a letter or digit first."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return `name`.

    Raises:
        InvalidKeyError: it cannot name an entry.
    """
    if not is_name(name):
        raise InvalidKeyError(f"{name!r} cannot name an entry: 1-120 of [0-9a-z.-], a letter or digit first")
    return name


class TooLongError(BackendError):
    """The stored entry is longer than the buffers given; nothing was promised about their content.

    Attributes:
        size: the entry's stored size in bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"stored entry has {size} bytes, more than the buffers given")
        self.size = size


@dataclass(frozen=True, slots=True)
class Read:
    """One entry to read: fill `into` one after the other with the entry's bytes from `offset` on.

    The buffers take everything from `offset` to the entry's end, else the answer is `TooLongError`. With `partial`
    they may be shorter: they are filled, and the rest of the entry is left where it is. An `offset` at or behind the
    entry's end fills nothing and answers 0.

    A backend may call `watch` as the bytes come, in the thread that reads them, with how many are there: then they are
    still in that core's cache. 0 says that the read begins again. An answer of False says that the bytes are wrong:
    the backend may look whether it read what it should, and if it did, answers with the bytes as they are. `watch`
    does not raise; whoever gave it counts on nothing.
    """

    name: str
    into: Sequence[Buffer]
    offset: int = 0
    partial: bool = False
    watch: Callable[[int], bool] | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """One entry to publish whole or not at all: the concatenation of `parts`.

    `expires` is wall-clock seconds since the epoch. With `if_absent` an entry that exists is left alone and the
    answer is `Written(stored=False)`.
    """

    name: str
    parts: Sequence[Buffer]
    expires: float | None = None
    if_absent: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """Answer to one `Write`: the bytes the entry occupies, and whether it was stored (False: present already)."""

    size: int
    stored: bool = True


class Stat(msgspec.Struct, frozen=True, gc=False):
    """What the medium knows of an entry: stored bytes, expiry and last change (both wall-clock seconds).

    A listing makes one per entry, so the garbage collector is spared them: see `kvtier.tier.index.Entry`.
    """

    name: str
    size: int
    expires: float | None = None
    changed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a medium can do; the tier works around what it cannot."""

    accepts: frozenset[str] = frozenset({"host"})  # kinds of memory that buffers may lie in: "host", "cuda"
    persistent: bool = False  # entries (and their expiry) outlive the process
    shared: bool = False  # other processes may add and remove entries
    scan_at_open: bool = False  # listing is cheap: the tier indexes every entry at open and keeps the capacity
    native_expiry: bool = False  # the medium drops expired entries by itself
    ranges: bool = False  # `Read.offset` and `Read.partial` are cheap: a part can be read without the whole
    alignment: int = 1  # buffers and lengths aligned to this many bytes move without a bounce
    max_value_bytes: int | None = None  # larger values are answered with `CapacityError`
    follow_seconds: float | None = None  # a `JournalFollower` that is asked this often costs next to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What the store lends a backend between `open` and `aclose`; `capacity` is in bytes."""

    tier: str  # the tier's name, for events
    workers: Workers  # threads for blocking calls; a job never outlives its buffers' owner unnoticed
    clock: Clock
    events: Events
    arena: Arena  # host memory to register with a device, and slots for memory tiers
    capacity: int  # bytes this tier may hold
    deadline_seconds: float = 5.0  # hint: stop early after this long; the tier enforces it


class Backend(ABC):
    """One medium. Names are chosen by the caller and satisfy `is_name`; values are bytes.

    **The one rule: when a coroutine of this class ends, nothing touches its buffers any more** (return, exception
    and cancellation alike). The tier does not cancel these coroutines; it stops waiting for them.

    Batch calls answer per item, in order, and never fail as a whole because of one item: a failed item's answer is
    the `BackendError`. A method may raise `BackendError` when the medium as a whole is away. No other kind of
    exception leaves a method, except `ClosedError` outside `open` ... `aclose` and `InvalidKeyError`,
    `InvalidValueError` for a caller's mistake.

    A name may occur twice in one batch. Every method is called on one event loop; several may be under way at once,
    also on one name: readers get the old or the new bytes of a name whole, never a mix, and never a miss while one
    value replaces another.

    The constructor's keyword parameters are the options of the tier's configuration; `kvtier.options` has types for
    sizes, paths and secrets. The constructor does no I/O.
    """

    traits: Traits

    @abstractmethod
    async def open(self, context: BackendContext) -> None:
        """Get ready for use; raise `ConfigError` for wrong options, `BackendUnavailableError` if out of reach."""

    @abstractmethod
    async def read_many(self, reads: Sequence[Read]) -> Sequence[int | BackendError | None]:
        """Fill each read's buffers; answer bytes filled, `None` for a miss, `TooLongError` if they do not fit."""

    @abstractmethod
    async def write_many(self, writes: Sequence[Write]) -> Sequence[Written | BackendError]:
        """Publish each entry whole, replacing an older one; readers see the old or the new bytes, never a mix."""

    @abstractmethod
    async def delete_many(self, names: Sequence[str]) -> Sequence[bool | BackendError]:
        """Remove each entry; tell whether it was there."""

    @abstractmethod
    async def stat_many(self, names: Sequence[str]) -> Sequence[Stat | BackendError | None]:
        """Tell size and expiry of each entry without reading it."""

    @abstractmethod
    def scan(self, after: str | None = None) -> AsyncIterator[Sequence[Stat]]:
        """Yield pages of all entries, each once, in the medium's order; `after` resumes behind a name.

        Entries that exist from start to end are listed even while others come, change and go; those may be listed
        or not. The name given as `after` need not exist any more.
        """

    async def sync(self, names: Sequence[str]) -> None:
        """Return once these entries survive power loss; media without such a notion return at once."""
        del names

    async def set_expiry_many(self, items: Sequence[tuple[str, float | None]]) -> None:
        """Change the expiry of entries in place; absent ones are skipped, media without stored expiry ignore it all."""
        del items

    def figures(self) -> Mapping[str, int | float | str]:
        """Return what the medium tells of itself, for `stats`; does no I/O, and may be called at any time."""
        return {}

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything opened here; safe to call twice and after a failed `open`."""


@runtime_checkable
class SlotBackend(Protocol):
    """Power of memory backends: entries *are* arena slots, so nothing is copied and nothing is awaited."""

    def adopt(self, name: str, slot: Slot) -> None:
        """Keep `slot` as the entry, replacing an older one; takes over one reference from the caller."""

    def lend(self, name: str) -> Slot | None:
        """Return the entry's slot with one reference added for the caller, or `None`."""

    def drop(self, name: str) -> bool:
        """Give up the entry's reference; tell whether it was there."""


@runtime_checkable
class JournalBackend(Protocol):
    """Power of persistent backends: an append-only log per process, kept beside the entries (a hint, not the truth)."""

    async def append_journal(self, records: bytes) -> None:
        """Append whole framed records to this process's log."""

    async def read_journals(self) -> Sequence[bytes]:
        """Return the logs of this and of ended processes, oldest first; torn tails are the caller's to detect."""

    async def replace_journals(self, records: bytes) -> None:
        """Replace what `read_journals` last returned by `records`; what was appended since then stays behind them.

        Logs of live processes are not touched. A crash at any point leaves the old logs, the new one, or both.
        """


@runtime_checkable
class JournalFollower(Protocol):
    """Power of shared `JournalBackend`s: stores on one medium hear what the others note, deletions above all."""

    async def follow_journals(self) -> Mapping[str, bytes]:
        """Return, by log, what other open backends appended since the last call; the first call only begins.

        A log that was begun since then is heard from its front; one that was replaced counts as begun. The last bytes
        of a log may be a record that is still being written: its rest comes with a later call, under the same log.
        """


@runtime_checkable
class PrefixLister(Protocol):
    """Power of media that find names by their beginning without going through all."""

    def scan_under(self, prefix: str) -> AsyncIterator[Sequence[Stat]]:
        """Yield pages of the entries whose names begin with a literal prefix, each once, as `Backend.scan` does."""


@runtime_checkable
class ArrivalTeller(Protocol):
    """Power of shared media that tell of new entries by themselves, so that nobody has to ask again and again."""

    def arrivals(self) -> AbstractAsyncContextManager[AsyncIterator[str]]:
        """Listen for the block: the iterator yields the names of entries that anybody publishes from now on.

        It raises `BackendError` when the medium cannot be heard any more.
        """
