"""Where a hit's KV goes: recycled memory of the store, or tensors the caller gave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.chunk.dtypes import raw_size
from kvtier.chunk.tensors import check_tensors, tensor_over
from kvtier.chunk.transfer import check_target
from kvtier.errors import InvalidValueError
from kvtier.store.exchange import ForeignTarget, KVTarget, TensorTarget, token_axis

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvtier.chunk.layout import KVLayout, LayerGroup
    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine
    from kvtier.store.exchange import Target


class Targets:
    """Makes the tensors that one get fills, for a length that may shrink while reads fail.

    Full groups keep one set of tensors; windowed groups get others when the length changes, because they end with it.
    """

    def __init__(self, layout: KVLayout, *, start: int, out: object | None) -> None:
        self._layout = layout
        self._start = start
        self.foreign: KVTarget | None = out if out is not None and isinstance(out, KVTarget) else None
        if self.foreign is not None:
            self.foreign.check_target(layout, start=start)
            out = None
        self._out = _checked_out(layout, out) if out is not None else None
        self._made: dict[str, TensorTarget] = {}

    def cap(self, cap: int) -> int:
        """Return the greatest length that the caller's tensors can take.

        Raises:
            InvalidValueError: a windowed group's tensors are too short for what its window needs.
        """
        if self.foreign is not None:
            return self.foreign.cap(cap)
        if self._out is None:
            return cap
        room = {group.name: self._room(group) for group in self._layout.groups}
        full = [room[group.name] for group in self._layout.groups if group.window is None]
        cap = min([cap, *(self._start + tokens for tokens in full)])
        for group in self._layout.groups:
            needed = min(group.window - 1, max(cap - self._start, 0)) if group.window is not None else 0
            if room[group.name] < needed:
                raise InvalidValueError(
                    f"out: group {group.name!r} has room for {room[group.name]} tokens; {needed} are needed"
                )
        return cap

    def _room(self, group: LayerGroup) -> int:
        specs = self._layout.specs(group.name, tokens=1, first_token=0)
        out = (self._out or {})[group.name]
        lengths = {out[spec.name].shape[token_axis(spec)] for spec in specs}
        if len(lengths) > 1:
            raise InvalidValueError(
                f"out: tensors of group {group.name!r} hold {sorted(lengths)} tokens; they must agree"
            )
        return int(lengths.pop())

    async def make(
        self, engine: Engine, firsts: Mapping[str, int], length: int, deadline: Deadline
    ) -> Mapping[str, Target] | None:
        """Return a target per group for [firsts[group], length); None if there is no memory for them in time."""
        if self.foreign is not None:
            return {name: ForeignTarget(first, name, self.foreign) for name, first in firsts.items()}
        for group in self._layout.groups:
            first = firsts[group.name]
            made = self._made.get(group.name)
            if made is not None and made.first == first:
                continue
            tensors = await self._tensors(engine, group, first, length, deadline)
            if tensors is None:
                return None
            self._made[group.name] = TensorTarget(first, tensors)
        return self._made

    async def _tensors(
        self, engine: Engine, group: LayerGroup, first: int, length: int, deadline: Deadline
    ) -> dict[str, torch.Tensor] | None:
        specs = self._layout.specs(group.name, tokens=length - first, first_token=first)
        if self._out is not None:
            out = self._out[group.name]
            return {spec.name: out[spec.name].narrow(token_axis(spec), 0, length - first) for spec in specs}
        views = await engine.result_views([raw_size(spec.dtype, spec.shape) for spec in specs], deadline)
        if views is None:
            return None
        return {spec.name: tensor_over(view, spec) for spec, view in zip(specs, views, strict=True)}

    @property
    def event(self) -> object | None:
        """What a consumer has to wait for on the device, if it asked for that."""
        return None if self.foreign is None else self.foreign.event

    def result(self, length: int) -> dict[str, dict[str, torch.Tensor]]:
        """Return the filled tensors cut to the final length; none where the caller's own memory was filled."""
        if self.foreign is not None:
            return {}
        return {
            group.name: {
                spec.name: self._made[group.name]
                .tensors[spec.name]
                .narrow(token_axis(spec), 0, length - self._made[group.name].first)
                for spec in self._layout.specs(group.name, tokens=1, first_token=0)
            }
            for group in self._layout.groups
        }


def _checked_out(layout: KVLayout, out: object) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return the caller's tensors by group, checked against the layout but for their number of tokens."""
    groups = out if isinstance(out, dict) else {}
    if len(layout.groups) == 1 and layout.groups[0].name not in groups:
        groups = {layout.groups[0].name: groups}
    checked: dict[str, Mapping[str, torch.Tensor]] = {}
    for group in layout.groups:
        tensors = groups.get(group.name)
        if not isinstance(tensors, dict):
            raise InvalidValueError(f"out: group {group.name!r} is missing or no mapping of tensors")
        checked[group.name] = _checked_group(layout, group, tensors)
    return checked


def _checked_group(layout: KVLayout, group: LayerGroup, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = list(group.tensors)
    if sorted(tensors) != sorted(names):
        raise InvalidValueError(f"out: group {group.name!r} has tensors {sorted(tensors)}, the layout {sorted(names)}")
    check_tensors(tensors, f"out: group {group.name!r}")
    checked = {}
    for spec in layout.specs(group.name, tokens=1, first_token=0):
        tensor, axis = tensors[spec.name], token_axis(spec)
        if tensor.dim() == len(spec.shape) + 1 and len(spec.axes) == len(spec.shape) and "H" not in spec.axes:
            tensor = tensor.squeeze(layout.axes.index("H"))  # a latent with a head axis of length 1
        tokens = tensor.shape[axis] if tensor.dim() == len(spec.shape) else 0
        wanted = next(s for s in layout.specs(group.name, tokens=tokens, first_token=0) if s.name == spec.name)
        check_target(tensor, wanted)
        checked[spec.name] = tensor
    return checked
