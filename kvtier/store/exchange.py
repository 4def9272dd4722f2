"""Memory that KV comes from and goes to: tensors shaped like the layout, or an engine's own blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvtier.chunk.match import match_kv
from kvtier.chunk.transfer import Copies, copy_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvtier.chunk.layout import KVLayout
    from kvtier.chunk.segments import SegmentSpec


def token_axis(spec: SegmentSpec) -> int:
    """Return the dimension of `spec` that counts tokens."""
    return spec.axes.index("T")


@runtime_checkable
class KVSource(Protocol):
    """What a put may be given in place of tensors: it copies the tokens asked for by itself."""

    def check_source(self, layout: KVLayout, *, start: int, stop: int) -> None:
        """Check that this holds tokens [start, stop).

        Raises:
            LayoutMismatchError: it is made for another layout.
            InvalidValueError: it holds other tokens.
        """

    def held_from(self, group: str) -> int:
        """Return the position of the first token held of a layer group; all up to the prefix's end are."""

    def read(self, group: str, specs: Sequence[SegmentSpec], views: Sequence[memoryview]) -> None:
        """Copy the tokens that `specs` describe into one view per tensor; called in threads, returns when done."""


@runtime_checkable
class KVTarget(Protocol):
    """What a get may be given as `out` in place of tensors: it takes tokens in any order, and a shorter hit."""

    def check_target(self, layout: KVLayout, *, start: int) -> None:
        """Check that this can take tokens from `start` on.

        Raises:
            LayoutMismatchError: it is made for another layout.
            InvalidValueError: it begins elsewhere.
        """

    def cap(self, cap: int) -> int:
        """Return the greatest length up to `cap` whose tokens it has room for."""

    def write(self, group: str, spec: SegmentSpec, source: torch.Tensor, first: int) -> None:
        """Take one tensor's tokens from position `first` on: dtype and shape of `spec`, but for their number.

        Called in threads; the memory of `source` may be used again when this returns.
        """

    @property
    def event(self) -> object | None:
        """What a consumer waits for on the device, if it asked to do that itself; None: all is visible already."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Tensors shaped like the layout; all end with the prefix, at position `stop`."""

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    layout: KVLayout
    stop: int

    def check_source(self, layout: KVLayout, *, start: int, stop: int) -> None:
        """Nothing is left to check."""

    def held_from(self, group: str) -> int:
        """As the contract says; a windowed group may begin later than the others."""
        spec = self.layout.specs(group, tokens=1, first_token=0)[0]
        return self.stop - self.tensors[group][spec.name].shape[token_axis(spec)]

    def read(self, group: str, specs: Sequence[SegmentSpec], views: Sequence[memoryview]) -> None:
        """As the contract says."""
        tensors, first = self.tensors[group], self.held_from(group)
        for spec, view in zip(specs, views, strict=True):
            axis = token_axis(spec)
            copy_in(tensors[spec.name].narrow(axis, spec.first_token - first, spec.shape[axis]), view)

    def parts(self, group: str, specs: Sequence[SegmentSpec]) -> list[torch.Tensor] | None:
        """Return the tokens that `specs` describe as views; None if they are not plain host memory."""
        tensors, first = self.tensors[group], self.held_from(group)
        parts = []
        for spec in specs:
            axis = token_axis(spec)
            part = tensors[spec.name].detach().narrow(axis, spec.first_token - first, spec.shape[axis])
            if part.device.type != "cpu" or part.is_conj() or part.is_neg():
                return None
            parts.append(part)
        return parts


def source_of(layout: KVLayout, kv: object, *, start: int, stop: int) -> KVSource:
    """Return the KV of tokens [start, stop), checked; nothing is copied.

    Raises:
        LayoutMismatchError, InvalidValueError: it is not that.
    """
    if isinstance(kv, KVSource):
        kv.check_source(layout, start=start, stop=stop)
        return kv
    return TensorSource(match_kv(layout, kv, stop - start), layout, stop)


class Target(Protocol):
    """Where one layer group's KV of a get goes."""

    first: int

    def take(self, spec: SegmentSpec, source: torch.Tensor, first: int, copies: Copies) -> None:
        """Copy one tensor's tokens, from position `first` on, to their place: now, or with the others in `copies`."""


@dataclass(slots=True)
class TensorTarget:
    """Tensors whose token axis begins at position `first`."""

    first: int
    tensors: Mapping[str, torch.Tensor]

    def take(self, spec: SegmentSpec, source: torch.Tensor, first: int, copies: Copies) -> None:
        """As the contract says."""
        axis = token_axis(spec)
        copies.add(source, self.tensors[spec.name].narrow(axis, first - self.first, source.shape[axis]))

    def part(self, spec: SegmentSpec, first: int, stop: int) -> torch.Tensor:
        """Return the place of the tokens [first, stop), a view."""
        return self.tensors[spec.name].detach().narrow(token_axis(spec), first - self.first, stop - first)


@dataclass(slots=True)
class ForeignTarget:
    """One layer group of an engine's own memory; tokens before `first` are not wanted."""

    first: int
    group: str
    target: KVTarget

    def take(self, spec: SegmentSpec, source: torch.Tensor, first: int, copies: Copies) -> None:
        """As the contract says."""
        del copies
        self.target.write(self.group, spec, source, first)
