"""Shapes of known models, and layouts from a Hugging Face `config.json`, for sizing without loading a model."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

from kvtier.chunk.layout import KVLayout
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping

_DENSE: Final[dict[str, tuple[int, int, int]]] = {  # layers, KV heads, head dimension
    "llama-3.1-8b": (32, 8, 128),
    "llama-3.1-70b": (80, 8, 128),
    "llama-3.1-405b": (126, 8, 128),
    "llama-2-7b": (32, 32, 128),
    "mistral-7b-v0.3": (32, 8, 128),
    "mixtral-8x7b": (32, 8, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen2.5-32b": (64, 8, 128),
    "qwen2.5-72b": (80, 8, 128),
    "qwen3-8b": (36, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "smollm2-135m": (30, 3, 64),
}
_LATENT: Final[dict[str, tuple[int, int]]] = {  # layers, latent and rope dimensions together
    "deepseek-v2": (60, 576),
    "deepseek-v3": (61, 576),
    "deepseek-v2-lite": (27, 576),
}
_OTHER_TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config")


def known_shapes() -> tuple[str, ...]:
    """Return the names that `shape_of` knows."""
    return tuple(sorted({*_DENSE, *_LATENT}))


def shape_of(name: str) -> KVLayout:
    """Return the layout of a known model, in BF16.

    Raises:
        ConfigError: unknown; it lists the names.
    """
    if name in _DENSE:
        layers, heads, dim = _DENSE[name]
        return KVLayout(num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype="bfloat16")
    if name in _LATENT:
        layers, dim = _LATENT[name]
        return KVLayout.mla(num_layers=layers, latent_dim=dim, dtype="bfloat16")
    raise ConfigError(f"no shape {name!r}; known: {', '.join(known_shapes())}; or give a config.json, or the numbers")


def shape_in(path: pathlib.Path) -> KVLayout:
    """Return the layout that a Hugging Face `config.json` describes; latents of MLA models as engines keep them.

    Raises:
        ConfigError: no JSON object, or a model whose KV is not kept per token.
        OSError: the file cannot be read.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ConfigError(f"{path}: is no JSON: {exc}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: is no JSON object")
    text = next((fields[name] for name in _OTHER_TEXT_CONFIGS if isinstance(fields.get(name), dict)), fields)
    return _layout({"dtype": _dtype(fields)} | text | {"dtype": _dtype(text) or _dtype(fields)})


def _dtype(fields: Mapping[str, object]) -> object:
    return fields.get("dtype") or fields.get("torch_dtype")


def _layout(fields: Mapping[str, object]) -> KVLayout:
    dtype = str(fields.get("dtype") or "bfloat16")
    rank, layers = fields.get("kv_lora_rank"), fields.get("num_hidden_layers")
    if isinstance(rank, int) and isinstance(layers, int):
        rope = fields.get("qk_rope_head_dim")
        latent = rank + (rope if isinstance(rope, int) else 0)
        return KVLayout.mla(num_layers=layers, latent_dim=latent, dtype=dtype)
    return KVLayout.from_config(SimpleNamespace(**fields), dtype=dtype)
