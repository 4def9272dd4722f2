"""PagedLayout: an engine's KV cache in blocks, as chunks are gathered from it and scattered to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from kvtier.buffers.devices import device_of
from kvtier.chunk.layout import KVLayout
from kvtier.errors import ConfigError, InvalidValueError
from kvtier.paged.axes import check_axes
from kvtier.paged.exchange import PagedSource, PagedTarget
from kvtier.paged.group import PagedGroup, make_group
from kvtier.paged.kernels import gather, scatter
from kvtier.paged.places import BlockTable, SlotMapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.buffers.devices import Device
    from kvtier.paged.group import Order
    from kvtier.paged.places import Places

    Numbers = Sequence[int] | torch.Tensor
    ByGroup = Numbers | Mapping[str, Numbers]
    Chunk = dict[str, torch.Tensor]

_NUMBER = re.compile(r"\d+")
# What engines are known to use, for one layer: keys and values first or in each block; tokens or heads first.
_ENGINE_AXES = ("2BNHD", "B2NHD", "2BHND", "B2HND")


class PagedLayout:
    """Blocks of one or several layer groups, over the engine's own tensors: nothing is copied or kept beside views.

    `order="canonical"`: chunks hold [layer, token, head, dim], whatever the engine's order, and any engine finds them.
    `order="native"`: blocks are taken as they are, without transposing; the layout's name for them is part of the
    namespace, so that only engines with the same order and block size find them, and tokens move in whole blocks.
    """

    def __init__(self, groups: Sequence[PagedGroup], *, device: Device | None = None) -> None:
        if not groups or len({group.name for group in groups}) != len(groups):
            raise ConfigError(f"layer groups need names of their own; got {[group.name for group in groups]}")
        self.groups: dict[str, PagedGroup] = {group.name: group for group in groups}
        self.device: Device = device or device_of(groups[0].first_pages.layers[0].device)

    # --- from an engine's tensors

    @classmethod
    def from_stacked(
        cls,
        cache: torch.Tensor,
        axes: str = "2LBNHD",
        *,
        order: Order = "canonical",
        name: str = "full",
        layers: Sequence[int] | None = None,
        window: int | None = None,
    ) -> PagedLayout:
        """Return the layout of one tensor for all layers.

        Args:
            cache: the engine's tensor, of any strides.
            axes: its dimensions: "L" layer, "B" block, "N" token in the block, "D" head dim; "2" keys and values and
                "H" kv head, which both are missing where there is one latent per token (MLA).
            order: see the class.
            name: of the layer group.
            layers: indices of the layers in the model; 0, 1, ... when not given.
            window: tokens that a sliding window sees.

        Raises:
            ConfigError: axes that do not name the tensor's dimensions; blocks that native order cannot take.
        """
        check_axes(axes, cache, needed="LBND", allowed="2LBNHD")
        per_layer = cache.unbind(axes.index("L"))
        return cls(
            [_split(list(per_layer), axes.replace("L", ""), order=order, name=name, layers=layers, window=window)]
        )

    @classmethod
    def from_list(
        cls,
        k_list: Sequence[torch.Tensor],
        v_list: Sequence[torch.Tensor] | None = None,
        axes: str | None = None,
        *,
        order: Order = "canonical",
        name: str = "full",
        layers: Sequence[int] | None = None,
        window: int | None = None,
    ) -> PagedLayout:
        """Return the layout of one tensor per layer for keys and one for values; without `v_list`, of fused ones.

        `axes` names a tensor's dimensions: "BNHD" when not given, or "BND" for three dimensions (a latent). A fused
        tensor has a "2" in them. The other arguments and errors are those of `from_stacked`.

        Raises:
            ConfigError: no tensors, keys and values of different number, or shapes that do not go together.
        """
        given = list(k_list)
        if not given:
            raise ConfigError("k_list is empty")
        axes = axes or ("BNHD" if given[0].dim() == 4 else "BND")  # noqa: PLR2004  # with heads or without
        for tensor in [*given, *(v_list or ())]:
            check_axes(axes, tensor, needed="BND", allowed="BNHD" if v_list is not None else "2BNHD")
        if v_list is None:
            return cls([_split(given, axes, order=order, name=name, layers=layers, window=window)])
        if len(v_list) != len(given):
            raise ConfigError(f"{len(given)} layers of keys, {len(v_list)} of values")
        parts: dict[str, Sequence[torch.Tensor]] = {"k": given, "v": list(v_list)}
        return cls([make_group(parts, axes, order=order, name=name, layers=layers, window=window)])

    @classmethod
    def from_vllm(
        cls,
        kv_caches: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
        *,
        axes: str | None = None,
        block_tokens: int | None = None,
        order: Order = "canonical",
        name: str = "full",
        window: int | None = None,
    ) -> PagedLayout:
        """Return the layout of vLLM's caches: one tensor per layer, by layer name or in order.

        The axes are found by shape where they can be told apart, with the help of `block_tokens` (vLLM's block size);
        else they must be given: "2BNHD" (keys and values first), "B2NHD", or "2BHND" and "B2HND" with heads before
        tokens. Three dimensions are a latent (MLA), "BND". Layers of different kinds make layouts of their own, which
        `join` puts together.

        Raises:
            ConfigError: as `from_stacked`, or axes that the shape leaves open.
        """
        layers: list[int] | None = None
        if isinstance(kv_caches, Mapping):
            indices = {key: _layer_index(key) for key in kv_caches}
            keys = sorted(indices, key=lambda key: indices[key])
            layers, caches = [indices[key] for key in keys], [kv_caches[key] for key in keys]
        else:
            caches = list(kv_caches)
        if not caches:
            raise ConfigError("kv_caches is empty")
        axes = axes or _guess_axes(caches[0], block_tokens)
        return cls.from_list(caches, axes=axes, order=order, name=name, layers=layers, window=window)

    @classmethod
    def join(cls, *layouts: PagedLayout) -> PagedLayout:
        """Return one layout with the groups of all, each with block tables of its own."""
        return cls([group for layout in layouts for group in layout.groups.values()], device=layouts[0].device)

    def kv_layout(self, *, axes: str = "LTHD") -> KVLayout:
        """Return the layout to open a store with."""
        return KVLayout([group.layer_group() for group in self.groups.values()], axes=axes)

    # --- whole chunks and single layers

    def gather(self, blocks: Numbers, *, group: str | None = None, out: Chunk | None = None) -> Chunk:
        """Return the tokens of `blocks` as {name: [L, T, H, D]}, in `out` if given; on the device's current stream.

        The dtype is that of the engine's tensors.
        """
        chosen = self._group(group)
        return self._gather(chosen, self._table(chosen, blocks), out)

    def gather_slots(self, slots: Numbers, *, group: str | None = None, out: Chunk | None = None) -> Chunk:
        """Return the tokens in `slots` (slot = block * block_tokens + place) as {name: [L, T, H, D]}.

        The dtype is that of the engine's tensors.
        """
        chosen = self._group(group)
        return self._gather(chosen, self._mapping(chosen, slots), out)

    def scatter(self, chunk: Mapping[str, torch.Tensor], blocks: Numbers, *, group: str | None = None) -> None:
        """Write a chunk of {name: [L, T, H, D]}, of the engine's dtype, to `blocks`, from their first token on."""
        chosen = self._group(group)
        self._scatter(chosen, self._table(chosen, blocks), chunk)

    def scatter_slots(self, chunk: Mapping[str, torch.Tensor], slots: Numbers, *, group: str | None = None) -> None:
        """Write a chunk of {name: [L, T, H, D]}, of the engine's dtype, to `slots`."""
        chosen = self._group(group)
        self._scatter(chosen, self._mapping(chosen, slots), chunk)

    def layer(self, index: int) -> PagedLayout:
        """Return the layout of one of the model's layers: what `gather` and `scatter` then move, layer by layer.

        Raises:
            InvalidValueError: the model has no such layer.
        """
        for group in self.groups.values():
            if index in group.layers:
                place = group.layers.index(index)
                tensors = {
                    name: type(pages)((pages.layers[place],), pages.layers[place][None])
                    for name, pages in group.tensors.items()
                }
                single = PagedGroup(group.name, (index,), tensors, group.window, whole_blocks=group.whole_blocks)
                return PagedLayout([single], device=self.device)
        raise InvalidValueError(f"layer {index} is in no group")

    # --- for put and get

    def source(
        self,
        blocks: ByGroup | None = None,
        *,
        slots: ByGroup | None = None,
        first: int = 0,
        stream: object = None,
    ) -> PagedSource:
        """Return what `store.put` takes in place of tensors: a prompt's tokens in these blocks or slots.

        Args:
            blocks: the prompt's block table; for several groups, {group: table}.
            slots: its slot mapping, in place of `blocks`.
            first: position of the table's first token in the prompt.
            stream: the CUDA stream on which the KV is computed, the current one when not given: copies wait for what
                it was given to do before this call. `put` returns when the blocks may be overwritten.

        Raises:
            InvalidValueError: numbers that are no blocks or slots, or a group without them.
        """
        return PagedSource(self, self._tables(blocks, slots), first=first, stream=stream)

    def target(
        self,
        blocks: ByGroup | None = None,
        *,
        slots: ByGroup | None = None,
        first: int = 0,
        stream: object = None,
        event: bool = False,
    ) -> PagedTarget:
        """Return what `store.get` takes as `out`: the hit's tokens are written to these blocks or slots.

        Blocks must be the request's own: their content is undefined behind the hit. The arguments are those of
        `source`. When `get` returns, every stream sees the tokens; with `event` the last copies on the device may
        still be under way, and consumers wait for `hit.event`.

        Raises:
            InvalidValueError: as `source`, or a place named twice.
        """
        tables = self._tables(blocks, slots)
        for table in tables.values():
            table.check_distinct()
        return PagedTarget(self, tables, first=first, stream=stream, with_event=event)

    def _tables(self, blocks: ByGroup | None, slots: ByGroup | None) -> dict[str, BlockTable | SlotMapping]:
        given = blocks if blocks is not None else slots
        if given is None or (blocks is not None and slots is not None):
            raise InvalidValueError("give blocks or slots, one of them")
        by_group = given if isinstance(given, Mapping) else {next(iter(self.groups)): given}
        if set(by_group) != set(self.groups):
            raise InvalidValueError(f"tables are for groups {sorted(by_group)}, the layout has {sorted(self.groups)}")
        make = self._table if blocks is not None else self._mapping
        return {name: make(group, by_group[name]) for name, group in self.groups.items()}

    @staticmethod
    def _table(group: PagedGroup, blocks: Numbers) -> BlockTable:
        return BlockTable(blocks, block_tokens=group.block_tokens, num_blocks=group.num_blocks)

    @staticmethod
    def _mapping(group: PagedGroup, slots: Numbers) -> SlotMapping:
        return SlotMapping(slots, block_tokens=group.block_tokens, num_blocks=group.num_blocks)

    def _group(self, name: str | None) -> PagedGroup:
        if name is None and len(self.groups) == 1:
            return next(iter(self.groups.values()))
        try:
            return self.groups[name or ""]
        except KeyError:
            raise InvalidValueError(f"no layer group {name!r}; known: {', '.join(self.groups)}") from None

    def _gather(self, group: PagedGroup, table: BlockTable | SlotMapping, out: Chunk | None) -> Chunk:
        places = table.places(0, table.tokens)
        check_whole(group, places)
        made = out if out is not None else {}
        for name, pages in group.tensors.items():
            shape = (len(pages.layers), table.tokens, *pages.layers[0].shape[2:])
            if out is None:
                made[name] = torch.empty(shape, dtype=pages.layers[0].dtype, device=pages.layers[0].device)
            _check_chunk(name, made.get(name), shape, pages.layers[0].dtype)
            gather(pages, places, made[name])
        return made

    def _scatter(self, group: PagedGroup, table: BlockTable | SlotMapping, chunk: Mapping[str, torch.Tensor]) -> None:
        table.check_distinct()
        tokens = min(table.tokens, next(iter(chunk.values())).shape[1]) if chunk else 0
        places = table.places(0, tokens)
        check_whole(group, places)
        for name, pages in group.tensors.items():
            shape = (len(pages.layers), tokens, *pages.layers[0].shape[2:])
            _check_chunk(name, chunk.get(name), shape, pages.layers[0].dtype)
        for name, pages in group.tensors.items():
            scatter(pages, places, chunk[name])


def check_whole(group: PagedGroup, places: Places) -> None:
    """Raise `InvalidValueError` where native order is asked for part of a block."""
    if group.whole_blocks and places.blocks is None and places.runs:
        raise InvalidValueError(
            f"in native order tokens move in whole blocks of {group.block_tokens}; let chunk_tokens, start and the "
            "length be multiples of that, or use the canonical order"
        )


def _check_chunk(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
        given = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise InvalidValueError(f"chunk: {name!r} is {given}; {dtype} {list(shape)} is needed")


def _split(
    caches: list[torch.Tensor],
    axes: str,
    *,
    order: Order,
    name: str,
    layers: Sequence[int] | None,
    window: int | None,
) -> PagedGroup:
    """Return a group of fused caches: keys and values apart, or one latent."""
    if "2" not in axes:
        if "H" in axes:
            raise ConfigError(f"axes {axes!r}: keys and values are in one tensor; name their dimension '2'")
        return make_group({"latent": caches}, axes, order=order, name=name, layers=layers, window=window)
    if order == "native" and axes.index("2") > axes.index("B"):  # both in each block: one piece
        return make_group({"kv": caches}, axes, order=order, name=name, layers=layers, window=window)
    place = axes.index("2")
    parts: dict[str, Sequence[torch.Tensor]] = {
        key: [cache.select(place, i) for cache in caches] for i, key in enumerate("kv")
    }
    return make_group(parts, axes.replace("2", ""), order=order, name=name, layers=layers, window=window)


def _layer_index(key: str) -> int:
    found = _NUMBER.search(key)
    if found is None:
        raise ConfigError(f"layer name {key!r} has no number; give the caches in order")
    return int(found[0])


def _guess_axes(cache: torch.Tensor, block_tokens: int | None) -> str:
    if cache.dim() == 3:  # noqa: PLR2004  # a latent
        return "BND"
    fitting = [
        axes
        for axes in _ENGINE_AXES
        if cache.dim() == len(axes)
        and cache.shape[axes.index("2")] == 2  # noqa: PLR2004  # keys and values
        and block_tokens in (None, cache.shape[axes.index("N")])
    ]
    if len(fitting) != 1:
        shape = list(cache.shape)
        open_ = ", ".join(fitting) or "none of " + ", ".join(_ENGINE_AXES)
        raise ConfigError(f"caches of shape {shape} may have axes {open_}; give axes=, and block_tokens= if it helps")
    return fitting[0]
