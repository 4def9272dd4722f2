"""What of a model's cache can be stored by prefix, and in which layer group; what cannot be is refused here."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from kvtier.chunk.layout import KVLayout
from kvtier.errors import LayoutMismatchError, UnsupportedCacheLayerError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache, CacheLayerMixin

# The prompt's tokens see each other in both directions: KV of a prefix depends on what follows it.
PREFIX_LM = frozenset({"paligemma", "colpali", "t5gemma"})
# Rotary frequencies that change with the length of the sequence: KV of a short run is wrong in a long one.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One layer group of the store's layout and the cache layers that belong to it."""

    name: str
    layers: tuple[int, ...]
    window: int | None


def kv_layout(model: PreTrainedModel) -> KVLayout:
    """Return the layout under which this model's KV is stored, in the order that transformers keeps it ("LHTD").

    Raises:
        UnsupportedModelError: the model's KV cannot be stored by prefix; `UnsupportedCacheLayerError` names the layer.
    """
    check_model(model)
    layers = cache_layers(new_cache(model))
    layout = KVLayout.from_config(text_config(model), dtype=model.dtype, axes="LHTD")
    _check_layers(layout, layers)
    return layout


def plan(model: PreTrainedModel, layout: KVLayout | None) -> tuple[GroupPlan, ...]:
    """Match the store's `layout` with the model's cache layers.

    Raises:
        UnsupportedModelError: as for `kv_layout`.
        LayoutMismatchError: the store has no layout, or one of another model.
    """
    if layout is None:
        raise LayoutMismatchError("the store has no layout; open it with layout=kv_layout(model)")
    check_model(model)
    _check_layers(layout, cache_layers(new_cache(model)))
    return tuple(GroupPlan(name=group.name, layers=group.layers, window=group.window) for group in layout.groups)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache whose layers follow the model's config."""
    return DynamicCache(config=model.config)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the part of the config that describes the decoder."""
    return model.config.get_text_config(decoder=True)


def cache_argument(model: PreTrainedModel) -> str:
    """Return what this transformers release calls the cache; `UnsupportedModelError` if `forward` takes none."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedModelError(f"{type(model).__name__}.forward takes neither cache nor past_key_values")


def check_model(model: PreTrainedModel) -> None:
    """Refuse, by `UnsupportedModelError`, a model whose KV depends on more than the tokens before it."""
    config = text_config(model)
    name = type(model).__name__
    if model.training:
        raise UnsupportedModelError(
            f"{name} is in training mode, where dropout makes every run differ; call model.eval()"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder: its KV depends on the encoder's input")
    if model.config.model_type in PREFIX_LM or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModelError(f"{name} attends in both directions: the KV of a prefix depends on what follows")
    regimes = _rope_types(config) & LENGTH_DEPENDENT_ROPE
    if regimes:
        raise UnsupportedModelError(
            f"{name} has rope type {min(regimes)!r}, whose frequencies change with the length of the sequence"
        )


def cache_layers(cache: Cache) -> dict[int, int | None]:
    """Return {layer index: window, None for full attention} of the layers that hold keys and values per token.

    Raises:
        UnsupportedCacheLayerError: a layer of another kind (recurrent, indexed, quantised, static, ...).
    """
    found: dict[int, int | None] = {}
    for index, layer in enumerate(cache.layers):
        kind = type(layer)
        if kind is DynamicSlidingWindowLayer:
            found[index] = int(layer.sliding_window)
        elif kind is DynamicLayer:
            found[index] = None
        elif kind is not DummyLayer:  # a dummy layer reads another layer's KV and has none of its own
            raise UnsupportedCacheLayerError(
                f"cache layer {index} is a {kind.__name__}, which has no plain keys and values per token; "
                "supported: DynamicLayer, DynamicSlidingWindowLayer"
            )
    if not found:
        raise UnsupportedCacheLayerError(f"{type(cache).__name__} has no layers; make it with DynamicCache(config=...)")
    return found


def group_layers(cache: Cache, group: GroupPlan) -> Sequence[CacheLayerMixin]:
    """Return the cache's layers of one group."""
    return [cache.layers[index] for index in group.layers]


def _check_layers(layout: KVLayout, layers: dict[int, int | None]) -> None:
    stored = {index: group.window for group in layout.groups for index in group.layers}
    if stored != layers:
        wrong = sorted(index for index in stored.keys() | layers.keys() if stored.get(index, 0) != layers.get(index, 0))
        index = wrong[0]
        raise LayoutMismatchError(
            f"the store's layout is not this model's: layer {index} is {_say(stored, index)} in the layout and "
            f"{_say(layers, index)} in the model; open the store with layout=kv_layout(model)"
        )
    names = {name for group in layout.groups for name in group.tensors}
    if names != {"k", "v"}:
        raise LayoutMismatchError(f"the store's layout has tensors {sorted(names)}; a transformers cache has k and v")


def _say(layers: dict[int, int | None], index: int) -> str:
    if index not in layers:
        return "absent"
    window = layers[index]
    return "full attention" if window is None else f"a window of {window}"


def _rope_types(config: PreTrainedConfig) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    found: set[str] = set()
    for entry in (parameters, *parameters.values()):  # flat, or one entry per layer type
        if isinstance(entry, dict):
            found.update(str(entry[key]) for key in ("rope_type", "type") if key in entry)
    return found
