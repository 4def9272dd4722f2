"""Hugging Face transformers: load a prompt's stored KV into a cache, compute the rest, store what is new.

`cached_generate` is the one call for people. Serving loops of their own use the halves: `load_prefix` before their
forward passes, `save_prefix` after, or `prefill` for both around a chunk-wise prefill.
"""

from kvtier.adapters.transformers.compute import Prefilled, prefill
from kvtier.adapters.transformers.generate import Generated, cached_generate
from kvtier.adapters.transformers.plan import kv_layout
from kvtier.adapters.transformers.restore import Loaded, load_prefix
from kvtier.adapters.transformers.save import save_prefix

__all__ = ["Generated", "Loaded", "Prefilled", "cached_generate", "kv_layout", "load_prefix", "prefill", "save_prefix"]
