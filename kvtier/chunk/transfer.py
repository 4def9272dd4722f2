"""Copies between tensors of any strides and plain memory: bit for bit, one call without the GIL, nothing allocated."""

from __future__ import annotations

import torch

from kvtier.chunk.dtypes import dtype_name
from kvtier.chunk.runs import copy_runs
from kvtier.chunk.segments import SegmentSpec
from kvtier.chunk.serial import copy_on_this_thread
from kvtier.chunk.tensors import dense, tensor_over
from kvtier.errors import InvalidValueError

__all__ = ["Copies", "check_target", "copy_between", "copy_in", "copy_out", "tensor_over"]

# Elements are moved as integers: no float unit sees a NaN, and a bool keeps whatever byte it holds.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 8


class Copies:
    """Copies collected, then made in one call without the GIL, in the order they were added.

    A thread that gives the GIL up for each of a hundred copies waits up to 5 ms to get it back, a hundred times, while
    another thread runs Python. The memory on both sides must stay until `run` has returned.
    """

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Note a copy between dense tensors of one dtype and shape, any strides and devices.

        Raises:
            InvalidValueError: shapes or dtypes differ, or `target` is not what `copy_out` could fill.
        """
        spec = SegmentSpec(name="target", dtype=dtype_name(source.dtype), shape=tuple(source.shape))
        self._note(dense(source, "source"), check_target(target, spec))

    def add_in(self, source: torch.Tensor, into: memoryview) -> None:
        """Note a copy of the elements of `source`, in row-major order, over all of `into`.

        Raises:
            InvalidValueError: not a dense tensor, or not as many bytes as `into` has.
        """
        source = dense(source, "source")
        if source.nbytes != len(into):
            raise InvalidValueError(f"tensor of {source.nbytes} bytes into {len(into)}")
        if len(into):
            self._note(source, torch.frombuffer(into, dtype=source.dtype).view(source.shape))

    def run(self) -> None:
        """Make the copies; nothing of them is kept."""
        targets, sources = self._targets, self._sources
        self._targets, self._sources = [], []
        if not targets or copy_runs(targets, sources):
            return
        if any(target.is_inference() for target in targets):
            with torch.inference_mode():  # elsewhere such tensors must not be written to
                copy_on_this_thread(targets, sources)
        else:
            copy_on_this_thread(targets, sources)

    def _note(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if not target.nbytes:
            return
        if source.is_conj() or source.is_neg():
            source = source.resolve_conj().resolve_neg()
        size = source.element_size()
        if size > _WORD:  # complex128
            source, target, size = torch.view_as_real(source), torch.view_as_real(target), _WORD
        unit = _INTEGERS[size]
        if size == 1 and _in_words(source) and _in_words(target):
            unit = torch.int64  # single bytes copy 1.2 times slower
        self._targets.append(target.view(unit))
        self._sources.append(source.view(unit))


def copy_in(source: torch.Tensor, into: memoryview) -> None:
    """Write the elements of `source`, in row-major order, over all of `into`.

    Any strides, any device; lazily conjugated and negated tensors are written as what they read as.

    Raises:
        InvalidValueError: not a dense tensor, or not as many bytes as `into` has.
    """
    copies = Copies()
    copies.add_in(source, into)
    copies.run()


def copy_out(view: memoryview, spec: SegmentSpec, into: torch.Tensor) -> None:
    """Write the raw bytes `view` of a tensor like `spec` over the elements of `into`, of any strides and device.

    Raises:
        InvalidValueError: what `check_target` refuses, or `view` is read-only or not as long as `spec` says.
    """
    target = check_target(into, spec)
    if len(view) != target.nbytes or view.readonly:
        raise InvalidValueError(f"{target.nbytes} writable bytes are needed to fill {spec.name!r}, not {len(view)}")
    if len(view):
        copy_between(torch.frombuffer(view, dtype=target.dtype).view(target.shape), target)


def copy_between(source: torch.Tensor, target: torch.Tensor) -> None:
    """Write the elements of `source` over those of `target`: dense, of one dtype and shape, any strides and devices.

    Raises:
        InvalidValueError: shapes or dtypes differ, or `target` is not what `copy_out` could fill.
    """
    copies = Copies()
    copies.add(source, target)
    copies.run()


def _in_words(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor of bytes can be viewed as 8-byte integers."""
    if not tensor.dim() or tensor.stride(-1) != 1 or tensor.shape[-1] % _WORD:
        return False
    return all(step % _WORD == 0 for step in (tensor.storage_offset(), *tensor.stride()[:-1]))


def check_target(into: torch.Tensor, spec: SegmentSpec) -> torch.Tensor:
    """Return `into` without its graph if `copy_out` can fill it with a value like `spec`.

    Raises:
        InvalidValueError: shape or dtype differ, `into` is not dense, or its elements overlap or are lazily conjugated.
    """
    target = dense(into, f"target {spec.name!r}")
    if tuple(target.shape) != spec.shape or str(target.dtype) != f"torch.{spec.dtype}":
        wanted, given = f"{spec.dtype} {list(spec.shape)}", f"{target.dtype} {list(target.shape)}"
        raise InvalidValueError(f"target {spec.name!r} is {given}, the value is {wanted}")
    if target.is_conj() or target.is_neg():
        raise InvalidValueError(f"target {spec.name!r} is lazily conjugated or negated; give the tensor itself")
    if _overlaps_itself(target):
        raise InvalidValueError(f"target {spec.name!r} is expanded or overlaps itself: several elements share memory")
    return target


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether elements may share memory: whether a dimension's step is not beyond all that smaller steps reach."""
    reach = 0
    for step, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and step <= reach:
            return tensor.numel() > 0
        reach += step * max(0, length - 1)
    return False
