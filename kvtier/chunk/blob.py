"""What a caller may store under a key: a tensor, named tensors, or bytes, and how it comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvtier.chunk.dtypes import dtype_name, raw_size
from kvtier.chunk.memory import copy_bytes
from kvtier.chunk.segments import SegmentSpec
from kvtier.chunk.tensors import dense, tensor_over
from kvtier.chunk.transfer import copy_in
from kvtier.errors import InvalidValueError

if TYPE_CHECKING:
    from kvtier.chunk.header import Header

Blob: TypeAlias = torch.Tensor | Mapping[str, torch.Tensor] | bytes | bytearray | memoryview
Value: TypeAlias = torch.Tensor | dict[str, torch.Tensor] | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobParts:
    """A blob taken apart, nothing copied: `sources[i]` holds the elements that `specs[i]` describes, in any strides."""

    kind: str
    specs: tuple[SegmentSpec, ...]
    sources: tuple[torch.Tensor | memoryview, ...]

    @property
    def raw(self) -> int:
        """Bytes of all parts, without the storage behind them."""
        return sum(raw_size(spec.dtype, spec.shape) for spec in self.specs)


def describe_blob(blob: object) -> BlobParts:
    """Take a blob apart without copying.

    Raises:
        InvalidValueError: not a tensor, mapping of named tensors, or bytes-like; or a tensor that is not dense.
    """
    if isinstance(blob, torch.Tensor):
        source = dense(blob)
        return BlobParts(kind="tensor", specs=(_spec("", source),), sources=(source,))
    if isinstance(blob, bytes | bytearray | memoryview):
        view = _bytes_of(blob)
        spec = SegmentSpec(name="", dtype="bytes", shape=(len(view),))
        return BlobParts(kind="bytes", specs=(spec,), sources=(view,))
    if isinstance(blob, Mapping):
        return _describe_mapping(blob)
    raise InvalidValueError(
        f"a {type(blob).__name__} cannot be stored; give a tensor, a mapping of named tensors, or bytes"
    )


def _describe_mapping(blob: Mapping[object, object]) -> BlobParts:
    specs, sources = [], []
    for name, tensor in blob.items():
        if not isinstance(name, str):
            raise InvalidValueError(f"names in a mapping are str, not {type(name).__name__}")
        if not isinstance(tensor, torch.Tensor):
            raise InvalidValueError(f"{name!r} is a {type(tensor).__name__}; a mapping holds tensors only")
        source = dense(tensor, f"tensor {name!r}")
        sources.append(source)
        specs.append(_spec(name, source))
    return BlobParts(kind="mapping", specs=tuple(specs), sources=tuple(sources))


def _spec(name: str, tensor: torch.Tensor) -> SegmentSpec:
    return SegmentSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def _bytes_of(blob: bytes | bytearray | memoryview) -> memoryview:
    view = memoryview(blob)
    if not view.c_contiguous:
        raise InvalidValueError("a memoryview with gaps cannot be stored; give bytes(view)")
    return view.cast("B") if view.nbytes else memoryview(b"")  # a shape with a zero in it cannot be cast


def copy_part(source: torch.Tensor | memoryview, into: memoryview) -> None:
    """Write one of `BlobParts.sources` over all of `into`."""
    if isinstance(source, memoryview):
        copy_bytes(source, into)
    else:
        copy_in(source, into)


def rebuild(header: Header, views: Sequence[memoryview]) -> Value:
    """Make the blob again over its raw bytes: tensors share the views' memory, a byte string is copied.

    Args:
        header: of the entry.
        views: raw (decoded) bytes of each segment, in the header's order.
    """
    if header.kind == "bytes":
        return bytes(views[0])
    tensors = {
        segment.spec.name: tensor_over(view, segment.spec) for segment, view in zip(header.segments, views, strict=True)
    }
    return tensors[""] if header.kind == "tensor" else tensors
