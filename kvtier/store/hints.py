"""What callers tell of the future, passed on to the tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.keys import Hint
    from kvtier.store.engine import Engine


def advise(engine: Engine, hint: Hint | None, keys: Sequence[str]) -> None:
    """Note a hint on keys, parents before children: whose session they are, and when they may be used again."""
    if hint is None:
        return
    if hint.session is not None:
        engine.sessions.used(hint.session, keys)
    if hint.expected_reuse_seconds is None:
        return
    for tier in engine.tiers:
        ledger = tier.ledger
        for key in keys:
            if key in ledger.index.entries:
                ledger.policy.expect(key, seconds=hint.expected_reuse_seconds, now=ledger.now())


def end_session(engine: Engine, session: str) -> int:
    """Let the chunks that only this session used go before all others; return how many there are."""
    keys = engine.sessions.end(session)
    retired = {key for tier in engine.tiers for key in keys if tier.ledger.retire(key)}
    return len(retired)
