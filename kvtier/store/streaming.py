"""A cached prefix part by part, in order, without holding more than what is under way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.chunk.dtypes import raw_size
from kvtier.chunk.tensors import tensor_over
from kvtier.errors import CodecError
from kvtier.store.copies import deliver_part
from kvtier.store.damage import drop_undecodable
from kvtier.store.exchange import TensorTarget, token_axis
from kvtier.store.fitting import Fitting
from kvtier.store.loads import Loads, touch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    import torch

    from kvtier.chunk.layout import KVLayout
    from kvtier.chunk.segments import SegmentSpec
    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine
    from kvtier.store.plan import Piece
    from kvtier.store.prefixes import Cached
    from kvtier.tier.value import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens [start, stop) of one layer group: one chunk of all its layers, or (with `layer`) one layer of all chunks.

    Attributes:
        group: name of the layer group.
        start: position of the first token in `kv`.
        stop: position behind the last one.
        kv: tensors as the layout shapes them; by layer, without the layer axis.
        layer: the layer's index in the model; None by chunk.
        lossy: whether a lossy codec was in play.
    """

    group: str
    start: int
    stop: int
    kv: Mapping[str, torch.Tensor]
    layer: int | None = None
    lossy: bool = False


async def stream_chunks(
    engine: Engine, layout: KVLayout, cached: Cached, *, start: int, deadline: Deadline
) -> AsyncIterator[Part]:
    """Yield the chunks of [start, usable length) in order; what cannot be read ends the stream."""
    length = cached.usable()
    pieces = cached.plan.needed(start, length) if length > start else []
    fitting = Fitting(engine, layout, cached.plan)
    with Loads(engine, [cached.where[piece] for piece in pieces]) as loads:
        for i, piece in enumerate(pieces):
            value = await loads.value(i, deadline)
            if value is None or not fitting.fits(piece, value):
                return
            specs = _wanted(layout, cached, piece, start=start, length=length)
            part = await _copy_out(engine, piece, specs, value, deadline)
            loads.drop(i)
            if part is None:
                return
            touch(engine, [cached.plan.key(piece)])
            yield part


def _wanted(layout: KVLayout, cached: Cached, piece: Piece, *, start: int, length: int) -> tuple[SegmentSpec, ...]:
    """Return the shape of the tokens of one chunk that lie in [start, length) and in the group's window."""
    plan = cached.plan
    first = max(plan.start(piece.span), start, plan.window_start(layout.group(piece.group), length))
    return layout.specs(piece.group, tokens=min(plan.stop(piece.span), length) - first, first_token=first)


async def _copy_out(
    engine: Engine, piece: Piece, specs: Sequence[SegmentSpec], value: Value, deadline: Deadline
) -> Part | None:
    """Copy the wanted tokens of one chunk into recycled memory; None if there is none, or it does not decode."""
    first = specs[0].first_token
    stop = first + specs[0].shape[token_axis(specs[0])]
    views = await engine.result_views([raw_size(spec.dtype, spec.shape) for spec in specs], deadline)
    if views is None:
        return None
    kv = {spec.name: tensor_over(view, spec) for spec, view in zip(specs, views, strict=True)}
    try:
        await engine.services.workers.run(deliver_part, value, engine.services, TensorTarget(first, kv), first, stop)
    except CodecError as exc:
        drop_undecodable(engine, value, exc)
        return None
    return Part(group=piece.group, start=first, stop=stop, kv=kv, lossy=value.header.lossy)
