"""Values from one tier's stored form to another's: only the missing codec steps, in a slot of their own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvtier.chunk.container import PAGE, payload_size, plan_segments
from kvtier.codecs.chain import CodecChain, chain_from_refs
from kvtier.errors import CodecError
from kvtier.tier.value import Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvtier.buffers.arena import Slot
    from kvtier.chunk.header import Header
    from kvtier.chunk.segments import Segment
    from kvtier.tier.memory import MemoryTier
    from kvtier.tier.services import Services
    from kvtier.tier.stored import StoredTier


def missing_steps(chain: CodecChain, value: Value) -> CodecChain:
    """Return the steps from the value's form to the chain's; none if the value took another road.

    An entry names its own codecs, so a value that cannot be brought to the tier's form is stored in the form it has:
    a lossy step is never undone and applied again.
    """
    try:
        return chain.missing_after(value.header.chain)
    except CodecError:
        return CodecChain()


async def encoded_for(
    chain: CodecChain, value: Value, services: Services, *, timeout: float, background: bool = False
) -> Value:
    """Return `value` in the chain's form, with a reference for the caller: itself where nothing is to be done.

    Raises:
        CodecError: a codec refuses the value.
        TimeoutError: no memory for the result within `timeout` seconds.
    """
    steps = missing_steps(chain, value)
    if not len(steps):
        return value.retain()
    bounds = [steps.bound(segment.stored, segment.spec) for segment in value.header.segments]
    size = value.payload_offset + sum(-(-bound // PAGE) * PAGE for bound in bounds)
    slot = await services.arena.allocate(size, timeout=timeout)
    try:
        run = services.workers.run_background if background else services.workers.run
        return await run(_encode, steps, value, slot, services)
    except BaseException:
        slot.release()
        raise


def _encode(steps: CodecChain, value: Value, slot: Slot, services: Services) -> Value:
    """Encode segment after segment, each right behind the one before, then give the unused pages back."""
    stored: list[int] = []
    end = value.payload_offset
    for segment, view in zip(value.header.segments, value.views(), strict=True):
        room = slot.view(end, steps.bound(segment.stored, segment.spec))
        stored.append(steps.encode(view, room, segment.spec, services.scratch))
        end += -(-stored[-1] // PAGE) * PAGE
    segments = plan_segments([segment.spec for segment in value.header.segments], stored)
    size = value.payload_offset + payload_size(segments)
    slot.trim(size)
    header = dataclasses.replace(
        value.header,
        segments=segments,
        chain=(*value.header.chain, *steps.refs),
        lossy=value.header.lossy or steps.lossy,
    )
    return Value(header, slot, payload_offset=value.payload_offset, size=size, sealed=False)


def shared_steps(tiers: Sequence[MemoryTier | StoredTier]) -> CodecChain | None:
    """Return the first tier's chain where values can be put in its form at once: every other chain goes on from it.

    None where that would save nothing, or where some tier keeps another form.
    """
    first = tiers[0].chain
    return first if first.takes_tensors and all(tier.chain.extends(first) for tier in tiers) else None


def bound_of(steps: CodecChain, header: Header) -> int:
    """Return the most payload bytes that a raw value takes in the chain's form."""
    return sum(-(-steps.bound(segment.raw, segment.spec) // PAGE) * PAGE for segment in header.segments)


def encode_from(tensors: Sequence[torch.Tensor], steps: CodecChain, value: Value, services: Services) -> bool:
    """Encode tensors where they lie into a new value's slot: the snapshot is the encoding.

    Returns False, with the value as it was, if a codec refuses them.
    """
    header, stored, end = value.header, [], value.payload_offset
    try:
        for segment, tensor in zip(header.segments, tensors, strict=True):
            room = value.slot.view(end, steps.bound(segment.raw, segment.spec))
            stored.append(steps.encode_tensor(tensor, room, segment.spec, services.scratch))
            end += -(-stored[-1] // PAGE) * PAGE
    except CodecError:
        return False
    segments = plan_segments([segment.spec for segment in header.segments], stored)
    value.header = dataclasses.replace(header, segments=segments, chain=steps.refs, lossy=header.lossy or steps.lossy)
    value.size = value.payload_offset + payload_size(segments)
    value.slot.trim(value.size)
    return True


def decode_segments(value: Value, services: Services, into: list[memoryview]) -> None:
    """Decode every segment wholly into the views given, each of the segment's raw length.

    Raises:
        CodecError: stored bytes that do not decode; the value's checksums were right, so it was written so.
    """
    chain = chain_from_refs(value.header.chain, services.load_codec)
    for segment, view, target in zip(value.header.segments, value.views(), into, strict=True):
        chain.decode(view, target, segment.spec, services.scratch)


async def raised_for(
    chain: CodecChain, value: Value, services: Services, *, timeout: float, background: bool = False
) -> Value:
    """Return `value` in an upper tier's form, with a reference for the caller: only the surplus steps are undone.

    A value whose steps do not begin with the chain's is returned as it is.

    Raises:
        CodecError, TimeoutError: as `encoded_for`.
    """
    whole = chain_from_refs(value.header.chain, services.load_codec)
    if len(whole) == len(chain) or not whole.extends(chain):
        return value.retain()
    surplus = whole.missing_after(chain.refs)
    sizes = [
        _size_before(surplus, chain, segment, view)
        for segment, view in zip(value.header.segments, value.views(), strict=True)
    ]
    segments = plan_segments([segment.spec for segment in value.header.segments], sizes)
    size = value.payload_offset + payload_size(segments)
    slot = await services.arena.allocate(size, timeout=timeout)
    header = dataclasses.replace(value.header, chain=chain.refs, segments=segments)
    raised = Value(header, slot, payload_offset=value.payload_offset, size=size, sealed=False)
    try:
        run = services.workers.run_background if background else services.workers.run
        await run(_undo, surplus, value, raised, services)
    except BaseException:
        slot.release()
        raise
    return raised


def _size_before(surplus: CodecChain, chain: CodecChain, segment: Segment, view: memoryview) -> int:
    """Return the stored size under `chain` alone; what the bytes claim is capped before anything is allocated."""
    if not len(chain):
        return segment.raw
    size = surplus.decoded_size(view)
    if size > chain.bound(segment.raw, segment.spec):
        raise CodecError(f"segment {segment.spec.name!r} claims {size} bytes; its codecs never make that many")
    return size


def _undo(surplus: CodecChain, value: Value, raised: Value, services: Services) -> None:
    for segment, view, into in zip(value.header.segments, value.views(), raised.views(), strict=True):
        surplus.decode(view, into, segment.spec, services.scratch)


async def decoded(value: Value, services: Services, *, timeout: float) -> Value:
    """Return `value` without any codec, with a reference for the caller: itself where nothing is to be done.

    Raises:
        CodecError, TimeoutError: as `encoded_for`.
    """
    return await raised_for(CodecChain(), value, services, timeout=timeout)


def raw_header(header: Header) -> Header:
    """Return the header of the decoded value; it stays lossy if it was."""
    specs = [segment.spec for segment in header.segments]
    raw = plan_segments(specs, [segment.raw for segment in header.segments])
    return dataclasses.replace(header, chain=(), segments=raw)
