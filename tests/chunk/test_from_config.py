"""`KVLayout.from_config` against the caches that transformers itself fills."""

from types import SimpleNamespace

import pytest
import torch

from kvtier.chunk.layout import KVLayout, LayerGroup, TensorSpec
from kvtier.errors import ConfigError

TOKENS = 9
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 16}
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 4, "head_dim": 8},
    "Qwen2": {},
    "Qwen2 sliding": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "Qwen3": {"head_dim": 16},
    "Gemma2": GEMMA,
    "Gemma3Text": {**GEMMA, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "Phi3": {},
    "Cohere2": {"sliding_window": 4},
    "Olmo3": {"sliding_window": 4},
    "GPT2": {"n_layer": 4, "n_head": 4, "n_embd": 32, "n_positions": 64, "vocab_size": 64},
}


def make_config(transformers, name, sizes):
    family = name.split()[0]
    sizes = sizes if family == "GPT2" else {**TINY, **sizes}
    return getattr(transformers, f"{family}Config")(**sizes)


@pytest.mark.parametrize(("name", "sizes"), MODELS.items(), ids=MODELS.keys())
def test_equals_what_the_model_caches(name, sizes):
    """The oracle: a tiny random model of the family, run once; each layer of its cache has the shape foretold."""
    transformers = pytest.importorskip("transformers")
    config = make_config(transformers, name, sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    layout = KVLayout.from_config(model.config)
    cache = transformers.DynamicCache(config=model.config)
    names = {"cache": cache} if "cache" in model.forward.__code__.co_varnames else {"past_key_values": cache}
    with torch.inference_mode():
        model(torch.arange(TOKENS)[None], use_cache=True, **names)
    found = {}
    for group in layout.groups:
        for layer in group.layers:
            kept = TOKENS if group.window is None else min(TOKENS, group.window - 1)
            spec = group.tensors["k"]
            found[layer] = (spec.heads, kept, spec.dim, f"torch.{spec.dtype}", group.window is not None)
    given = {
        index: (*layer.keys.shape[1:], str(layer.keys.dtype), bool(getattr(layer, "is_sliding", False)))
        for index, layer in enumerate(cache.layers)
    }
    assert found == given
    values = {tuple(layer.values.shape) for layer in cache.layers}
    assert values == {tuple(layer.keys.shape) for layer in cache.layers}


def test_shared_layers_keep_nothing_and_shapes_may_differ():
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma4TextConfig(dtype="bfloat16")
    layout = KVLayout.from_config(config)
    shapes = {(group.name, group.window, group.tensors["k"].dim) for group in layout.groups}
    assert shapes == {("window-512", 512, 256), ("full", None, 512)}
    config = transformers.Gemma3nTextConfig(dtype="bfloat16")  # 35 layers, the last 15 reuse earlier ones
    assert sorted(i for group in KVLayout.from_config(config).groups for i in group.layers) == list(range(20))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MambaConfig", "layer 0 of type 'linear_attention'"),
        ("Qwen3NextConfig", "'linear_attention'"),
        ("JambaConfig", "'linear_attention'"),
        ("MiniMaxConfig", "layer 1 of type 'linear_attention'"),
        ("FalconH1Config", "'hybrid'"),
        ("Llama4TextConfig", "'chunked_attention'"),
        ("RwkvConfig", "without attention heads"),
        ("DeepseekV3Config", r"latent attention.*KVLayout.mla\(num_layers=61, latent_dim=576\)"),
        ("T5Config", "encoder-decoder"),
        ("FalconConfig", "multi_query"),
        ("MllamaConfig", "cross-attention"),
    ],
)
def test_models_that_are_refused(name, message):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=message):
        KVLayout.from_config(getattr(transformers, name)(), dtype="bfloat16")


# The rules one by one, on objects that only look like configs


def config(**fields):
    plain = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    return SimpleNamespace(**{"model_type": "toy", **plain, "dtype": "bfloat16", **fields})


def only(layout):
    (group,) = layout.groups
    return group


