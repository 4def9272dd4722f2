"""A caller's KV tensors held against a layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from kvtier.chunk.tensors import dense
from kvtier.errors import LayoutMismatchError

if TYPE_CHECKING:
    from kvtier.chunk.layout import KVLayout, LayerGroup
    from kvtier.chunk.segments import SegmentSpec


def match_kv(layout: KVLayout, kv: object, tokens: int) -> dict[str, dict[str, torch.Tensor]]:
    """Do what `KVLayout.match` says."""
    if not isinstance(kv, Mapping):
        raise LayoutMismatchError(f"kv is a {type(kv).__name__}; a mapping of tensors is needed")
    if len(layout.groups) == 1 and all(isinstance(value, torch.Tensor) for value in kv.values()):
        kv = {layout.groups[0].name: kv}
    _check_names("layer groups", kv.keys(), [group.name for group in layout.groups])
    return {group.name: _match_group(layout, group, kv[group.name], tokens) for group in layout.groups}


def _match_group(layout: KVLayout, group: LayerGroup, tensors: object, tokens: int) -> dict[str, torch.Tensor]:
    if not isinstance(tensors, Mapping):
        raise LayoutMismatchError(f"group {group.name!r} is a {type(tensors).__name__}; a mapping of tensors is needed")
    _check_names(f"tensors of group {group.name!r}", tensors.keys(), list(group.tensors))
    lengths = [tokens] if group.window is None else [tokens, min(tokens, group.window - 1)]
    chosen: set[int] = set()
    matched = {}
    for specs in zip(*(layout.specs(group.name, tokens=n, first_token=0) for n in lengths), strict=True):
        name = specs[0].name
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor):
            raise LayoutMismatchError(f"{group.name}.{name} is a {type(tensor).__name__}; a tensor is needed")
        plain = _without_head_axis(dense(tensor, f"{group.name}.{name}"), specs[0], layout.axes)
        length = next((n for n, spec in zip(lengths, specs, strict=True) if _fits(plain, spec)), None)
        if length is None:
            given = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            wanted = " or ".join(dict.fromkeys(f"{spec.dtype} {list(spec.shape)} ({spec.axes})" for spec in specs))
            raise LayoutMismatchError(f"{group.name}.{name} is {given}, the layout has {wanted}")
        chosen.add(length)
        matched[name] = plain
    if len(chosen) > 1:
        raise LayoutMismatchError(f"tensors of group {group.name!r} hold {sorted(chosen)} tokens; they must agree")
    return matched


def _check_names(what: str, given: Iterable[object], wanted: list[str]) -> None:
    names = list(given)
    if set(names) != set(wanted):
        raise LayoutMismatchError(f"{what} are {sorted(map(str, names))}, the layout has {sorted(wanted)}")


def _without_head_axis(tensor: torch.Tensor, spec: SegmentSpec, axes: str) -> torch.Tensor:
    head_axis = axes.index("H")
    if spec.axes == "LTD" and tensor.dim() == len(axes) and tensor.shape[head_axis] == 1:
        return tensor.squeeze(head_axis)
    return tensor


def _fits(tensor: torch.Tensor, spec: SegmentSpec) -> bool:
    return tuple(tensor.shape) == spec.shape and str(tensor.dtype) == f"torch.{spec.dtype}"
