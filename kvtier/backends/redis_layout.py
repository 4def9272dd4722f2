"""How an entry lies on a Redis server: a head with an envelope and the first bytes, and parts that hold the rest."""

from __future__ import annotations

import secrets
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC: Final = b"kvt1"
ENVELOPE_BYTES: Final = 64
SEALED_BYTES: Final = 52  # of it, the fields
UNSEALED: Final = b"." * 12  # behind them, in what versions without a checksum wrote
WHOLE_BYTES: Final = 64 << 10  # values up to this long are a head alone: one key, one round trip
HEAD_BYTES: Final = 16 << 10  # of a longer value that stand in its head: most containers' own headers
STEP_BYTES: Final = 64
SPARE_BYTES: Final = 512  # what a server keeps beside a part: without room for it, 2 MiB take up 2.5 MiB there
MOST_PARTS: Final = 1 << 14  # what a head may claim: their keys are made before the first one is asked for
CLUSTER_BUCKETS: Final = 256  # hash tags that the entries of a cluster are spread over


@dataclass(frozen=True, slots=True)
class Shape:
    """How a value is cut: `head` bytes beside the envelope, then parts of `part` bytes, the last one shorter."""

    size: int
    head: int
    part: int
    token: str  # 16 hexadecimal digits, new with each write: parts of two writes never mix

    @property
    def parts(self) -> int:
        """How many parts there are besides the head."""
        return -(-(self.size - self.head) // self.part)

    def span(self, number: int) -> tuple[int, int]:
        """Return where part `number` (from 1) starts and ends in the value."""
        start = self.head + (number - 1) * self.part
        return start, min(start + self.part, self.size)

    def envelope(self) -> bytes:
        """Return the head's first 64 bytes, all ASCII so that scripts can read them."""
        front = MAGIC + f"{self.token}{self.size:016x}{self.head:08x}{self.part:08x}".encode()
        return front + _seal(front)


def cut(size: int, part_bytes: int) -> Shape:
    """Return the shape of a new value: parts of equal size, each so that it fits `part_bytes` of a server's memory.

    Raises:
        CapacityError: they would be too many.
    """
    token = secrets.token_hex(8)
    if size <= WHOLE_BYTES:
        return Shape(size, size, part_bytes, token)
    rest = size - HEAD_BYTES
    count = -(-rest // (part_bytes - SPARE_BYTES))
    if count > MOST_PARTS:
        raise CapacityError(f"{size} bytes are {count} parts of {part_bytes}, at most {MOST_PARTS}; raise part_bytes")
    even = -(-rest // count)
    return Shape(size, HEAD_BYTES, -(-even // STEP_BYTES) * STEP_BYTES, token)


def open_envelope(front: bytes) -> Shape | None:
    """Return the shape that a head tells, `None` if it is no head of ours."""
    if len(front) != ENVELOPE_BYTES or front[:4] != MAGIC or front[SEALED_BYTES:] not in {_seal(front), UNSEALED}:
        return None
    try:
        text = front.decode("ascii")
        shape = Shape(int(text[20:36], 16), int(text[36:44], 16), int(text[44:52], 16), text[4:20])
    except ValueError:
        return None
    sound = 0 <= shape.head <= shape.size and shape.part > 0 and shape.parts <= MOST_PARTS
    return shape if sound else None


def _seal(front: bytes) -> bytes:
    """Return what ends an envelope: a checksum of the fields before it, which say how much is read, and where."""
    return f"{zlib.crc32(front[:SEALED_BYTES]):08x}....".encode()


class Keys:
    """The key of everything an entry consists of.

    All keys of one bucket carry one hash tag, so that scripts may touch them together on a cluster.

    Args:
        prefix: what every key begins with.
        buckets: how many tags there are; 1 where there is only one server.
    """

    def __init__(self, prefix: str, buckets: int) -> None:
        self.prefix = prefix
        self.buckets = buckets
        self.counters: list[str] = [f"{prefix}:{{{bucket:02x}}}:bytes" for bucket in range(buckets)]

    def bucket(self, name: str) -> int:
        """Return the bucket of a name."""
        return zlib.crc32(name.encode()) % self.buckets if self.buckets > 1 else 0

    def head(self, name: str) -> str:
        """Return the key of a name's head."""
        return f"{self.prefix}:{{{self.bucket(name):02x}}}:e:{name}"

    def parts(self, name: str, shape: Shape) -> list[str]:
        """Return the keys of a value's parts, in order."""
        front = f"{self.head(name)}:{shape.token}:"
        return [f"{front}{number}" for number in range(1, shape.parts + 1)]

    def index(self, bucket: int) -> str:
        """Return the key of a bucket's sorted set of entries."""
        return f"{self.prefix}:{{{bucket:02x}}}:index"

    @property
    def arrivals(self) -> str:
        """The channel that tells the names of new entries."""
        return f"{self.prefix}:arrivals"


def window(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return bytes `start` to `stop` of the views' concatenation, as views."""
    found, at = [], 0
    for view in views:
        end = at + view.nbytes
        if end > start and at < stop and view.nbytes:
            found.append(view[max(0, start - at) : min(view.nbytes, stop - at)])
        at = end
        if at >= stop:
            break
    return found
