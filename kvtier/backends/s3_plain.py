"""Values through aioboto3 alone, for set-ups that only the client can reach: proxies, special signatures."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from kvtier.backends.s3_faults import MISSING, RefusedError
from kvtier.backends.s3_values import EXPIRES, Got, Head, parse_expiry, size_in_range
from kvtier.backends.s3_wire import ShortBodyError
from kvtier.backends.views import gather, scatter, total_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.backends.base import BackendContext
    from kvtier.backends.s3_control import Answer, Control

_CHUNK = 64 << 10  # what is copied on the loop at a time


class ClientValues:
    """The plain way: every value passes through `bytes`, and much of it through the event loop."""

    def __init__(self, control: Control, context: BackendContext) -> None:
        self._control = control
        self._context = context

    async def get(self, key: str, into: Sequence[memoryview], *, first: int = 0, last: int | None = None) -> Got | None:
        """See `Values`."""
        ranged = first > 0 or last is not None

        async def take(answer: Answer) -> Got:
            length = int(answer["ContentLength"])
            size = size_in_range(answer.get("ContentRange", "")) if ranged else length
            etag = str(answer.get("ETag", ""))
            if length > total_bytes(into):
                return Got(0, size, etag, fits=False)
            rest = list(into)
            filled = 0
            async for chunk in answer["Body"].iter_chunks(_CHUNK):
                count = scatter(memoryview(chunk), rest)
                filled += count
                rest = _behind(rest, count)
            if filled != length:
                raise ShortBodyError(f"the body ended {length - filled} bytes early")
            return Got(filled, size, etag)

        span = f"bytes={first}-{'' if last is None else last}" if ranged else None
        try:
            return await self._control.get(key, take, span=span)
        except RefusedError as exc:
            if exc.code in MISSING:
                return None
            raise

    async def head(self, key: str) -> Head | None:
        """See `Values`."""
        try:
            answer = await self._control.head(key)
        except RefusedError as exc:
            if exc.code in MISSING:
                return None
            raise
        expires = parse_expiry(answer.get("Metadata", {}).get(EXPIRES))
        return Head(int(answer["ContentLength"]), expires, answer["LastModified"].timestamp())

    async def put(self, key: str, parts: Sequence[memoryview], parameters: Mapping[str, object]) -> None:
        """See `Values`."""
        await self._control.put(key, await self._joined(parts), parameters)

    async def put_part(self, key: str, upload_id: str, number: int, parts: Sequence[memoryview]) -> str:
        """See `Values`."""
        return await self._control.put_part(key, upload_id, number, await self._joined(parts))

    async def close(self) -> None:
        """See `Values`; the connections are the client's."""

    async def _joined(self, parts: Sequence[memoryview]) -> bytes:
        return await self._context.workers.run(_join, parts)


def _join(parts: Sequence[memoryview]) -> bytes:
    """Return the parts' concatenation, copied without holding up the event loop as `bytes(...)` would."""
    whole = io.BytesIO(bytes(total_bytes(parts)))
    with whole.getbuffer() as view:
        gather(parts, view)
    return whole.getvalue()


def _behind(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of `views` behind their first `count` bytes."""
    rest = []
    for view in views:
        if count < view.nbytes:
            rest.append(view[count:])
        count = max(0, count - view.nbytes)
    return rest
