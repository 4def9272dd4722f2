"""What the quantising codecs share: which tensors, how the stored segment is laid out, which route does the work."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from kvtier.chunk.dtypes import raw_size
from kvtier.chunk.memory import copy_bytes
from kvtier.chunk.serial import on_this_thread
from kvtier.chunk.tensors import tensor_over, torch_dtype
from kvtier.codecs import device, eager, fast
from kvtier.codecs.base import TensorCodec
from kvtier.codecs.plan import HEADER, Plan, Scheme, plan_for
from kvtier.errors import CodecError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.chunk.segments import CodecOption, SegmentSpec

_EXACT, _QUANTISED = b"E", b"Q"
_HEADER = struct.Struct("<cB6xQ48x")  # form, format, number of elements kept exactly behind the codes
GROUP = 64  # the length that a scheme's groups are given for
LEAST_GROUP, MOST_GROUP, MOST_SINKS = 16, 256, 64


class QuantisedCodec(TensorCodec):
    """A scheme for keys and one for values, per layer and head; see docs/concepts/codecs.md for the stored form.

    Only segments "k" and "v" of bfloat16, float16 or float32 numbers are quantised; whatever else, and what would not
    get smaller, is stored exactly. The limits of every group are stored as they are, in the element type: they decode
    to themselves, so a decoded value encodes to the same limits and codes again. A group with a number that is not
    finite, or of 2**126 and more, is stored exactly.

    Args:
        group: the length of a group where the scheme has groups, 16 to 256; `k5v4`'s groups of keys are twice as long.
        sinks: tokens at the very start of a prompt that are stored exactly, 0 to 64: attention rests on them.

    Raises:
        ConfigError: an option out of range.
    """

    lossy = True
    form: ClassVar[int] = 1  # of what is stored; a segment in another one is refused
    keys: ClassVar[Scheme]
    values: ClassVar[Scheme]

    def __init__(self, *, group: int = GROUP, sinks: int = 4) -> None:
        _check(self.name, "group", group, LEAST_GROUP, MOST_GROUP)
        _check(self.name, "sinks", sinks, 0, MOST_SINKS)
        self._group = group
        self._sinks = sinks
        self._keys, self._values = (
            replace(scheme, group=scheme.group * group // GROUP) for scheme in (self.keys, self.values)
        )

    def options(self) -> Mapping[str, CodecOption]:
        """Return group and sinks; the rest follows from the codec's name and the segment."""
        return {"group": self._group, "sinks": self._sinks}

    def plan(self, spec: SegmentSpec) -> Plan | None:
        """Return how a segment is laid out, None if it is stored exactly."""
        return plan_for(spec, self._keys, self._values, self._sinks)

    def bound(self, size: int, spec: SegmentSpec) -> int:  # noqa: ARG002  # the contract's signature
        """Return the size of the exact form, which is taken where the quantised one is not smaller."""
        return HEADER + size

    def encode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> int:
        """Quantise dense elements; a `source` of another length than `spec` tells is a `CodecError`."""
        if spec.dtype != "bytes" and len(source) != raw_size(spec.dtype, spec.shape):
            raise CodecError(f"{self.name}: {len(source)} bytes are no {spec.dtype} {list(spec.shape)}")
        if self.plan(spec) is None:
            _HEADER.pack_into(into, 0, _EXACT, self.form, 0)
            copy_bytes(source, into[HEADER : HEADER + len(source)])
            return HEADER + len(source)
        return self.encode_tensor(tensor_over(_writable(source), spec), into, spec)

    def encode_tensor(self, source: torch.Tensor, into: memoryview, spec: SegmentSpec) -> int:
        """Quantise a tensor of any strides: a host's here, another device's there."""
        plan = self.plan(spec)
        if source.device.type != "cpu":
            if plan is not None and _quantise_there(source, plan, _Parts(into, plan, spec.dtype), spec.axes):
                _HEADER.pack_into(into, 0, _QUANTISED, self.form, 0)
                return plan.size
            source = source.cpu()
        parts = _Parts(into, plan, spec.dtype) if plan is not None else None
        if plan is not None and parts is not None:
            blocks = _blocks(source, spec.axes)
            end = on_this_thread(lambda: _quantise(blocks, plan, parts))
            if end < HEADER + source.nbytes:
                kept = (end - plan.size) // plan.itemsize
                _HEADER.pack_into(into, 0, _QUANTISED, self.form, kept)
                return end
        _HEADER.pack_into(into, 0, _EXACT, self.form, 0)
        target = torch.frombuffer(into, dtype=torch.uint8, count=source.nbytes, offset=HEADER)
        on_this_thread(lambda: target.view(source.dtype).view(source.shape).copy_(source))
        return HEADER + source.nbytes

    def decode(self, source: memoryview, into: memoryview, spec: SegmentSpec) -> None:
        """Fill `into` with dense elements."""
        if len(source) < HEADER:
            raise CodecError(f"{self.name}: {len(source)} bytes are no stored segment")
        if source[:1] == _EXACT:
            self._kept_count(source, HEADER + len(into), itemsize=0)
            copy_bytes(source[HEADER:], into)
            return
        if spec.dtype == "bytes" or len(into) != raw_size(spec.dtype, spec.shape):
            raise CodecError(f"{self.name}: {len(into)} bytes are no {spec.dtype} {list(spec.shape)}")
        self.decode_tensor(source, tensor_over(into, spec), spec)

    def decode_tensor(self, source: memoryview, into: torch.Tensor, spec: SegmentSpec) -> None:
        """Fill a host tensor of any strides; what is no stored form of `spec` is a `CodecError`."""
        if source[:1] == _EXACT:
            self._kept_count(source, HEADER + into.nbytes, itemsize=0)
            dense = torch.frombuffer(_writable(source), dtype=into.dtype, offset=HEADER).view(into.shape)
            on_this_thread(lambda: into.copy_(dense))
            return
        plan = self.plan(spec)
        if plan is None or source[:1] != _QUANTISED:
            raise CodecError(f"{self.name}: not a stored form of {spec.dtype} {list(spec.shape)} {spec.name!r}")
        kept = self._kept_count(source, plan.size, itemsize=plan.itemsize)
        parts = _Parts(_writable(source), plan, spec.dtype)
        blocks = _blocks(into, spec.axes)
        on_this_thread(lambda: _restore(blocks, plan, parts, kept))
        if blocks.data_ptr() != into.data_ptr():
            into.copy_(blocks.view(into.shape))

    def _kept_count(self, source: memoryview, size: int, *, itemsize: int) -> int:
        """Return how many elements follow the `size` bytes of the fixed form; raise if the length disagrees."""
        if len(source) < size or len(source) < HEADER:
            raise CodecError(f"{self.name}: {len(source)} bytes where {size} must be")
        kept: int
        form, version, kept = _HEADER.unpack_from(source)
        if version != self.form or _HEADER.pack(form, version, kept) != source[:HEADER]:
            raise CodecError(f"{self.name}: stored in a form that this version does not read")
        if len(source) != size + kept * itemsize or (kept and not itemsize):
            raise CodecError(f"{self.name}: {len(source)} bytes where {size} and {kept} elements must be")
        return kept


