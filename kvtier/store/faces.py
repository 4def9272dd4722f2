"""What a model must satisfy before it may use a store's tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.chunk.container import payload_offset, payload_size, plan_segments
from kvtier.chunk.dtypes import raw_size
from kvtier.chunk.layout import KVLayout
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.keys import Namespace

_KEY = "k" * 66  # as long as the key of a chunk


def check_layout(layout: object) -> None:
    """Raise `ConfigError` for what is no layout."""
    if not isinstance(layout, KVLayout):
        raise ConfigError(
            f"layout is a {type(layout).__name__}; give kvtier.KVLayout(...) or KVLayout.from_config(model.config)"
        )


def check_namespace(namespace: Namespace, *, outliving: Sequence[str]) -> None:
    """Check that what is stored under a namespace can be told from another checkpoint's KV.

    Args:
        namespace: the model's.
        outliving: names of the tiers that outlive the process or are shared with others.

    Raises:
        ConfigError: a bare model name on such a tier.
    """
    if outliving and not namespace.persistent_ok:
        raise ConfigError(
            f"namespace {namespace.model!r} has neither revision nor weights, but tier {outliving[0]!r} outlives this "
            "process: another checkpoint of that name would be served this one's KV; give revision=..., weights=..., "
            "or Namespace.from_model(model)"
        )


def largest_object(layout: KVLayout, chunk_tokens: int) -> int:
    """Return the bytes of the largest object that one chunk is stored as."""
    sizes = []
    for group in layout.groups:
        specs = layout.specs(group.name, tokens=chunk_tokens, first_token=0)
        segments = plan_segments(specs, [raw_size(spec.dtype, spec.shape) for spec in specs])
        sizes.append(payload_offset(specs, _KEY) + payload_size(segments))
    return max(sizes)


def check_room(layout: KVLayout, chunk_tokens: int, *, capacities: Mapping[str, int]) -> None:
    """Check that every tier can hold at least one chunk.

    Raises:
        ConfigError: naming the first tier that cannot.
    """
    size = largest_object(layout, chunk_tokens)
    for name, capacity in capacities.items():
        if capacity < size:
            raise ConfigError(
                f"tier {name!r} has a capacity of {capacity} bytes: not even one chunk of {chunk_tokens} tokens, which "
                f"takes {size} in this layout"
            )
