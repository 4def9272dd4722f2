"""What a namespace takes, pins and tells apart."""

import dataclasses

import pytest

from kvtier.errors import ConfigError, InvalidKeyError
from kvtier.keys import Namespace

LAYOUT = {
    "axes": "LTHD",
    "groups": [
        {"name": "full", "layers": [0], "window": None, "tensors": {"k": [2, 64, "bfloat16"], "v": [2, 64, "bfloat16"]}}
    ],
}
LATENT = {
    "axes": "LTHD",
    "groups": [{"name": "full", "layers": [0], "window": None, "tensors": {"latent": [None, 576, "bfloat16"]}}],
}
MIXED = {"axes": "LTHD", "groups": [*LATENT["groups"], {**LAYOUT["groups"][0], "name": "other"}]}


def digest(space, layout=LAYOUT, chunk_tokens=256):
    return space.fingerprint(layout=layout, chunk_tokens=chunk_tokens)


def test_a_bare_name_pins_no_weights():
    assert not Namespace(model="x").persistent_ok
    assert Namespace(model="x", revision="0123abc").persistent_ok
    assert Namespace(model="x", weights="digest").persistent_ok
    assert not Namespace(model="x", config="digest").persistent_ok


def test_a_namespace_is_a_value():
    assert Namespace(model="x") == Namespace(model="x")
    assert len({Namespace(model="x"), Namespace(model="x"), Namespace(model="y")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Namespace(model="x").model = "y"


def test_its_text_is_the_start_of_its_digest():
    space = digest(Namespace(model="x"))
    assert len(space.bytes32) == 32
    assert space.text16 == space.bytes32.hex()[:16]


def test_layouts_count_by_content_not_by_order():
    turned = {"groups": LAYOUT["groups"], "axes": "LTHD"}
    assert digest(Namespace(model="x"), turned) == digest(Namespace(model="x"))


def test_ranks_have_their_own_keys():
    space = Namespace(model="x")
    ranks = [space.rank(tp=tp, tp_size=2, pp=pp, pp_size=2) for tp in (0, 1) for pp in (0, 1)]
    assert len({digest(each) for each in [space, *ranks]}) == 5
    assert space.rank() == space


def test_latents_are_the_same_on_every_tensor_parallel_rank():
    space = Namespace(model="x")
    ranks = [space.rank(tp=tp, tp_size=size) for size in (1, 2, 4) for tp in range(size)]
    assert len({digest(each, LATENT) for each in ranks}) == 1
    assert len({digest(each, MIXED) for each in ranks}) == len(ranks)
    pipeline = [space.rank(pp=pp, pp_size=2) for pp in (0, 1)]
    assert len({digest(each, LATENT) for each in pipeline}) == 2


@pytest.mark.parametrize("layout", [{}, {"groups": []}, {"groups": [5]}, {"groups": [{"tensors": 5}]}])
def test_an_unknown_layout_counts_ranks(layout):
    space = Namespace(model="x")
    assert digest(space.rank(tp=0, tp_size=2), layout) != digest(space.rank(tp=1, tp_size=2), layout)


@pytest.mark.parametrize("name", ["model", "revision", "weights", "config", "kv_dtype", "rope"])
@pytest.mark.parametrize("value", ["", 5, True, b"x", "\ud800"])
def test_a_field_is_text(name, value):
    with pytest.raises(ConfigError, match=f"namespace.{name} "):
        Namespace(**{"model": "x", name: value})


def test_a_model_must_be_named():
    with pytest.raises(ConfigError, match=r"namespace.model is None"):
        Namespace(model=None)
    with pytest.raises(ConfigError, match=r"known: 'short', 'long'"):
        Namespace(model="x", rope="medium")


@pytest.mark.parametrize(
    "rank",
    [{"tp": 1}, {"tp": -1}, {"tp": True, "tp_size": 2}, {"tp_size": 0}, {"pp": 2, "pp_size": 2}, {"pp_size": 1.0}],
)
def test_a_rank_lies_below_its_size(rank):
    with pytest.raises(ConfigError, match=r"namespace.(tp|pp)"):
        Namespace(model="x").rank(**rank)


@pytest.mark.parametrize("size", [0, True, None])
def test_a_chunk_size_is_a_count(size):
    with pytest.raises(InvalidKeyError, match="chunk_tokens"):
        digest(Namespace(model="x"), chunk_tokens=size)