def _check(codec: str, option: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{codec}: {option} is {value!r}; give a whole number from {least} to {most}")


def _writable(view: memoryview) -> memoryview:
    """Return `view`, or a copy of read-only bytes, over which torch would warn to make a tensor."""
    return memoryview(bytearray(view)) if view.readonly else view


class _Parts:
    """Tensors over the parts of a stored segment, made when they are asked for: the fast route needs few of them."""

    def __init__(self, stored: memoryview, plan: Plan, dtype_name: str) -> None:
        self._whole = torch.frombuffer(stored, dtype=torch.uint8)
        self._plan = plan
        self.dtype: torch.dtype = torch_dtype(dtype_name)

    @property
    def address(self) -> int:
        return self._whole.data_ptr()

    @property
    def sinks(self) -> torch.Tensor:
        plan = self._plan
        sinks = self._whole[HEADER : plan.limits_at].view(self.dtype)
        return sinks.view(plan.blocks, plan.sinks, plan.channels)

    @property
    def limits(self) -> torch.Tensor:
        limits = self._whole[self._plan.limits_at : self._plan.codes_at].view(eager.BITS[self.dtype].integer)
        return limits.view(self._plan.limit_shape)

    @property
    def planes(self) -> list[torch.Tensor]:
        plan, planes = self._plan, []
        for start, rows in zip(plan.planes_at, plan.plane_rows, strict=True):
            shape = (plan.blocks, rows, plan.channels)
            planes.append(self._whole[start : start + math.prod(shape)].view(shape))
        return planes

    @property
    def rest(self) -> torch.Tensor:
        return self._whole[self._plan.size :]


def _blocks(tensor: torch.Tensor, axes: str) -> torch.Tensor:
    """Return [..., tokens, channels] with dense rows: a view where the strides allow it, else a dense copy."""
    blocks = tensor
    if axes == "LTHD":
        layers, tokens, heads, head = tensor.shape
        if heads > 1 and tensor.stride(2) != head:
            blocks = tensor.contiguous()
        blocks = blocks.as_strided(
            (layers, tokens, heads * head),
            (blocks.stride(0), blocks.stride(1), blocks.stride(3)),
        )
    return blocks if blocks.stride(-1) == 1 else blocks.contiguous()


def _flat(blocks: torch.Tensor) -> torch.Tensor:
    """Return [blocks, tokens, channels]: a view where the strides allow it, else a dense copy."""
    return blocks if blocks.dim() == 3 else blocks.flatten(0, 1)  # noqa: PLR2004  # else LHTD


def _quantise(blocks: torch.Tensor, plan: Plan, parts: _Parts) -> int:
    """Write sinks, limits, codes and what is kept exactly; return the end of it all, or the exact form's size."""
    rows = blocks.narrow(-2, plan.sinks, plan.rows)
    if plan.sinks:
        parts.sinks.view(*blocks.shape[:-2], plan.sinks, plan.channels).copy_(blocks.narrow(-2, 0, plan.sinks))
    kernel = fast.encoder(plan, blocks.dtype)
    if kernel is not None:
        marked = kernel(rows, plan, parts.address)
    else:
        marked = eager.encode(_flat(rows), plan, parts.limits, parts.planes)
    if not marked:
        return plan.size
    mask = eager.marked_elements(plan, parts.limits)
    marks = parts.limits == eager.MARK
    dense = _flat(rows).clone()
    kept = dense[mask]
    if plan.size + kept.nbytes >= HEADER + blocks.nbytes:
        return HEADER + blocks.nbytes
    eager.encode(dense.masked_fill_(mask, 0), plan, parts.limits, parts.planes)
    parts.limits.masked_fill_(marks, eager.MARK)
    parts.rest[: kept.nbytes].copy_(kept.view(torch.uint8))  # as bytes: an odd number of codes may lie before it
    return plan.size + kept.nbytes


def _quantise_there(source: torch.Tensor, plan: Plan, parts: _Parts, axes: str) -> bool:
    """Quantise on the tensor's device and copy the result; False if something is kept exactly, which is rare."""
    blocks = _blocks(source, axes)
    blocks = blocks.reshape(plan.blocks, plan.tokens, plan.channels)
    marked, limits, planes = device.encode(blocks[:, plan.sinks :], plan)
    if marked:
        return False
    parts.sinks.copy_(blocks[:, : plan.sinks])
    parts.limits.copy_(limits)
    for plane, found in zip(parts.planes, planes, strict=True):
        plane.copy_(found)
    return True


def _restore(blocks: torch.Tensor, plan: Plan, parts: _Parts, kept: int) -> None:
    rows = blocks.narrow(-2, plan.sinks, plan.rows)
    if plan.sinks:
        blocks.narrow(-2, 0, plan.sinks).copy_(parts.sinks.view(*blocks.shape[:-2], plan.sinks, plan.channels))
    kernel = fast.decoder(plan, blocks.dtype)
    if kernel is not None:
        kernel(rows, plan, parts.address)
    else:
        flat = _flat(rows)
        eager.decode(flat, plan, parts.limits, parts.planes)
        if flat.data_ptr() != rows.data_ptr():
            rows.copy_(flat.view(rows.shape))
    if not kept:
        return
    mask = eager.marked_elements(plan, parts.limits)
    if int(mask.sum()) != kept:
        raise CodecError(f"{kept} elements were kept exactly, {int(mask.sum())} are marked")
    exact = torch.empty(kept, dtype=parts.dtype)
    exact.view(torch.uint8).copy_(parts.rest)
    rows.masked_scatter_(mask.view(rows.shape), exact)
