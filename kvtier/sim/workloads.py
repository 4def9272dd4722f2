"""Synthetic traces made from published statistics of real ones; the same seed gives the same trace everywhere."""

from __future__ import annotations

import heapq
import math
import random
from typing import TYPE_CHECKING, Final

from kvtier.sim.trace import Request, Trace

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_TOKENS: Final = 512

# Time between the turns of a chat: fits p10 45 s, median 135 s, p90 531 s of Mooncake's conversation trace (FAST'25).
_THINK_MEDIAN_SECONDS, _THINK_SPREAD = 135.0, 1.0
_MULTI_TURN_SHARE = 0.73  # of ShareGPT's conversations (CachedAttention, ATC'24)
_TOOL_MEDIAN_SECONDS, _TOOL_SPREAD = 6.0, 1.1  # a tool runs for seconds
_DOCUMENTS, _DOCUMENT_SKEW = 4_000, 1.15  # some 3 % of documents take 60 % of the requests (RAGCache)


class _Paths:
    """Names for prefixes: the same path gets the same name."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}

    def extend(self, keys: list[str], content: str, blocks: int) -> list[str]:
        """Return `keys` with `blocks` blocks of `content` behind them."""
        longer = list(keys)
        for number in range(blocks):
            step = (longer[-1] if longer else "", f"{content}#{number}")
            longer.append(self._names.setdefault(step, str(len(self._names))))
        return longer


class _Sessions:
    """Sessions whose next turns wait in a queue by time."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)  # noqa: S311  # a workload, not a secret
        self.paths = _Paths()
        self.queue: list[tuple[float, int, list[str], int]] = []  # when, session, prefix so far, turns left
        self.opened = 0

    def spread(self, median: float, sigma: float) -> float:
        """Draw from a log-normal distribution."""
        return median * math.exp(self.draw.gauss(0.0, sigma))

    def blocks(self, median: float, sigma: float, most: int) -> int:
        """Draw a number of blocks."""
        return max(1, min(most, round(self.spread(median, sigma))))

    def begin(self, at: float, prefix: list[str], turns: int) -> None:
        """Begin a session."""
        heapq.heappush(self.queue, (at, self.opened, prefix, turns))
        self.opened += 1

    def take(self) -> tuple[float, int, list[str], int]:
        """Return the turn that comes first."""
        return heapq.heappop(self.queue)


def _request(at: float, keys: list[str], session: int, *, ends: bool) -> Request:
    return Request(
        seconds=at,
        keys=keys,
        full=len(keys),
        tokens=len(keys) * BLOCK_TOKENS,
        session=f"s{session}",
        ends_session=ends,
    )


def _turns(sessions: _Sessions, more: float) -> int:
    turns = 1
    while sessions.draw.random() < more and turns < 60:  # noqa: PLR2004  # nobody goes on for ever
        turns += 1
    return turns


def multi_turn_chat(*, requests: int = 8_000, seed: int = 1, per_second: float = 2.0) -> Trace:
    """Chats: one short system prompt for all, 73 % go on after the first turn, minutes between turns."""
    sessions, at = _Sessions(seed), 0.0
    out: list[Request] = []
    system = sessions.paths.extend([], "system", 1)
    while len(out) < requests:
        at += sessions.draw.expovariate(per_second)
        turns = 1 + (_turns(sessions, 0.7) if sessions.draw.random() < _MULTI_TURN_SHARE else 0)
        sessions.begin(at, system, turns)
        while sessions.queue and sessions.queue[0][0] <= at and len(out) < requests:
            when, session, prefix, left = sessions.take()
            keys = sessions.paths.extend(prefix, f"{session}.{left}", sessions.blocks(4.0, 1.1, 200))
            out.append(_request(when, keys, session, ends=left == 1))
            if left > 1:
                gap = sessions.spread(_THINK_MEDIAN_SECONDS, _THINK_SPREAD)
                heapq.heappush(sessions.queue, (when + gap, session, keys, left - 1))
    return Trace("multi-turn-chat", _sorted(out), BLOCK_TOKENS)


def agents(*, requests: int = 8_000, seed: int = 2, per_second: float = 0.25) -> Trace:
    """Agents: a few long system prompts with tool definitions, many short steps, seconds of tool time between them."""
    sessions, at = _Sessions(seed), 0.0
    out: list[Request] = []
    kinds = [sessions.paths.extend([], f"agent{i}", 5 + 7 * (i % 2)) for i in range(12)]
    while len(out) < requests:
        at += sessions.draw.expovariate(per_second)
        kind = min(len(kinds) - 1, int(sessions.draw.paretovariate(0.9)) - 1)
        sessions.begin(at, sessions.paths.extend(kinds[kind], f"task{sessions.opened}", 2), _turns(sessions, 0.9))
        while sessions.queue and sessions.queue[0][0] <= at and len(out) < requests:
            when, session, prefix, left = sessions.take()
            keys = sessions.paths.extend(prefix, f"{session}.{left}", sessions.blocks(1.5, 0.8, 40))
            out.append(_request(when, keys, session, ends=left == 1))
            if left > 1:
                gap = sessions.spread(_TOOL_MEDIAN_SECONDS, _TOOL_SPREAD)
                heapq.heappush(sessions.queue, (when + gap, session, keys, left - 1))
    return Trace("agents", _sorted(out), BLOCK_TOKENS)


def retrieval(*, requests: int = 6_000, seed: int = 3, per_second: float = 2.0) -> Trace:
    """RAG: a system prompt, one to three documents of a skewed pool, a question that nobody asks again."""
    sessions, at = _Sessions(seed), 0.0
    out: list[Request] = []
    system = sessions.paths.extend([], "system", 1)
    sizes = [sessions.blocks(6.0, 0.6, 40) for _ in range(_DOCUMENTS)]
    weights = [1.0 / (rank + 1) ** _DOCUMENT_SKEW for rank in range(_DOCUMENTS)]
    for number in range(requests):
        at += sessions.draw.expovariate(per_second)
        keys = system
        for document in dict.fromkeys(sessions.draw.choices(range(_DOCUMENTS), weights, k=sessions.draw.randint(1, 3))):
            keys = sessions.paths.extend(keys, f"doc{document}", sizes[document])
        keys = sessions.paths.extend(keys, f"question{number}", 1)
        out.append(_request(at, keys, number, ends=True))
    return Trace("retrieval", out, BLOCK_TOKENS)


def chat_with_scans(*, requests: int = 8_000, seed: int = 4, per_second: float = 2.0) -> Trace:
    """The chats, and every ten minutes a batch job whose long prompts are never seen again."""
    chat = multi_turn_chat(requests=requests, seed=seed, per_second=per_second)
    sessions = _Sessions(seed + 1)
    scans, at = [], 300.0
    while at < chat.requests[-1].seconds:
        for number in range(250):
            keys = sessions.paths.extend([], f"scan{at}.{number}", sessions.blocks(24.0, 0.7, 200))
            named = [f"x{key}" for key in keys]
            scans.append(_request(at + number * 0.2, named, 10**6 + number, ends=False))
        at += 600.0
    return Trace("chat-with-scans", _sorted([*chat.requests, *scans]), BLOCK_TOKENS)


def _sorted(requests: list[Request]) -> list[Request]:
    return sorted(requests, key=lambda request: request.seconds)


WORKLOADS: Final[dict[str, Callable[[], Trace]]] = {
    "multi-turn-chat": multi_turn_chat,
    "agents": agents,
    "retrieval": retrieval,
    "chat-with-scans": chat_with_scans,
}
