"""A tier's journal: keys, parents and recency beside the entries, so that a restart keeps order; never the truth."""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgpack  # type: ignore[import-untyped]  # it has no stubs
import xxhash

from kvtier.backends.base import Backend, JournalFollower
from kvtier.errors import InvalidKeyError
from kvtier.keys.names import check_key, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvtier.backends.base import JournalBackend
    from kvtier.tier.index import Entry

_FRAME = struct.Struct("<II")  # payload length, xxh32 of the payload
MAX_RECORD = 1 << 20
CAME, WENT, USED, DELETED, CLEARED, KEPT = 1, 2, 3, 4, 5, 6
USED_PER_RECORD = 1000
_KEPT_BYTES = 64 << 10  # in a record of a snapshot: few records for a hundred thousand entries, each quickly told
_NEWS = (b"\x93\x04", b"\x93\x05")  # how a packed list of three begins that says `DELETED` or `CLEARED`

Noted: TypeAlias = tuple[str, str | None, bool, int]
"""What the journal knows of an entry: its key, the key before it, whether it is lossy, its priority."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """Keys that a store deleted from every tier, and the wall-clock second of it."""

    keys: tuple[str, ...]
    when: float


@dataclass(frozen=True, slots=True)
class Cleared:
    """A literal key prefix that a store cleared, and the wall-clock second of it."""

    prefix: str
    when: float


def frame(record: Sequence[object]) -> bytes:
    """Return one record as it is appended: a torn or damaged one is recognised."""
    return _framed(msgpack.packb(record))


def _framed(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), xxhash.xxh32_intdigest(payload)) + payload


def unframe(log: bytes) -> Iterator[Sequence[object]]:
    """Yield the records of a log up to its first torn or damaged one."""
    for payload in _payloads(log):
        record = _unpacked(payload)
        if record is None:
            return
        yield record


def _payloads(log: bytes) -> Iterator[bytes]:
    start = 0
    while start + _FRAME.size <= len(log):
        length, checksum = _FRAME.unpack_from(log, start)
        payload = log[start + _FRAME.size : start + _FRAME.size + length]
        if length > MAX_RECORD or len(payload) != length or xxhash.xxh32_intdigest(payload) != checksum:
            return
        start += _FRAME.size + length
        yield payload


def _unpacked(payload: bytes) -> Sequence[object] | None:
    try:
        record = msgpack.unpackb(payload, use_list=True, strict_map_key=True)
    except (ValueError, msgpack.UnpackException):
        return None
    return record if isinstance(record, list) and record else None


def whole_frames(log: bytes) -> int:
    """Return how many leading bytes of a log are whole frames: what follows is still being written."""
    end = 0
    while end + _FRAME.size <= len(log):
        length, _ = _FRAME.unpack_from(log, end)
        if length > MAX_RECORD:
            return len(log)  # damaged: nothing behind it can be understood
        if end + _FRAME.size + length > len(log):
            break
        end += _FRAME.size + length
    return end


def news(log: bytes) -> Iterator[Deleted | Cleared]:
    """Yield what a log says of deletions; the rest, which may be long, is passed over as it is."""
    for payload in _payloads(log):
        match _unpacked(payload) if payload.startswith(_NEWS) else None:
            case [4, list(keys), float(when)] if all(isinstance(key, str) for key in keys):
                yield Deleted(tuple(keys), when)
            case [5, str(prefix), float(when)]:
                yield Cleared(prefix, when)


def late_news(logs: Iterable[bytes], since: float) -> bytes:
    """Return the records of the deletions in some logs that happened at `since` or later."""
    told = [item for log in logs for item in news(log) if item.when >= since]
    return b"".join(record for item in told for record in _announced(item))


def _announced(item: Deleted | Cleared) -> list[bytes]:
    if isinstance(item, Cleared):
        return [frame([CLEARED, item.prefix, item.when])]
    batches = [item.keys[first : first + USED_PER_RECORD] for first in range(0, len(item.keys), USED_PER_RECORD)]
    return [frame([DELETED, list(batch), item.when]) for batch in batches]


def replay(logs: Iterable[bytes]) -> dict[str, Noted]:
    """Return what the logs tell, by medium name, least recently used first; senseless records are passed over."""
    noted: dict[str, Noted] = {}
    texts: dict[str, str] = {}  # a key and those who name it as their parent share one text
    for log in logs:
        for record in unframe(log):
            _apply(record, noted, texts)
    return noted


def _apply(record: Sequence[object], noted: dict[str, Noted], texts: dict[str, str]) -> None:
    match record:
        case [1, *row]:
            _note(row, noted, texts)
        case [2, str(name)]:
            noted.pop(name, None)
        case [3, list(names)]:
            for name in names:
                known = noted.pop(name, None)
                if known is not None:
                    noted[name] = known  # at the end
        case [6, list(rows)]:
            for row in rows:
                _note(row, noted, texts)
        case _:
            return


def _note(row: object, noted: dict[str, Noted], texts: dict[str, str]) -> None:
    match row:
        case [str(key), None | str() as parent, bool(lossy), int(priority)]:
            try:
                name = name_of(check_key(key))
            except InvalidKeyError:
                return
            noted.pop(name, None)
            key, parent = texts.setdefault(key, key), parent if parent is None else texts.setdefault(parent, parent)
            noted[name] = (key, parent, lossy, priority)


class TierJournal:
    """Collects one tier's changes and appends them in batches; a log that cannot be written costs nothing but order.

    Only deletions are written for a medium that is not listed at open: nobody would read the rest.
    """

    def __init__(self, backend: JournalBackend) -> None:
        self._backend = backend
        self._keeps_order = not isinstance(backend, Backend) or backend.traits.scan_at_open
        self._records: list[bytes] = []
        self._used: OrderedDict[str, None] = OrderedDict()
        self._unfinished: dict[str, bytes] = {}  # by log: the frame that its owner was writing when it was read

    def note(self, entry: Entry, came: bool) -> None:  # noqa: FBT001  # the shape of StoredTier.on_change
        """Note that an entry came or went."""
        if entry.nameless or not self._keeps_order:
            return
        self._records.append(frame([CAME, *_row(entry)]) if came else frame([WENT, entry.name]))

    def used(self, name: str) -> None:
        """Note a use; only the last one of a batch counts."""
        if not self._keeps_order:
            return
        self._used[name] = None
        self._used.move_to_end(name)

    def announce(self, item: Deleted | Cleared) -> None:
        """Note a deletion for the other stores on the medium; `append` follows."""
        self._records.extend(_announced(item))

    async def follow(self) -> Sequence[Deleted | Cleared]:
        """Return the deletions that others announced since the last call."""
        heard: list[Deleted | Cleared] = []
        if not isinstance(self._backend, JournalFollower):
            return heard
        for name, more in (await self._backend.follow_journals()).items():
            log = self._unfinished.pop(name, b"") + more
            end = whole_frames(log)
            if end < len(log):
                self._unfinished[name] = log[end:]
            heard.extend(news(log[:end]))
        return heard

    @property
    def pending(self) -> bool:
        """Whether there is something to append."""
        return bool(self._records or self._used)

    async def append(self) -> None:
        """Append what was noted since the last time."""
        names = list(self._used)
        self._used.clear()
        records, self._records = self._records, []
        batches = [names[i : i + USED_PER_RECORD] for i in range(0, len(names), USED_PER_RECORD)]
        records.extend(frame([USED, batch]) for batch in batches)
        if records:
            await self._backend.append_journal(b"".join(records))

    async def logs(self) -> Sequence[bytes]:
        """Return what ended processes and this one have noted, for `replay`."""
        return await self._backend.read_journals()

    async def replace(self, records: bytes) -> None:
        """Replace the logs that were read by a `snapshot`; what was noted since then stays behind it."""
        await self._backend.replace_journals(records)


def snapshot(coldest_first: Iterable[Entry], holds: Callable[[Entry], bool]) -> bytes:
    """Return the log that says what a tier holds now."""
    frames: list[bytes] = []
    rows: list[bytes] = []
    size = 0
    for entry in coldest_first:
        if entry.nameless or not holds(entry):
            continue
        row: bytes = msgpack.packb(_row(entry))
        if size + len(row) > _KEPT_BYTES:
            frames.append(_kept(rows))
            rows, size = [], 0
        rows.append(row)
        size += len(row)
    return b"".join([*frames, _kept(rows)]) if rows else b""


def _kept(rows: list[bytes]) -> bytes:
    packer = msgpack.Packer()
    front: bytes = packer.pack_array_header(2) + packer.pack(KEPT) + packer.pack_array_header(len(rows))
    return _framed(front + b"".join(rows))


def _row(entry: Entry) -> list[object]:
    return [entry.key, entry.parent, bool(entry.lossy), entry.priority]
