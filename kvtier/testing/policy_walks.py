"""Random histories of a policy, replayable from their seed, and the work that one operation takes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from kvtier.policies.base import Policy, nothing, share_of
from kvtier.testing.steps import Instant, Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.testing.policy_model import PolicyModel

POOL = [f"{name:0>16}/0000000000000000/{i}" for i in range(8) for name in ("beef", "cafe")] + [
    f"blob{i}" for i in range(8)
]
DEPTH = 8  # of the documents that work is measured on
ROUNDS = 3
OPERATIONS = 20


@dataclass(frozen=True, slots=True)
class Step:
    """One call to a policy."""

    verb: Literal["insert", "touch", "remove"]
    key: str
    now: float
    parent: str | None = None
    size: int = 0
    priority: int = 0

    def apply(self, policy: Policy, model: PolicyModel) -> None:
        """Make the call, and tell `model` of it."""
        if self.verb == "insert":
            policy.insert(self.key, parent=self.parent, size=self.size, now=self.now, priority=self.priority)
            model.insert(self.key, parent=self.parent, size=self.size, priority=self.priority)
        elif self.verb == "touch":
            policy.touch(self.key, self.now)
        else:
            policy.remove(self.key)
            model.remove(self.key)


class Walk:
    """A seeded history: entries of two namespaces and none, in trees, put in and taken out in any order."""

    def __init__(self, seed: int) -> None:
        self.random: random.Random = random.Random(seed)  # replayable on purpose
        self._now = 0.0

    def steps(self, count: int) -> Iterator[Step]:
        """Yield `count` steps; a parent always stands before its children in `POOL`, so there are no circles."""
        for _ in range(count):
            self._now += self.random.choice((0.0, 0.5, 1.0))
            place = self.random.randrange(len(POOL))
            key = POOL[place]
            verb = self.random.choices(("insert", "touch", "remove"), (6, 3, 1))[0]
            if verb == "insert":
                near = [other for other in POOL[max(0, place - 6) : place] if share_of(other) == share_of(key)]
                parent = self.random.choice([None, *near]) if near else None
                size, priority = self.random.choice((0, 1, 1, 2, 5)), self.random.choice((0, 0, 0, 1, -1))
                yield Step("insert", key, self._now, parent, size, priority)
            else:
                yield Step("touch" if verb == "touch" else "remove", key, self._now)

    def question(self, model: PolicyModel) -> tuple[int, Callable[[str], bool], Callable[[str], bool] | None]:
        """Return the arguments of a call to `victims`: need, protected, over_share."""
        total = sum(entry.size for entry in model.entries.values())
        need = self.random.randint(0, total + 1)
        protected: Callable[[str], bool] = nothing
        over_share: Callable[[str], bool] | None = None
        if self.random.random() < 0.5:
            protected = set(self.random.sample(POOL, self.random.randint(1, 4))).__contains__
        if self.random.random() < 0.5:
            over = {share for share in ("beef", "cafe") if self.random.random() < 0.5}
            blobs = {key for key in POOL if not share_of(key) and self.random.random() < 0.5}
            over_share = {key for key in POOL if share_of(key).lstrip("0") in over or key in blobs}.__contains__
        return need, protected, over_share


def steps_per_operation(policy: Policy, entries: int) -> float:
    """Return the steps of one round of insert, touch, victims and removal, with about `entries` entries resident."""
    steps, draw = Steps(), random.Random(1)  # replayable on purpose
    keys: list[str] = []
    now = 0.0

    def grow() -> None:
        nonlocal now
        now += 1.0
        place = len(keys)
        parent = keys[place - 1] if place % DEPTH else None
        keys.append(f"key{place}")
        policy.insert(keys[place], parent=parent, size=1, now=Instant.at(now, steps))

    def turn_over() -> None:
        for _ in range(OPERATIONS):
            policy.admit("next", size=1, now=Instant.at(now, steps))
            for victim in policy.victims(2, protected=pinned.__contains__):
                policy.remove(victim)
            grow()
            grow()
            for _ in range(2):
                policy.touch(keys[draw.randrange(max(0, len(keys) - entries), len(keys))], Instant.at(now, steps))

    pinned = {f"key{DEPTH - 1}"}
    for _ in range(entries):
        grow()
    for _ in range(entries // 4):
        policy.touch(keys[draw.randrange(entries)], Instant.at(now, steps))
    return median(steps.of(turn_over) for _ in range(ROUNDS)) / OPERATIONS
