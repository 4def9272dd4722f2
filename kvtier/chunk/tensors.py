"""Torch's side of `dtypes`: which tensors can be stored, and tensors over plain memory."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kvtier.chunk.dtypes import ITEMSIZE, dtype_name, raw_size
from kvtier.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.chunk.segments import SegmentSpec

# Only names of the closed table are looked up; older torch releases lack some.
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEMSIZE if name != "bytes" and hasattr(torch, name)
}

_STORABLE = frozenset(TORCH_DTYPES.values())


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a name of the table.

    Raises:
        InvalidValueError: not a tensor dtype, or this torch release lacks it.
    """
    try:
        return TORCH_DTYPES[name]
    except KeyError:
        raise InvalidValueError(f"no torch dtype {name!r} in torch {torch.__version__}") from None


def dense(tensor: torch.Tensor, what: str = "tensor") -> torch.Tensor:
    """Return `tensor` without its graph if its elements are plain memory; no bytes are copied.

    Raises:
        InvalidValueError: sparse, quantised, meta, nested, a wrapper subclass, or a dtype not in the table.
    """
    kind = _unstorable_kind(tensor)
    if kind is not None:
        raise InvalidValueError(f"{what} is {kind}; only dense tensors of plain elements can be stored")
    if tensor.dtype not in _STORABLE:
        dtype_name(tensor.dtype)  # raises, with the names that would do
    return tensor.detach()


def check_tensors(named: Mapping[str, torch.Tensor], what: str) -> None:
    """Check the memory that a caller gave to be filled.

    Raises:
        InvalidValueError: not tensors, or two share elements: one would be filled with what is the other's.
    """
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidValueError(f"{what}: {name!r} is a {type(tensor).__name__}; give a torch tensor")
    spans = sorted(
        (tensor.data_ptr(), tensor.is_contiguous(), tensor.nbytes, name)
        for name, tensor in named.items()
        if tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.nbytes
    )
    for (start, solid, size, name), (then, also_solid, _, other) in pairwise(spans):
        if start == then or (solid and also_solid and then < start + size):  # of others it takes long to tell
            raise InvalidValueError(f"{what}: {name!r} and {other!r} share memory; give each tensor memory of its own")


def _unstorable_kind(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})"
    if tensor.device.type == "meta":
        return "a meta tensor, which has no elements"
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return f"a {type(tensor).__name__}, a tensor subclass"
    return None


def tensor_over(view: memoryview, spec: SegmentSpec) -> torch.Tensor:
    """Return a tensor whose memory is `view`: no copy; the view stays alive as long as the tensor does.

    Raises:
        InvalidValueError: `view` is read-only, or not as long as `spec` says.
    """
    size = raw_size(spec.dtype, spec.shape)
    if len(view) != size:
        raise InvalidValueError(f"{len(view)} bytes for a tensor of {size}")
    if view.readonly:
        raise InvalidValueError("no tensor can be made over read-only memory: torch would let it be written to")
    dtype = torch_dtype(spec.dtype)
    if not size:  # frombuffer refuses empty buffers
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype).reshape(spec.shape)


def tensor_at(memory: memoryview, spec: SegmentSpec, offset: int, size: int) -> torch.Tensor:
    """As `tensor_over` for `size` bytes, more than none, from `offset` on; quick, for many chunks in one memory.

    What is writable and within bounds, and that `size` is what `spec` says, the caller knows.
    """
    dtype = TORCH_DTYPES[spec.dtype]
    return torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=offset).view(spec.shape)
