"""Which keys were used by one session alone: what may go first when it ends."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ENDED: Final = -(2**61)  # the priority of what an ended session leaves: below any that a caller gives
SESSION_KEYS_REMEMBERED: Final = 1_000_000


class Sessions:
    """Keys by session, and how many living sessions use each; bounded: the session unused for longest is forgotten."""

    def __init__(self, most_keys: int = SESSION_KEYS_REMEMBERED) -> None:
        self._most = most_keys
        self._keys: OrderedDict[str, dict[str, None]] = OrderedDict()
        self._users: dict[str, int] = {}
        self._held = 0

    def __len__(self) -> int:
        return len(self._keys)

    def used(self, session: str, keys: Iterable[str]) -> None:
        """Note that a session uses these keys, parents before children."""
        mine = self._keys.setdefault(session, {})
        self._keys.move_to_end(session)
        for key in keys:
            if key not in mine:
                mine[key] = None
                self._users[key] = self._users.get(key, 0) + 1
                self._held += 1
        while self._held > self._most and len(self._keys) > 1:
            self.end(next(iter(self._keys)))

    def end(self, session: str) -> Sequence[str]:
        """Forget a session; return the keys that no other living session uses, children before parents."""
        mine = self._keys.pop(session, {})
        self._held -= len(mine)
        alone = []
        for key in reversed(mine):
            left = self._users[key] - 1
            if left:
                self._users[key] = left
            else:
                del self._users[key]
                alone.append(key)
        return alone
