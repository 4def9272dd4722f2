"""KV between callers' tensors and stored values: one strided copy each way, in threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.chunk.tensors import tensor_over
from kvtier.chunk.transfer import Copies
from kvtier.codecs.chain import chain_from_refs
from kvtier.store.exchange import TensorTarget, token_axis
from kvtier.tier.encode import decode_segments

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvtier.store.exchange import Target
    from kvtier.store.results import KV
    from kvtier.tier.services import Services
    from kvtier.tier.value import Value


def deliver_part(value: Value, services: Services, target: Target, first: int, stop: int) -> None:
    """Copy the tokens [first, stop) of a value, which holds them all, to their place in the target.

    Raises:
        CodecError: stored bytes that do not decode.
    """
    copies = Copies()
    deliver_tokens(value, services, target, first, stop, copies=copies)
    copies.run()


def deliver_tokens(value: Value, services: Services, target: Target, first: int, stop: int, *, copies: Copies) -> None:
    """As `deliver_part`, but what needs no decoding is added to `copies`, which the caller runs.

    Raises:
        CodecError: stored bytes that do not decode.
    """
    if _decode_in_place(value, services, target, first, stop):
        return
    for segment, view in zip(value.header.segments, _raw_views(value, services), strict=True):
        spec = segment.spec
        source = tensor_over(view, spec).narrow(token_axis(spec), first - spec.first_token, stop - first)
        target.take(spec, source, first, copies)
    if value.header.chain:
        copies.run()  # out of this thread's buffer, which the next value needs


def _decode_in_place(value: Value, services: Services, target: Target, first: int, stop: int) -> bool:
    """Decode a value that is wanted whole straight into the caller's tensors; tell whether that was possible."""
    if not isinstance(target, TensorTarget) or not value.header.chain:
        return False
    parts = []
    for segment in value.header.segments:
        axis = token_axis(segment.spec)
        part = target.part(segment.spec, first, stop)
        if part.shape[axis] != segment.spec.shape[axis] or part.device.type != "cpu" or part.is_inference():
            return False
        parts.append(part)
    chain = chain_from_refs(value.header.chain, services.load_codec)
    if not chain.takes_tensors:
        return False
    for segment, view, part in zip(value.header.segments, value.views(), parts, strict=True):
        chain.decode_tensor(view, part, segment.spec, services.scratch)
    return True


def _raw_views(value: Value, services: Services) -> list[memoryview]:
    """Return the segments' raw bytes: the value's own, or decoded into this thread's buffer."""
    if not value.header.chain:
        return value.views()
    views = services.buffers.views([segment.raw for segment in value.header.segments])
    decode_segments(value, services, views)
    return views


def short_form(kv: Mapping[str, Mapping[str, torch.Tensor]]) -> KV:
    """Leave the group's name out where there is one group only."""
    return next(iter(kv.values())) if len(kv) == 1 else kv


def to_device(
    kv: Mapping[str, Mapping[str, torch.Tensor]], device: str | torch.device
) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return copies on a device; what is there already stays as it is."""
    return {group: {name: tensor.to(device) for name, tensor in part.items()} for group, part in kv.items()}
