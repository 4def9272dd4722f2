"""One get of a batch, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvtier.keys import Hint, PrefixLike
    from kvtier.store.results import OutKV


@dataclass(frozen=True, slots=True)
class GetRequest:
    """One get within `get_many`: its arguments are the same as `KVStore.get` takes."""

    prefix: PrefixLike
    start: int = 0
    max_tokens: int | None = None
    out: OutKV | None = None
    device: str | torch.device | None = None
    hint: Hint | None = None
    min_benefit_seconds: float | None = None