def test_plain():
    spec = TensorSpec(4, 16, "bfloat16")
    assert KVLayout.from_config(config()) == KVLayout([LayerGroup("full", 2, {"k": spec, "v": spec})])
    assert KVLayout.from_config(config(), axes="LHTD").axes == "LHTD"


def test_dtype():
    assert only(KVLayout.from_config(config(dtype=torch.float16))).tensors["k"].dtype == "float16"
    assert only(KVLayout.from_config(config(), dtype=torch.float32)).tensors["v"].dtype == "float32"
    old = config()
    del old.dtype
    old.torch_dtype = torch.float64
    assert only(KVLayout.from_config(old)).tensors["k"].dtype == "float64"
    with pytest.raises(ConfigError, match=r"toy has no dtype; give from_config\(\.\.\., dtype="):
        KVLayout.from_config(config(dtype=None))
    with pytest.raises(ConfigError, match="float31"):
        KVLayout.from_config(config(), dtype="float31")


def test_text_part_of_a_larger_model():
    whole = SimpleNamespace(dtype="float16", get_text_config=lambda decoder: config(dtype=None))
    assert only(KVLayout.from_config(whole)).tensors["k"] == TensorSpec(4, 16, "float16")


def test_heads():
    assert only(KVLayout.from_config(config(num_key_value_heads=None))).tensors["k"].heads == 8
    assert only(KVLayout.from_config(config(head_dim=None, hidden_size=256))).tensors["k"].dim == 32
    with pytest.raises(ConfigError, match="without head_dim"):
        KVLayout.from_config(config(head_dim=None))
    with pytest.raises(ConfigError, match="without num_hidden_layers"):
        KVLayout.from_config(config(num_hidden_layers=None))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_tensor_parallel(tp_size):
    assert only(KVLayout.from_config(config(), tp_size)).tensors["k"].heads == 4 // tp_size


@pytest.mark.parametrize(
    ("tp_size", "message"),
    [
        (3, "does not divide 4 kv heads"),
        (8, "does not divide"),
        (0, "tp_size is 0"),
        (True, "tp_size is True"),
        (2.0, "2.0"),
    ],
)
def test_tensor_parallel_sizes_that_do_not_divide(tp_size, message):
    with pytest.raises(ConfigError, match=message):
        KVLayout.from_config(config(), tp_size)


def test_windows_without_layer_types():
    assert only(KVLayout.from_config(config(sliding_window=7))).window == 7
    assert only(KVLayout.from_config(config(sliding_window=7, use_sliding_window=False))).window is None
    assert only(KVLayout.from_config(config(sliding_window=None))).window is None
    late = KVLayout.from_config(config(num_hidden_layers=4, sliding_window=7, max_window_layers=3))
    assert [(group.name, group.layers) for group in late.groups] == [("full", (0, 1, 2)), ("window-7", (3,))]
    every_third = KVLayout.from_config(config(num_hidden_layers=7, sliding_window=7, sliding_window_pattern=3))
    assert {group.name: group.layers for group in every_third.groups} == {"window-7": (0, 1, 3, 4, 6), "full": (2, 5)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"layer_types": ["full_attention", "conv"]}, "layer 1 of type 'conv'"),
        ({"layers_block_type": ["mamba", "attention"]}, "layer 0 of type 'mamba'"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding layer 0 without a sliding_window"),
        ({"attention_chunk_size": 8192}, "chunked_attention"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"layer_types": ["mlp", "moe"]}, "layers keep no KV"),
    ],
)
def test_configs_that_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        KVLayout.from_config(config(**fields))


def test_layers_without_attention_are_left_out():
    assert only(KVLayout.from_config(config(layer_types=["moe", "full_attention"]))).layers == (1,)


def test_layers_of_two_shapes_get_two_groups():
    layers = [config(head_dim=dim) for dim in (16, 32, 16)]
    layout = KVLayout.from_config(config(num_hidden_layers=3, per_layer_config=layers))
    assert {group.name: group.layers for group in layout.groups} == {"full-4x16": (0, 2), "full-4x32": (1,)}
