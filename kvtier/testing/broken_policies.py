"""Policies that break the contract, each in one way: the conformance kit must catch them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvtier.policies.base import Policy, nothing, share_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class PlainPolicy(Policy):
    """Least recently used, by trying everything: right and slow. The broken ones change one of its parts."""

    name: ClassVar[str] = "plain"

    def __init__(self) -> None:
        self.parents: dict[str, str | None] = {}
        self.sizes: dict[str, int] = {}
        self.priorities: dict[str, int] = {}
        self.used: dict[str, int] = {}
        self.clock: int = 0

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        self.parents[key] = None
        self.parents[key] = parent if self.allows(key, parent) else None
        self.sizes[key] = size
        self.priorities[key] = priority
        self.use(key)

    def touch(self, key: str, now: float) -> None:
        if key in self.sizes:
            self.use(key)

    def remove(self, key: str) -> None:
        for table in (self.parents, self.sizes, self.priorities, self.used):
            table.pop(key, None)

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        names: list[str] = []
        while need > 0:
            candidates = [key for key in self.candidates(set(names)) if not protected(key)]
            if not candidates:
                return self.too_few(names)
            key = min(candidates, key=lambda key: (over_share is None or not over_share(key), *self.rank(key)))
            names.append(key)
            need -= self.sizes[key]
        return names

    def coldest_first(self) -> Iterator[str]:
        names: set[str] = set()
        while candidates := self.candidates(names):
            key = min(candidates, key=self.rank)
            names.add(key)
            yield key

    def __len__(self) -> int:
        return len(self.sizes)

    def __contains__(self, key: object) -> bool:
        return key in self.sizes

    def use(self, key: str) -> None:
        """Note a use."""
        self.clock += 1
        self.used[key] = self.clock

    def allows(self, key: str, parent: str | None) -> bool:
        """Tell whether the link closes no circle."""
        while parent is not None and parent != key:
            parent = self.parents.get(parent)
        return parent != key

    def candidates(self, gone: set[str]) -> list[str]:
        """Return the keys that have no resident child outside `gone`."""
        parents = {parent for key, parent in self.parents.items() if key not in gone}
        return [key for key in self.sizes if key not in gone and key not in parents]

    def rank(self, key: str) -> tuple[int, int]:
        """Return what orders the leaves: the least goes first."""
        return self.priorities[key], self.used[key]

    def too_few(self, names: list[str]) -> list[str]:
        """Return the answer when `names` is all there is."""
        del names
        return []


class NoParents(PlainPolicy):
    """Evicts parents before their children."""

    def candidates(self, gone: set[str]) -> list[str]:
        return [key for key in self.sizes if key not in gone]


class OnlyLeaves(PlainPolicy):
    """Never names a parent in the same answer as its last child."""

    def candidates(self, gone: set[str]) -> list[str]:
        return [key for key in super().candidates(set()) if key not in gone]


class OnlyParentsBefore(PlainPolicy):
    """Ties a child to its parent only if the parent came first."""

    def allows(self, key: str, parent: str | None) -> bool:
        return parent in self.sizes and super().allows(key, parent)


class AnyCircle(PlainPolicy):
    """Takes links that close a circle, and never gets out of it."""

    def allows(self, key: str, parent: str | None) -> bool:
        return True


class HalfAnswers(PlainPolicy):
    """Names what there is when it is not enough."""

    def too_few(self, names: list[str]) -> list[str]:
        return names


class OneTooMany(PlainPolicy):
    """Names one more than is needed, if there is one."""

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        names = super().victims(need, protected=protected, over_share=over_share)
        more = [key for key in self.candidates(set(names)) if not protected(key)]
        return [*names, more[0]] if names and more else names


class NoProtection(PlainPolicy):
    """Names protected keys."""

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        return super().victims(need, over_share=over_share)


class ProtectionOfOne(PlainPolicy):
    """Spares protected keys but names what they build on."""

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        spared = {key for key in self.sizes if protected(key)}
        kept = {key: self.parents.pop(key) for key in spared}
        try:
            return super().victims(need, protected=protected, over_share=over_share)
        finally:
            self.parents.update(kept)


class NoShares(PlainPolicy):
    """Treats those over their share like all others."""

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        return super().victims(need, protected=protected)


class OnlyNamespaceShares(PlainPolicy):
    """Asks for the share of one key per namespace, though keys without one have each their own."""

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        firsts: dict[str, str] = {}
        for key in self.sizes:
            firsts.setdefault(share_of(key), key)
        by_first = None if over_share is None else (lambda key: over_share(firsts[share_of(key)]))
        return super().victims(need, protected=protected, over_share=by_first)


class NoPriorities(PlainPolicy):
    """Forgets priorities."""

    def rank(self, key: str) -> tuple[int, int]:
        return 0, self.used[key]


class EvictsWhenAsked(PlainPolicy):
    """Removes its victims itself."""

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        names = super().victims(need, protected=protected, over_share=over_share)
        for key in names:
            self.remove(key)
        return names


class SecondThoughts(PlainPolicy):
    """Answers the same at once, but treats those named as used, so that later answers differ."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[str] = []

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        for name in self.named:
            self.touch(name, now)
        super().insert(key, parent=parent, size=size, now=now, priority=priority)

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        names = super().victims(need, protected=protected, over_share=over_share)
        self.named = list(names)[:1]
        return names


class OldSizes(PlainPolicy):
    """Keeps the first size of a key that is put again."""

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        size = self.sizes.get(key, size)
        super().insert(key, parent=parent, size=size, now=now, priority=priority)


class OldParents(PlainPolicy):
    """Keeps the first parent of a key that is put again."""

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        parent = self.parents.get(key, parent)
        super().insert(key, parent=parent, size=size, now=now, priority=priority)


class Remembers(PlainPolicy):
    """Still counts what was removed."""

    def remove(self, key: str) -> None:
        del key


class Stumbles(PlainPolicy):
    """Fails on keys it does not know."""

    def touch(self, key: str, now: float) -> None:
        self.used[key] += 0
        self.use(key)


class SortsInC(PlainPolicy):
    """Right for entries without links, but compares everything each time, where no bytecode shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, float] = {}

    def insert(self, key: str, *, parent: str | None, size: int, now: float, priority: int = 0) -> None:
        self.times[key] = now

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        coldest = min(zip(self.times.values(), self.times, strict=True), default=None)
        return [] if coldest is None else [coldest[1]]

    def remove(self, key: str) -> None:
        self.times.pop(key, None)


SLOW: tuple[type[PlainPolicy], ...] = (PlainPolicy, SortsInC)

BROKEN: tuple[type[PlainPolicy], ...] = (
    NoParents,
    OnlyLeaves,
    OnlyParentsBefore,
    AnyCircle,
    HalfAnswers,
    OneTooMany,
    NoProtection,
    ProtectionOfOne,
    NoShares,
    OnlyNamespaceShares,
    NoPriorities,
    EvictsWhenAsked,
    SecondThoughts,
    OldSizes,
    OldParents,
    Remembers,
    Stumbles,
)
