"""The order of an engine's cache dimensions, as letters: views of a cache with its dimensions in one fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.chunk.tensors import dense
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

LETTERS = {
    "2": "keys and values",
    "L": "layer",
    "B": "block",
    "N": "token in the block",
    "H": "kv head",
    "D": "head dim",
}


@dataclass(frozen=True, slots=True)
class Pages:
    """One tensor of a layer group, "k" say, in the blocks of every layer.

    Attributes:
        layers: per layer a view [B, N, H, D], or [B, N, D] for a latent.
        stacked: all layers as one view [L, B, N, ...], where they lie at equal distances in one allocation.
    """

    layers: tuple[torch.Tensor, ...]
    stacked: torch.Tensor | None

    @property
    def num_blocks(self) -> int:
        """Blocks of every layer."""
        return self.layers[0].shape[0]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.layers[0].shape[1]


def check_axes(axes: str, tensor: torch.Tensor, *, needed: str, allowed: str) -> None:
    """Raise `ConfigError` if `axes` does not name the dimensions of `tensor`."""
    if len(set(axes)) != len(axes) or not set(needed) <= set(axes) <= set(allowed):
        known = ", ".join(f"{letter} {LETTERS[letter]}" for letter in allowed)
        raise ConfigError(f"axes {axes!r}: each of {needed} once, others of {known}")
    if tensor.dim() != len(axes):
        raise ConfigError(f"axes {axes!r} name {len(axes)} dimensions, the cache has shape {list(tensor.shape)}")
    if "2" in axes and tensor.shape[axes.index("2")] != 2:  # noqa: PLR2004  # keys and values
        raise ConfigError(f"axes {axes!r}: dimension '2' has length {tensor.shape[axes.index('2')]}, not 2")


def ordered(tensor: torch.Tensor, axes: str) -> torch.Tensor:
    """Return a view of one layer and one of k and v as [B, N, H, D] or [B, N, D]."""
    view = dense(tensor, "cache")
    return view.permute([axes.index(letter) for letter in "BNHD" if letter in axes])


def pages_of(layers: Sequence[torch.Tensor]) -> Pages:
    """Return pages over the layers' views, which must be alike.

    Raises:
        ConfigError: shapes, dtypes or devices differ.
    """
    first = layers[0]
    for number, layer in enumerate(layers):
        if layer.shape != first.shape or layer.dtype != first.dtype or layer.device != first.device:
            raise ConfigError(
                f"layer {number} is {layer.dtype} {list(layer.shape)} on {layer.device}, "
                f"layer 0 {first.dtype} {list(first.shape)} on {first.device}; give each kind a layer group of its own"
            )
    return Pages(tuple(layers), _stacked(layers))


def _stacked(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one view over all layers, if they lie at equal distances within one allocation."""
    first = layers[0]
    storage = first.untyped_storage().data_ptr()
    if any(layer.untyped_storage().data_ptr() != storage or layer.stride() != first.stride() for layer in layers):
        return None
    offsets = [layer.storage_offset() for layer in layers]
    step = offsets[1] - offsets[0] if len(offsets) > 1 else 0
    if step < 0 or any(offset != offsets[0] + step * i for i, offset in enumerate(offsets)):
        return None
    return first.as_strided((len(layers), *first.shape), (step, *first.stride()))
