"""The half of a policy that `Leaves` answers: what goes, in which order; a policy adds where entries rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.policies.base import Policy, nothing
from kvtier.policies.leaves import Leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class LeafPolicy(Policy):
    """A policy that orders entries by a rank of their own. Subclasses define `insert` and `touch`."""

    def __init__(self, leaves: Leaves | None = None) -> None:
        self._leaves = Leaves() if leaves is None else leaves

    def remove(self, key: str) -> None:
        """Forget `key`; its parent may become the next to go."""
        self._leaves.remove(key)

    def victims(
        self, need: int, *, protected: Callable[[str], bool] = nothing, over_share: Callable[[str], bool] | None = None
    ) -> Sequence[str]:
        """Name the lowest-ranked leaves, and parents whose children were all named before."""
        return self._leaves.victims(need, protected=protected, over_share=over_share)

    def coldest_first(self) -> Iterator[str]:
        """Iterate a snapshot of all keys in the order of `victims`."""
        return self._leaves.coldest_first()

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, key: object) -> bool:
        return key in self._leaves
