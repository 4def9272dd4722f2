"""Whether a value is what a prefix asks for: this layout's chunk of KV, and exact where only that is served."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.chunk.layout import KVLayout
    from kvtier.chunk.segments import SegmentSpec
    from kvtier.store.engine import Engine
    from kvtier.store.plan import Piece, PrefixPlan
    from kvtier.tier.value import Value


class Fitting:
    """The check of one call. A lease looks at hundreds of chunks, so values remember what they were found to fit."""

    def __init__(self, engine: Engine, layout: KVLayout, plan: PrefixPlan) -> None:
        self._lossless = engine.settings.lossless
        self._layout = layout
        self._plan = plan
        self._wanted: dict[tuple[str, int], tuple[SegmentSpec, ...]] = {}

    def fits(self, piece: Piece, value: Value) -> bool:
        """Tell whether `value` may be served as `piece`: one of another kind, or a lossy one, is as good as none."""
        header, first = value.header, self._plan.start(piece.span)
        if header.kind != "kv" or (self._lossless and header.lossy):
            return False
        length = (piece.group, self._plan.stop(piece.span) - first)
        wanted = self._wanted.get(length)
        if wanted is None:
            wanted = self._wanted[length] = _shapes(self._layout, *length)
        known = value.fits
        if known is not None and known[0] is wanted and known[1] == first:
            return True
        segments = header.segments
        if len(segments) != len(wanted):
            return False
        for segment, spec in zip(segments, wanted, strict=True):  # asked for every chunk
            if not _same(segment.spec, spec, first):
                return False
        value.fits = (wanted, first)
        return True


@functools.lru_cache(maxsize=1024)
def _shapes(layout: KVLayout, group: str, tokens: int) -> tuple[SegmentSpec, ...]:
    """Return what so many tokens look like; of equal layouts the same object, by which values remember it."""
    return layout.specs(group, tokens=tokens, first_token=0)


def _same(spec: SegmentSpec, wanted: SegmentSpec, first_token: int) -> bool:
    return (
        spec.first_token == first_token
        and spec.shape == wanted.shape
        and spec.dtype == wanted.dtype
        and spec.name == wanted.name
        and spec.axes == wanted.axes
    )
