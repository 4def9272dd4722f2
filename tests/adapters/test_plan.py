"""Which models are taken, under which layout, and how the others are refused."""

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvtier.adapters.transformers import kv_layout, load_prefix
from kvtier.adapters.transformers.plan import cache_argument, cache_layers
from kvtier.chunk.layout import KVLayout
from kvtier.errors import KVTierError, LayoutMismatchError, UnsupportedCacheLayerError, UnsupportedModelError


def test_kv_layout_of_full_attention(kit):
    layout = kv_layout(kit.llama())
    assert layout == KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", axes="LHTD")


def test_kv_layout_groups_layers_by_window(kit):
    layout = kv_layout(kit.gemma(window=24))
    groups = {group.window: (group.layers, group.tensors["k"].heads, group.tensors["k"].dim) for group in layout.groups}
    assert groups == {None: ((2,), 1, 16), 24: ((0, 1, 3), 1, 16)}


def test_kv_layout_takes_the_dtype_of_the_weights(kit):
    assert kv_layout(kit.llama().to(torch.bfloat16)).groups[0].tensors["v"].dtype == "bfloat16"


def test_a_window_without_layer_types_counts():
    config = MistralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=12,
    )
    layout = kv_layout(MistralForCausalLM(config).eval())
    assert [(group.layers, group.window) for group in layout.groups] == [((0, 1), 12)]


async def test_a_store_of_another_model_is_refused(kit, llama, gemma):
    with pytest.raises(LayoutMismatchError, match="layer 0 is full attention in the layout and a window of 24"):
        await load_prefix(gemma, kit.store(llama), kit.tokens(20))
    store = kit.store(llama)
    store.layout = None
    with pytest.raises(LayoutMismatchError, match="layout=kv_layout"):
        await load_prefix(llama, store, kit.tokens(20))
    store.layout = KVLayout.mla(num_layers=3, latent_dim=16, dtype="float32")
    with pytest.raises(LayoutMismatchError, match="latent"):
        await load_prefix(llama, store, kit.tokens(20))


def tiny_mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))


def tiny_qwen3_next():
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            linear_num_key_heads=1,
            linear_num_value_heads=1,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        )
    )


@pytest.mark.parametrize("make", [tiny_mamba, tiny_qwen3_next])
def test_recurrent_layers_are_refused_by_name(make):
    with pytest.raises(UnsupportedCacheLayerError, match=r"cache layer 0 is a LinearAttentionLayer"):
        kv_layout(make().eval())


def test_encoder_decoders_are_refused():
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        kv_layout(T5ForConditionalGeneration(config).eval())


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_changes_with_the_length_is_refused(kit, rope):
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 512}
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    with pytest.raises(UnsupportedModelError, match=rope):
        kv_layout(kit.llama(rope_parameters=parameters))


def test_rope_of_a_single_layer_type_counts(kit):
    parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    }
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        kv_layout(kit.gemma(rope_parameters=parameters))


def test_bidirectional_attention_is_refused():
    config = Gemma3TextConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        use_bidirectional_attention=True,
    )
    with pytest.raises(UnsupportedModelError, match="both directions"):
        kv_layout(Gemma3ForCausalLM(config).eval())


def test_training_mode_is_refused(kit):
    with pytest.raises(UnsupportedModelError, match=r"eval\(\)"):
        kv_layout(kit.llama().train())


def test_refusals_are_part_of_the_error_tree():
    assert issubclass(UnsupportedCacheLayerError, UnsupportedModelError)
    assert issubclass(UnsupportedModelError, KVTierError)


def test_the_cache_argument_has_the_name_that_this_transformers_gives_it(kit, llama):
    assert cache_argument(llama) == "cache"

    class Older:
        def forward(self, input_ids, past_key_values=None):
            raise NotImplementedError

    class Neither:
        def forward(self, input_ids):
            raise NotImplementedError

    assert cache_argument(Older()) == "past_key_values"
    with pytest.raises(UnsupportedModelError, match="Neither"):
        cache_argument(Neither())


def test_layers_without_kv_of_their_own_are_skipped(kit):
    cache = DynamicCache(config=kit.llama().config)
    from transformers.cache_utils import DummyLayer

    cache.layers[1] = DummyLayer()
    assert cache_layers(cache) == {0: None, 2: None}
