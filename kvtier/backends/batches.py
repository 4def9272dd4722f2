"""The one way to work through a batch: every item at once, a failed item's answer is its error."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Item = TypeVar("Item")
Answer = TypeVar("Answer")


async def answer_each(
    call: Callable[[Item], Awaitable[Answer]], items: Sequence[Item], *, limit: int | None = None
) -> list[Answer | BackendError]:
    """Await `call(item)` for all items, at most `limit` at once; return answers in order, a `BackendError` as a value.

    Ends only when every call has ended, also when cancelled. Any other exception is raised then.
    """
    turns = asyncio.Semaphore(limit) if limit is not None and limit < len(items) else None

    async def one(item: Item) -> Answer:
        if turns is None:
            return await call(item)
        async with turns:
            return await call(item)

    # With `return_exceptions`, gather waits for all; without it, the first failure would leave the others running.
    outcomes = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
    answers: list[Answer | BackendError] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, BackendError):
            raise outcome
        answers.append(outcome)
    return answers
