"""Namespaces of real model objects and checkpoint folders: what they tell apart and what they do not."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvtier.errors import ConfigError
from kvtier.keys import Namespace

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def small_model(seed=0, **settings):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **settings})).eval()


@pytest.fixture
def folder(tmp_path):
    small_model().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def spaces(*models):
    return [Namespace.from_model(model) for model in models]


def test_one_model_has_one_namespace():
    one, other = spaces(small_model(), small_model())
    assert one == other
    assert one.persistent_ok
    assert (one.model, one.kv_dtype, one.revision, one.rope) == ("llama", "float32", None, None)


def test_two_checkpoints_of_one_shape_never_share():
    assert len(set(spaces(small_model(0), small_model(1)))) == 2


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_one_changed_bit_is_seen(name):
    model = small_model()
    before = Namespace.from_model(model)
    weight = dict(model.named_parameters())[name].data.view(torch.int32)
    weight.view(-1)[-1] ^= 1
    assert Namespace.from_model(model) != before
    weight.view(-1)[-1] ^= 1
    assert Namespace.from_model(model) == before


def test_weights_changed_after_loading_are_not_those_of_the_file(folder):
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    before = Namespace.from_model(loaded)
    assert before == Namespace.from_model(small_model())  # where it came from does not count
    loaded.model.layers[0].self_attn.v_proj.weight.data.mul_(1.0001)
    assert Namespace.from_model(loaded) != before


def test_the_same_values_in_another_dtype_are_other_weights():
    half = small_model().to(torch.bfloat16)
    one, other = spaces(half, small_model().to(torch.bfloat16).to(torch.float32))
    assert one.kv_dtype == "bfloat16"
    assert one.weights != other.weights
    assert Namespace.from_model(half, kv_dtype="float8_e4m3fn") != one


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rms_norm_eps": 1e-4},
        {"attention_bias": True},
    ],
)
def test_settings_that_change_kv_count(settings):
    one = Namespace.from_model(small_model(), weights="w")
    assert Namespace.from_model(small_model(**settings), weights="w") != one


def test_settings_that_do_not_change_kv_do_not_count():
    plain = small_model()
    one = Namespace.from_model(plain)
    plain.config._name_or_path = "/somewhere/else"
    plain.config.use_cache = False
    plain.config.pad_token_id = 3
    plain.config.transformers_version = "9.9"
    assert Namespace.from_model(plain) == one


class Wrapped:
    """A model as peft wraps it: layers renamed, LoRA weights beside them."""

    def __init__(self, model):
        self.inner = model
        self.config = model.config
        self.dtype = model.dtype

    def get_base_model(self):
        return self

    def state_dict(self):
        renamed = {}
        for name, tensor in self.inner.state_dict().items():
            stem, _, last = name.rpartition(".")
            if "q_proj" in name:
                renamed[f"{stem}.base_layer.{last}"] = tensor
                renamed[f"{stem}.lora_A.default.weight"] = torch.rand(4, 16)
                renamed[f"{stem}.lora_B.default.weight"] = torch.rand(16, 4)
            else:
                renamed[name] = tensor
        return renamed


def test_injected_lora_layers_do_not_count():
    one, other = spaces(small_model(), Wrapped(small_model()))
    assert one == other


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, on import of its compiler
def test_a_compiled_model_is_the_same_model():
    one, other = spaces(small_model(), torch.compile(small_model()))
    assert one == other


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64])
def test_weights_of_any_dtype_and_stride_are_read(dtype):
    class Odd:
        config = LlamaConfig()

        def __init__(self, tensor):
            self.tensor = tensor

        def state_dict(self):
            return {"w": self.tensor, "empty": torch.zeros(0), "scalar": torch.tensor(3)}

    values = torch.arange(24).reshape(4, 6).to(dtype)
    one, other = spaces(Odd(values), Odd(values.t().contiguous().t()))
    assert one == other
    assert Namespace.from_model(Odd(values.t())) != one
    assert Namespace.from_model(Odd(values[:, 1])) == Namespace.from_model(Odd(values[:, 1].clone()))
    assert Namespace.from_model(Odd(values.reshape(6, 4))) != one


def test_weights_larger_than_a_piece_are_read_whole():
    class Large:
        config = LlamaConfig()

        def __init__(self, changed):
            self.tensor = torch.zeros(600_001, dtype=torch.int32)
            self.tensor[changed] = 1

        def state_dict(self):
            return {"w": self.tensor}

    places = (0, 262_143, 262_144, 524_288, 600_000)
    assert len(set(spaces(*map(Large, places)))) == len(places)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, device="meta"), "is not in memory"),
        (torch.eye(2).to_sparse(), "has no plain bytes"),
        (b"state", "is a bytes, not a tensor"),
    ],
)
def test_weights_that_cannot_be_read_are_named(tensor, reason):
    model = small_model()
    model.state_dict = lambda: {"fine": torch.zeros(2), "layer.odd": tensor}
    with pytest.raises(ConfigError, match=rf"weight .layer.odd. .*{reason}.*give weights=<digest>"):
        Namespace.from_model(model)
    assert Namespace.from_model(model, weights="by hand").weights == "by hand"


def test_equal_bits_of_another_dtype_are_other_weights():
    def typed(tensor):
        model = small_model()
        model.state_dict = lambda: {"w": tensor}
        return model

    bits = torch.arange(6, dtype=torch.int32)
    assert len(set(spaces(typed(bits), typed(bits.view(torch.float32))))) == 2


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), 5, None])
def test_what_is_no_model_is_refused(thing):
    with pytest.raises(ConfigError, match="no transformers model"):
        Namespace.from_model(thing)


# folders


def test_a_folder_counts_by_content(folder, tmp_path):
    one = Namespace.from_model(folder)
    assert one == Namespace.from_model(str(folder))
    assert (one.model, one.kv_dtype) == ("llama", None)
    shutil.copytree(folder, tmp_path / "copy")
    assert Namespace.from_model(tmp_path / "copy") == one
    small_model(1).save_pretrained(tmp_path / "other")
    assert Namespace.from_model(tmp_path / "other") != one


def test_settings_of_a_folder_count(folder):
    one = Namespace.from_model(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "transformers_version": "9", "dtype": "float16"}))
    assert Namespace.from_model(folder) == one
    (folder / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.5}))
    assert Namespace.from_model(folder) != one


def test_every_weight_file_counts_and_trainer_files_do_not(folder):
    one = Namespace.from_model(folder)
    for name in ("optimizer.pt", "rng_state_0.pth", "training_args.bin", "adapter_model.safetensors", "notes.txt"):
        (folder / name).write_bytes(b"x")
    (folder / "more.bin").mkdir()
    assert Namespace.from_model(folder) == one
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert Namespace.from_model(folder) != one


def test_no_hub_is_asked(monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("network")

    monkeypatch.setattr("socket.socket.connect", no_network)
    with pytest.raises(ConfigError, match=r"no folder 'org/name'.*never downloads.*revision="):
        Namespace.from_model("org/name")


def test_folders_that_cannot_be_read(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"cannot read .*config.json"):
        Namespace.from_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no settings"):
        Namespace.from_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weight files"):
        Namespace.from_model(tmp_path)
    assert Namespace.from_model(tmp_path, weights="w").model == "unknown"
    with pytest.raises(ConfigError, match="no folder"):
        Namespace.from_model(folder / "model.safetensors")


# RoPE that depends on the length

YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def test_a_fixed_rope_needs_no_regime():
    model = small_model(rope_parameters=YARN)
    assert Namespace.from_model(model).rope is None
    with pytest.raises(ConfigError, match="does not depend on the length"):
        Namespace.from_model(model, rope="short")


@pytest.mark.parametrize("parameters", [LONG, DYNAMIC], ids=["longrope", "dynamic"])
def test_a_rope_that_depends_on_the_length_needs_a_regime(parameters):
    model = small_model(rope_parameters=parameters)
    with pytest.raises(ConfigError, match=rf"'{parameters['rope_type']}' changes its frequencies.*rope='short'"):
        Namespace.from_model(model)
    assert Namespace.from_model(model, rope="short").rope == "short"


def test_longrope_has_two_regimes_that_never_share():
    model = small_model(rope_parameters=LONG)
    assert Namespace.from_model(model, rope="short") != Namespace.from_model(model, rope="long")


def test_dynamic_rope_has_no_long_regime():
    with pytest.raises(ConfigError, match="only 'short'"):
        Namespace.from_model(small_model(rope_parameters=DYNAMIC), rope="long")


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2}},
        {"rope_scaling": {"type": "su"}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "longrope"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        {"text_config": {"rope_parameters": {"rope_type": "dynamic"}}},
        {"parts": [{"rope_scaling": {"rope_type": "longrope"}}]},
        {"use_dynamic_ntk": True},
    ],
    ids=str,
)
def test_a_regime_is_found_wherever_it_is_said(folder, settings):
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="changes its frequencies"):
        Namespace.from_model(folder)
    assert Namespace.from_model(folder, rope="short").rope == "short"


def test_settings_without_fixed_text_are_named():
    model = small_model()
    model.config.to_dict = lambda: {"fine": {1, 2}, "dtype": object(), "odd": {"deep": [object()]}}
    with pytest.raises(ConfigError, match=r"config\.odd\.deep\[0\] is a object"):
        Namespace.from_model(model, weights="w")
