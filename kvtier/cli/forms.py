"""A stored entry brought into another tier's form: only the missing codec steps done, or only the surplus undone."""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtier import registry
from kvtier.chunk.container import PAGE, payload_size, plan_segments, seal, segment_view
from kvtier.cli.stored import Container
from kvtier.codecs.chain import Scratch, chain_from_refs
from kvtier.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.chunk.header import Header
    from kvtier.chunk.segments import SegmentSpec
    from kvtier.codecs.chain import CodecChain

    Step = Callable[[memoryview, memoryview, SegmentSpec], int]  # from the one form to the other; the bytes written


def in_form(entry: Container, chain: CodecChain) -> Container:
    """Return the entry as a tier with this chain stores it: itself where nothing is to be done.

    A value whose codecs neither begin the chain nor go on from it keeps its form, as it does in a store: an entry
    names its own codecs, and a lossy step is never done twice.

    Raises:
        CodecError: bytes that do not decode, or a value that a codec refuses.
    """
    whole, scratch = chain_from_refs(entry.header.chain, registry.codecs.load), Scratch()
    segments = entry.header.segments
    views = [segment_view(entry.stored, entry.header, segment) for segment in segments]
    if len(whole) < len(chain) and chain.extends(whole):
        steps = chain.missing_after(whole.refs)
        room = [steps.bound(len(view), segment.spec) for view, segment in zip(views, segments, strict=True)]
        header = replace(entry.header, chain=chain.refs, lossy=entry.header.lossy or steps.lossy)
        return _remade(header, views, room, lambda view, into, spec: steps.encode(view, into, spec, scratch))
    if len(whole) > len(chain) and whole.extends(chain):
        surplus = whole.missing_after(chain.refs) if len(chain) else whole
        room = [
            _size_before(surplus, chain, segment.raw, view, segment.spec)
            for view, segment in zip(views, segments, strict=True)
        ]

        def undo(view: memoryview, into: memoryview, spec: SegmentSpec) -> int:
            surplus.decode(view, into, spec, scratch)
            return len(into)

        return _remade(replace(entry.header, chain=chain.refs), views, room, undo)
    return entry


def _size_before(surplus: CodecChain, chain: CodecChain, raw: int, view: memoryview, spec: SegmentSpec) -> int:
    """Return the stored size under `chain` alone; what the bytes claim is capped before anything is allocated."""
    if not len(chain):
        return raw
    size = surplus.decoded_size(view)
    if size > chain.bound(raw, spec):
        raise CodecError(f"segment {spec.name!r} claims {size} bytes; its codecs never make that many")
    return size


def _remade(header: Header, views: Sequence[memoryview], room: Sequence[int], step: Step) -> Container:
    """Return a new container: each segment's other form right behind the one before."""
    offset, stored = header.payload_offset, []
    whole = memoryview(mmap.mmap(-1, offset + sum(-(-size // PAGE) * PAGE for size in room)))
    end = offset
    for view, size, segment in zip(views, room, header.segments, strict=True):
        stored.append(step(view, whole[end : end + size], segment.spec))
        end += -(-stored[-1] // PAGE) * PAGE
    segments = plan_segments([segment.spec for segment in header.segments], stored)
    size = offset + payload_size(segments)
    return Container(seal(whole, replace(header, segments=segments), payload_offset=offset, size=size), whole[:size])
