"""A `KVLayout` read off a transformers model config, by its attributes alone: transformers is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from kvtier.chunk.layout import KVLayout, LayerGroup, TensorSpec
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_FULL = frozenset({"full_attention", "attention"})
_SLIDING = frozenset({"sliding_attention"})
_WITHOUT_KV = frozenset({"dummy", "moe", "mlp"})  # layers that keep nothing, or use another layer's KV

# Attributes that change what is kept per token in ways the attributes read below do not tell.
_UNTOLD = {
    "is_encoder_decoder": "encoder-decoder model",
    "add_cross_attention": "cross-attention",
    "cross_attention_layers": "cross-attention",
    "multi_query": "multi_query, which models of this family cache in different ways",
    "kv_lora_rank": "multi-head latent attention",
}


def read_config(config: object, tp_size: int, *, dtype: str | torch.dtype | None, axes: str) -> KVLayout:
    """Return the layout of the KV that one of `tp_size` tensor-parallel ranks keeps.

    Layers are grouped by window and shape: "full", "window-512", ...

    Raises:
        ConfigError: a kind of model or layer whose KV cannot be stored per token, head counts that `tp_size` does not
            divide, or no dtype in the config and none given.
    """
    text = _text_config(config)
    _refuse_untold(text)
    if type(tp_size) is not int or tp_size < 1:
        raise ConfigError(f"tp_size is {tp_size!r}; a whole number >= 1 is needed")
    kv_dtype = dtype or _dtype(text) or _dtype(config)
    if kv_dtype is None:
        raise ConfigError(f"{_name(text)} has no dtype; give from_config(..., dtype='bfloat16')")
    layers: dict[tuple[int | None, int, int], list[int]] = {}
    for index, (kind, layer) in enumerate(zip(_layer_types(text), _layer_configs(text), strict=True)):
        if kind not in _WITHOUT_KV:
            layers.setdefault((_window(text, index, kind, layer), *_heads(layer, tp_size)), []).append(index)
    if not layers:
        _refuse(text, "a model whose layers keep no KV", "nothing of it can be stored per token")
    return KVLayout([_group(key, layers[key], list(layers), str(kv_dtype)) for key in layers], axes=axes)


def _text_config(config: object) -> object:
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config(decoder=True) if callable(get_text_config) else config


def _name(config: object) -> str:
    return str(getattr(config, "model_type", None) or type(config).__name__)


def _dtype(config: object) -> object:
    # The old name only where the new one does not exist: transformers 5 warns about it.
    return getattr(config, "dtype", None) if hasattr(config, "dtype") else getattr(config, "torch_dtype", None)


def _refuse_untold(config: object) -> None:
    for attribute, what in _UNTOLD.items():
        if getattr(config, attribute, None):
            _refuse(config, f"{what} ({attribute}={getattr(config, attribute)!r})", _advice(config, attribute))


def _advice(config: object, attribute: str) -> str:
    if attribute != "kv_lora_rank":
        return "describe what it keeps with KVLayout(groups=...)"
    latent = getattr(config, "kv_lora_rank", 0) + getattr(config, "qk_rope_head_dim", 0)
    layers = getattr(config, "num_hidden_layers", None)
    return (
        f"engines keep latents: KVLayout.mla(num_layers={layers}, latent_dim={latent}); transformers keeps expanded "
        "K and V: KVLayout(groups=...)"
    )


def _refuse(config: object, what: str, advice: str) -> NoReturn:
    raise ConfigError(f"{_name(config)}: {what} is not supported by from_config; {advice}")


def _number(config: object, *names: str) -> int | None:
    return next((value for name in names if type(value := getattr(config, name, None)) is int), None)


def _layer_count(config: object) -> int:
    count = _number(config, "num_hidden_layers")
    if count is None:
        _refuse(config, "a config without num_hidden_layers", "give the text model's config")
    return count


def _layer_configs(config: object) -> Sequence[object]:
    """Return a config per layer: models whose layers differ in shape carry one each."""
    per_layer = getattr(config, "per_layer_config", None)
    return [config] * _layer_count(config) if per_layer is None else list(per_layer)


def _layer_types(config: object) -> Sequence[str]:
    count = _layer_count(config)
    given = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    types = [_guess_type(config, index) for index in range(count)] if given is None else list(given)
    if len(types) != count:
        _refuse(config, f"{len(types)} layer_types for {count} layers", "mend the config")
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None:
        shared = _number(config, "num_kv_shared_layers") or 0
        modes = [None] * (count - shared) + ["reuse"] * shared
    return ["dummy" if mode == "reuse" else kind for kind, mode in zip(types, modes, strict=True)]


def _guess_type(config: object, index: int) -> str:
    """Tell the type of a layer in a config without `layer_types`."""
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked_attention"
    if getattr(config, "sliding_window", None) is None or getattr(config, "use_sliding_window", True) is False:
        return "full_attention"
    pattern = _number(config, "sliding_window_pattern")
    is_full = index < (_number(config, "max_window_layers") or 0) if pattern is None else (index + 1) % pattern == 0
    return "full_attention" if is_full else "sliding_attention"


def _window(config: object, index: int, kind: str, layer: object) -> int | None:
    if kind in _FULL:
        return None
    if kind not in _SLIDING:
        _refuse(
            config, f"layer {index} of type {kind!r}", "only full_attention and sliding_attention keep KV per token"
        )
    window = _number(layer, "sliding_window")
    if window is None:
        _refuse(config, f"sliding layer {index} without a sliding_window", "mend the config")
    return window


def _heads(layer: object, tp_size: int) -> tuple[int, int]:
    """Return kv heads per rank and head dimension."""
    query_heads = _number(layer, "num_attention_heads")
    heads = _number(layer, "num_key_value_heads") or query_heads
    if heads is None:
        _refuse(layer, "a model without attention heads", "only attention keeps KV per token")
    if heads % tp_size:
        advice = "describe what a rank keeps with KVLayout(groups=...)"
        _refuse(layer, f"tp_size {tp_size}, which does not divide {heads} kv heads,", advice)
    dim, hidden = _number(layer, "head_dim"), _number(layer, "hidden_size")
    if dim is None and hidden is not None and query_heads:
        dim = hidden // query_heads
    if dim is None:
        _refuse(layer, "a config without head_dim and hidden_size", "give the text model's config")
    return heads // tp_size, dim


def _group(
    key: tuple[int | None, int, int], layers: list[int], keys: Sequence[tuple[int | None, int, int]], dtype: str
) -> LayerGroup:
    window, heads, dim = key
    name = "full" if window is None else f"window-{window}"
    if sum(other[0] == window for other in keys) > 1:
        name += f"-{heads}x{dim}"
    spec = TensorSpec(heads, dim, dtype)
    return LayerGroup(name, layers, {"k": spec, "v": spec}, window=window)
