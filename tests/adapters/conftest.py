"""Tiny random models, and a store in a dict that follows the store's contract by brute force."""

from dataclasses import dataclass, field

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from kvtier.chunk.layout import KVLayout, LayerGroup, TensorSpec

CHUNK = 16
VOCABULARY = 211


@dataclass
class FakeHit:
    num_tokens: int
    kv: object
    lossy: bool = False
    tiers: dict = field(default_factory=lambda: {"fake": 1})
    complete: bool = True


@dataclass
class FakeStore:
    """Chunks by (identity, tokens up to the chunk's end, group): the contract of get, put and exists, word by word."""

    layout: KVLayout
    chunk_tokens: int = CHUNK
    chunks: dict = field(default_factory=dict)
    puts: list = field(default_factory=list)
    lossy_hits: bool = False

    async def exists(self, prefix):
        return self._usable(prefix, len(prefix))

    async def get(self, prefix, *, start=0, max_tokens=None, min_benefit_seconds=None, hint=None):
        assert min_benefit_seconds is None, "only a real store knows what pays"
        limit = len(prefix) if max_tokens is None else min(len(prefix), max_tokens)
        usable = self._usable(prefix, limit)
        if usable <= start:
            return None
        kv = {group.name: self._read(prefix, group, start, usable) for group in self.layout.groups}
        return FakeHit(usable, kv, lossy=self.lossy_hits)

    async def put(self, prefix, kv, *, start=0, lossy=False, hint=None):
        matched = self.layout.match(kv, tokens=len(prefix) - start)
        self.puts.append((start, len(prefix), lossy))
        for low in range(-(-start // self.chunk_tokens) * self.chunk_tokens, len(prefix), self.chunk_tokens):
            high = low + self.chunk_tokens
            if high > len(prefix):
                break
            for group in self.layout.groups:
                tensors = matched[group.name]
                held = tensors["k"].shape[self._axis]
                first = len(prefix) - held
                if low >= first:
                    self.chunks[self._key(prefix, high, group)] = {
                        name: tensor.narrow(self._axis, low - first, self.chunk_tokens).clone()
                        for name, tensor in tensors.items()
                    }
        return self.puts[-1]

    @property
    def _axis(self):
        return self.layout.axes.index("T")

    def _key(self, prefix, end, group):
        return (prefix._words[: 4 * end], prefix._salts, prefix._lora, group.name)

    def _has(self, prefix, group, index):
        return self._key(prefix, (index + 1) * self.chunk_tokens, group) in self.chunks

    def _usable(self, prefix, limit):
        for length in range(min(limit, len(prefix) // self.chunk_tokens * self.chunk_tokens), 0, -1):
            if all(
                self._has(prefix, group, index)
                for group in self.layout.groups
                for index in range(self._first(group, 0, length) // self.chunk_tokens, -(-length // self.chunk_tokens))
            ):
                return length
        return 0

    def _first(self, group, start, length):
        return start if group.window is None else max(start, length - (group.window - 1))

    def _read(self, prefix, group, start, length):
        first = self._first(group, start, length)
        indices = range(first // self.chunk_tokens, -(-length // self.chunk_tokens))
        parts = [self.chunks[self._key(prefix, (index + 1) * self.chunk_tokens, group)] for index in indices]
        skip = first - indices[0] * self.chunk_tokens if indices else 0
        return {
            name: torch.cat([part[name] for part in parts], dim=self._axis).narrow(self._axis, skip, length - first)
            for name in ("k", "v")
        }


def make_llama(seed=0, **changes):
    torch.manual_seed(seed)
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.4,
    }
    return LlamaForCausalLM(LlamaConfig(**{**options, **changes})).eval()


def make_gemma(seed=0, window=24, **changes):
    torch.manual_seed(seed)
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": window,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.4,
    }
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**options, **changes})).eval()


def layout_of(model, axes="LHTD"):
    """The layout written down by hand, so that `kv_layout` is compared with something."""
    config = model.config
    spec = TensorSpec(config.num_key_value_heads, config.head_dim, str(model.dtype))
    kinds = (
        config.layer_types if getattr(config, "layer_types", None) else ["full_attention"] * config.num_hidden_layers
    )
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    windowed = [index for index, kind in enumerate(kinds) if kind != "full_attention"]
    groups = [LayerGroup("full", full, {"k": spec, "v": spec})]
    if windowed:
        groups.append(LayerGroup("windowed", windowed, {"k": spec, "v": spec}, window=config.sliding_window))
    return KVLayout(groups, axes=axes)


def tokens(count, seed=0):
    return torch.randint(0, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def llama():
    return make_llama()


@pytest.fixture
def gemma():
    return make_gemma()


@pytest.fixture
def kit():
    """What the tests of this folder share."""
    return Kit()


class Kit:
    chunk = CHUNK
    vocabulary = VOCABULARY
    llama = staticmethod(make_llama)
    gemma = staticmethod(make_gemma)
    tokens = staticmethod(tokens)
    layout = staticmethod(layout_of)

    @staticmethod
    def store(model, axes="LHTD", **options):
        return FakeStore(layout_of(model, axes), **options)
