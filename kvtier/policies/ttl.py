"""Age first: entries past an age go before all others; otherwise another policy decides."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, ClassVar, Final

from kvtier.errors import ConfigError
from kvtier.options import Seconds  # noqa: TC001  # the config reads the annotations of __init__
from kvtier.policies.base import Policy, nothing
from kvtier.policies.lru import LRUPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_OVERDUE: Final = -(2**62)  # a priority below any that a caller gives
_AT_ONCE = 256


class TTLPolicy(Policy):
    """Wraps any policy: entries put in `seconds` ago or longer go first, in the order of `inner`.

    Use does not make an entry younger; putting it again does. Nothing is evicted before room is needed: the tier's
    `ttl_seconds` is what makes entries expire. Age is judged when the policy is told the time (insert, touch,
    admit), at most 256 entries per call, so that no call is long after a quiet night.
    """

    name: ClassVar[str] = "ttl"

    def __init__(self, *, seconds: Seconds, inner: Policy | None = None) -> None:
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"ttl: seconds is {seconds!r}; write a finite number greater than 0")
        self._seconds = seconds
        self._inner: Policy = LRUPolicy() if inner is None else inner
        self._young: OrderedDict[str, tuple[float, str | None, int]] = OrderedDict()  # in order of age

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        """Take in `key` as the youngest."""
        self._age(now)
        self._inner.insert(key, parent=parent, size=size, now=now, priority=priority)
        self._young[key] = (now, parent, size)
        self._young.move_to_end(key)

    def touch(self, key: str, now: float) -> None:
        """Note a use, as `inner` does; `key` stays as old as it is."""
        self._age(now)
        self._inner.touch(key, now)

    def remove(self, key: str) -> None:
        """Forget `key`."""
        self._young.pop(key, None)
        self._inner.remove(key)

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        """Answer as `inner` does, to which entries past the age have the lowest priority."""
        return self._inner.victims(need, protected=protected, over_share=over_share)

    def admit(self, key: str, *, size: int, now: float) -> bool:
        """Answer as `inner` does."""
        self._age(now)
        return self._inner.admit(key, size=size, now=now)

    def expect(self, key: str, *, seconds: float, now: float) -> None:
        """Pass the advice on to `inner`."""
        self._inner.expect(key, seconds=seconds, now=now)

    def coldest_first(self) -> Iterator[str]:
        """Iterate as `inner` does."""
        return self._inner.coldest_first()

    def __len__(self) -> int:
        return len(self._inner)

    def __contains__(self, key: object) -> bool:
        return key in self._inner

    def _age(self, now: float) -> None:
        for _ in range(_AT_ONCE):
            if not self._young:
                return
            key = next(iter(self._young))
            inserted, parent, size = self._young[key]
            if now - inserted < self._seconds:
                return
            del self._young[key]
            self._inner.insert(key, parent=parent, size=size, now=now, priority=_OVERDUE)
