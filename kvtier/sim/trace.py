"""A request trace in memory: when each prompt came, and the blocks of its prefix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    `keys` name its blocks from the first on; a key stands for its block and everything before it, so that equal keys
    mean equal whole prefixes. `full` of them are full blocks. `ends_session` tells that nobody will continue it.
    """

    seconds: float
    keys: Sequence[str]
    full: int
    tokens: int
    session: str | None = None
    priority: int = 0
    ends_session: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times, and the number of tokens in a block."""

    name: str
    requests: Sequence[Request]
    block_tokens: int
    blocks: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", sum(len(request.keys) for request in self.requests))

    @property
    def distinct_blocks(self) -> int:
        """How many different blocks there are."""
        return len({key for request in self.requests for key in request.keys})

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.tokens for request in self.requests)
