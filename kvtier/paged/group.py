"""One layer group of an engine's cache: its tensors as pages, in canonical or in the engine's own order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from kvtier.chunk.dtypes import ITEMSIZE, dtype_name
from kvtier.chunk.layout import LayerGroup, TensorSpec
from kvtier.errors import ConfigError
from kvtier.paged.axes import Pages, ordered, pages_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.chunk.segments import SegmentSpec

Order = Literal["canonical", "native"]
_LARGEST_ITEM = 8


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Layers whose blocks are allocated together.

    Attributes:
        name: of the layer group.
        layers: indices of the layers in the model.
        tensors: pages by tensor name.
        window: tokens that a sliding window sees; None for full attention.
        whole_blocks: tokens are moved in whole blocks only (native order).
    """

    name: str
    layers: tuple[int, ...]
    tensors: dict[str, Pages]
    window: int | None = None
    whole_blocks: bool = False

    @property
    def first_pages(self) -> Pages:
        """Any of the tensors: they have the same blocks."""
        return next(iter(self.tensors.values()))

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.first_pages.block_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks of every layer."""
        return self.first_pages.num_blocks

    def layer_group(self) -> LayerGroup:
        """Return the layer group as a `KVLayout` has it."""
        specs = {name: _spec(pages.layers[0]) for name, pages in self.tensors.items()}
        return LayerGroup(self.name, self.layers, specs, window=self.window)


def make_group(
    parts: dict[str, Sequence[torch.Tensor]],
    inner: str,
    *,
    order: Order,
    name: str,
    layers: Sequence[int] | None,
    window: int | None,
) -> PagedGroup:
    """Return a group of tensors given layer by layer; `inner` names their dimensions ("BNHD" in some order, or "2").

    Raises:
        ConfigError: tensors that do not go together, or blocks that native order cannot take as they are.
    """
    first = next(iter(parts.values()))
    if ITEMSIZE[dtype_name(first[0].dtype)] > _LARGEST_ITEM:
        raise ConfigError(f"elements of {first[0].dtype} have more than {_LARGEST_ITEM} bytes")
    if order not in ("canonical", "native"):
        raise ConfigError(f"order is {order!r}; known: canonical, native")
    tensors: dict[str, Pages] = {}
    for key, given in parts.items():
        if order == "canonical":
            tensors[key] = pages_of([ordered(layer, inner) for layer in given])
        else:
            size = given[0].shape[inner.index("N")]
            dtype = dtype_name(given[0].dtype)
            # The namespace hears of it by the tensor's name: another engine's order is another layout, and a miss.
            tensors[f"{key}.{inner.replace('B', '')}.{dtype}.{size}"] = pages_of([_raw(t, inner) for t in given])
    sizes = {(pages.num_blocks, pages.block_tokens, len(pages.layers)) for pages in tensors.values()}
    if len(sizes) > 1:
        raise ConfigError(f"k and v have different blocks, tokens or layers: {sorted(sizes)}")
    count = len(first)
    indices = tuple(range(count)) if layers is None else tuple(layers)
    if len(indices) != count:
        raise ConfigError(f"{len(indices)} layer indices for {count} layers")
    return PagedGroup(name, indices, tensors, window, whole_blocks=order == "native")


def _raw(layer: torch.Tensor, inner: str) -> torch.Tensor:
    """Return a layer's blocks as [B, N, bytes per token], whatever the order of the elements inside a block."""
    blocks = layer.detach().permute(inner.index("B"), *(i for i, letter in enumerate(inner) if letter != "B"))
    if not blocks[0].is_contiguous():
        raise ConfigError(f"native order needs blocks in one piece; a block of axes {inner!r} has gaps")
    tokens = layer.shape[inner.index("N")]
    flat = blocks.flatten(1).view(torch.uint8)
    return flat.view(layer.shape[inner.index("B")], tokens, flat.shape[1] // tokens)


def _spec(layer: torch.Tensor) -> TensorSpec:
    heads = layer.shape[2] if layer.dim() == 4 else None  # noqa: PLR2004  # [B, N, H, D] or [B, N, D]
    return TensorSpec(heads, layer.shape[-1], dtype_name(layer.dtype))


def tokens_first(tensor: torch.Tensor, spec: SegmentSpec) -> torch.Tensor:
    """Return a view of a chunk's tensor as [L, T, H, D] or [L, T, D]."""
    return tensor.transpose(1, 2) if spec.axes == "LHTD" else tensor
