"""Values whole or in parts, by their size: ranged reads side by side, multipart writes that leave nothing behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from kvtier.backends.base import TooLongError
from kvtier.backends.batches import answer_each
from kvtier.backends.s3_faults import BEHIND_THE_END, RefusedError
from kvtier.backends.s3_values import Got
from kvtier.backends.views import total_bytes
from kvtier.errors import BackendError, RacedError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from kvtier.backends.s3_control import Control
    from kvtier.backends.s3_options import S3Options
    from kvtier.backends.s3_values import Values

T = TypeVar("T")

_TRIES = 3  # at a read in parts, while others replace the value under it


def section(views: Sequence[memoryview], start: int, size: int) -> list[memoryview]:
    """Return the views of `size` bytes from `start` on in the concatenation of `views`, as far as it goes."""
    cut = []
    for view in views:
        if start < view.nbytes and size > 0:
            piece = view[start : start + size]
            cut.append(piece)
            size -= piece.nbytes
        start = max(0, start - view.nbytes)
    return cut


class Moves:
    """Reads and writes of objects by their full keys."""

    def __init__(self, values: Values, control: Control, options: S3Options) -> None:
        self._values = values
        self._control = control
        self._options = options
        self._unaborted: list[tuple[str, str]] = []  # uploads that could not be given up: key, id

    async def read(self, key: str, into: Sequence[memoryview], *, offset: int, part: bool) -> int | None:
        """Fill `into` from `offset` on; None for a miss.

        Raises:
            TooLongError: the rest of the object is longer, and not only a part was asked for.
            BackendError: as the server or the network failed.
        """
        room = total_bytes(into)
        if room == 0 and part:
            return None if await self._values.head(key) is None else 0
        if not part and room > self._options.whole_bytes:
            return await self._read_split(key, into, offset)
        last = offset + room - 1 if part else None
        got = await self._get(key, into, first=offset, last=last)
        if got is not None and not got.fits:
            raise TooLongError(got.size)
        return None if got is None else got.filled

    async def _get(self, key: str, into: Sequence[memoryview], *, first: int, last: int | None) -> Got | None:
        try:
            return await self._values.get(key, into, first=first, last=last)
        except RefusedError as exc:
            if exc.code in BEHIND_THE_END:
                return Got(0, 0, "")
            raise

    async def _read_split(self, key: str, into: Sequence[memoryview], offset: int) -> int | None:
        """Read ranges side by side; their entity tags must agree, or the value was replaced meanwhile."""
        for _ in range(_TRIES):
            got = await self._read_ranges(key, into, offset)
            if got is None:
                return None
            filled = [part for part in got if part.etag]
            if len({(part.etag, part.size) for part in filled}) > 1:
                continue
            size = filled[0].size if filled else 0
            if size - offset > total_bytes(into):
                raise TooLongError(size)
            if sum(part.filled for part in filled) == max(0, size - offset):
                return max(0, size - offset)
        raise RacedError(f"{self._options.where}: replaced again and again while it was read in parts")

    async def _read_ranges(self, key: str, into: Sequence[memoryview], offset: int) -> list[Got] | None:
        step = self._options.part_bytes

        async def one(start: int) -> Got | None:
            piece = section(into, start, step)
            last = offset + start + total_bytes(piece) - 1
            return await self._get(key, piece, first=offset + start, last=last)

        answers = await answer_each(one, range(0, total_bytes(into), step))
        got = []
        for answer in answers:
            if isinstance(answer, BackendError):
                raise answer
            if answer is None:
                return None
            got.append(answer)
        return got

    async def write(self, key: str, parts: Sequence[memoryview], parameters: Mapping[str, object]) -> None:
        """Publish an object whole; `parameters` are those of `put_object`.

        Raises:
            RefusedError: also if there is one, and `IfNoneMatch` was given.
        """
        if total_bytes(parts) <= self._options.whole_bytes:
            await self._values.put(key, parts, parameters)
            return
        condition = {name: value for name, value in parameters.items() if name == "IfNoneMatch"}
        others = {name: value for name, value in parameters.items() if name not in condition}
        upload_id = await self._begin(key, others)
        try:
            etags = await self._put_parts(key, upload_id, parts)
            await self._control.finish_upload(key, upload_id, etags, condition)
        except BaseException:
            await self._abort(key, upload_id)
            raise

    async def _begin(self, key: str, parameters: Mapping[str, object]) -> str:
        """Begin an upload; a caller who is cancelled meanwhile leaves none."""
        begun, cancelled = await _to_the_end(self._control.begin_upload(key, parameters))
        if cancelled is not None:
            if begun.exception() is None:
                await self._abort(key, begun.result())
            raise cancelled
        return begun.result()

    async def _put_parts(self, key: str, upload_id: str, parts: Sequence[memoryview]) -> list[str]:
        step = self._options.part_bytes

        async def one(start: int) -> str:
            return await self._values.put_part(key, upload_id, start // step + 1, section(parts, start, step))

        etags = []
        for answer in await answer_each(one, range(0, total_bytes(parts), step)):
            if isinstance(answer, BackendError):
                raise answer
            etags.append(answer)
        return etags

    async def _abort(self, key: str, upload_id: str) -> None:
        """Give an upload up, also for a caller who is being cancelled; if that fails, `settle` tries again."""
        self._unaborted.append((key, upload_id))
        _, cancelled = await _to_the_end(self.settle())
        if cancelled is not None:
            raise cancelled

    async def settle(self) -> None:
        """Abort what could not be aborted before; what fails again is left for the next time."""
        waiting, self._unaborted = self._unaborted, []
        for key, upload_id in waiting:
            try:
                await self._control.abort_upload(key, upload_id)
            except BackendError:
                self._unaborted.append((key, upload_id))


async def _to_the_end(call: Coroutine[None, None, T]) -> tuple[asyncio.Task[T], asyncio.CancelledError | None]:
    """Await a call that ends by itself, also when cancelled; return its task and the cancellation."""
    task = asyncio.ensure_future(call)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as exc:
            cancelled = exc
    return task, cancelled
