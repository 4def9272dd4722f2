"""What any policy may answer, found out by trying everything: slow, simple, and independent of the real ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Resident:
    """One entry as the model knows it."""

    parent: str | None
    size: int
    priority: int


class PolicyModel:
    """The entries of a tier, and a judge of `victims` answers that takes nothing but the contract for granted."""

    def __init__(self) -> None:
        self.entries: dict[str, Resident] = {}

    def insert(self, key: str, *, parent: str | None, size: int, priority: int = 0) -> None:
        """Take in `key`; a link that would close a circle is ignored."""
        self.entries.pop(key, None)
        above = parent
        while above is not None and above != key:
            above = self.entries[above].parent if above in self.entries else None
        self.entries[key] = Resident(None if above == key else parent, size, priority)

    def remove(self, key: str) -> None:
        """Forget `key`."""
        self.entries.pop(key, None)

    def may_go(self, gone: Iterable[str], protected: Callable[[str], bool]) -> set[str]:
        """Return the keys that may be named once those in `gone` have been."""
        left = self.entries.keys() - set(gone)
        parents = {self.entries[key].parent for key in left}
        return {key for key in left if key not in parents and not protected(key)}

    def reachable(self, protected: Callable[[str], bool]) -> int:
        """Return the bytes that can be freed in all."""
        gone: set[str] = set()
        while more := self.may_go(gone, protected):
            gone |= more
        return sum(self.entries[key].size for key in gone)

    def judge(
        self,
        answer: Sequence[str],
        need: int,
        *,
        protected: Callable[[str], bool],
        over_share: Callable[[str], bool] | None,
    ) -> list[str]:
        """Return what is wrong with `answer`, in words; nothing if it is a right one."""
        reachable = self.reachable(protected)
        if not answer:
            return (
                [f"named nothing, though {reachable} bytes can go and {need} are needed"]
                if 0 < need <= reachable
                else []
            )
        if need <= 0:
            return [f"named {answer} though nothing was needed"]
        sizes = [self.entries[key].size if key in self.entries else 0 for key in answer]
        faults = []
        if sum(sizes) < need:
            faults.append(f"named {sum(sizes)} bytes of {need}: all or nothing")
        elif sum(sizes[:-1]) >= need:
            faults.append(f"named {answer[-1]!r} needlessly: the others were enough for {need} bytes")
        for i, key in enumerate(answer):
            faults += self._judge_turn(key, answer[:i], protected, over_share)
        return faults

    def _judge_turn(
        self,
        key: str,
        before: Sequence[str],
        protected: Callable[[str], bool],
        over_share: Callable[[str], bool] | None,
    ) -> list[str]:
        if key not in self.entries:
            return [f"named {key!r}, which is not resident"]
        if key in before:
            return [f"named {key!r} twice"]
        if protected(key):
            return [f"named {key!r}, which is protected"]
        candidates = self.may_go(before, protected)
        if key not in candidates:
            children = [child for child, entry in self.entries.items() if entry.parent == key and child not in before]
            return [f"named {key!r} before its children {children}"]

        def standing(candidate: str) -> tuple[bool, int]:
            fair = over_share is None or not over_share(candidate)
            return fair, self.entries[candidate].priority

        first = min(candidates, key=standing)
        if standing(first) >= standing(key):
            return []
        if standing(first)[0] != standing(key)[0]:
            return [f"named {key!r} before {first!r}, which is over its share"]
        return [f"named {key!r} before {first!r}, which has a lower priority"]
