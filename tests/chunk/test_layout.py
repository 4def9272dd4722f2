"""Layouts: what they describe, what fits them, what is refused."""

import json
import pickle

import pytest
import torch

from kvtier.chunk.layout import KVLayout, LayerGroup, TensorSpec
from kvtier.chunk.segments import SegmentSpec
from kvtier.errors import ConfigError, InvalidValueError, LayoutMismatchError

KV = TensorSpec(2, 8, "float32")
GEMMA = [
    LayerGroup("full", [5, 11], {"k": KV, "v": KV}),
    LayerGroup("window-6", [0, 1, 2, 3, 4, 6, 7, 8, 9, 10], {"k": KV, "v": KV}, window=6),
]


def short(**changes):
    return KVLayout(**{"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32", **changes})


def kv_of(layout, tokens, **changes):
    kv = {}
    for group in layout.groups:
        specs = layout.specs(group.name, tokens=tokens, first_token=0)
        kv[group.name] = {s.name: torch.randn(s.shape).to(getattr(torch, s.dtype)) for s in specs}
    return kv


def test_short_form():
    layout = short()
    assert layout.groups == (LayerGroup("full", range(3), {"k": KV, "v": KV}),)
    assert layout.axes == "LTHD"
    assert layout == KVLayout([LayerGroup("full", [0, 1, 2], {"v": KV, "k": KV})])
    assert KVLayout(num_layers=1, num_kv_heads=1, head_dim=1).groups[0].tensors["k"].dtype == "bfloat16"


def test_torch_dtypes_are_taken():
    assert short(dtype=torch.float8_e4m3fn) == short(dtype="float8_e4m3fn")
    assert TensorSpec(1, 1, torch.bfloat16).dtype == "bfloat16"


@pytest.mark.parametrize(("axes", "shape"), [("LTHD", (3, 7, 2, 8)), ("LHTD", (3, 2, 7, 8))])
def test_specs(axes, shape):
    assert short(axes=axes).specs("full", tokens=7, first_token=512) == tuple(
        SegmentSpec(name=name, dtype="float32", shape=shape, axes=axes, first_token=512) for name in ("k", "v")
    )


def test_segments_are_in_one_order_whatever_the_caller_wrote():
    layout = KVLayout([LayerGroup("g", 1, {"v": KV, "k_scale": TensorSpec(2, 1, "float32"), "k": KV})])
    assert [spec.name for spec in layout.specs("g", tokens=1, first_token=0)] == ["k", "k_scale", "v"]


def test_sizes():
    assert short().bytes_per_token() == 3 * 2 * 2 * 8 * 4
    layout = KVLayout(GEMMA)
    assert layout.bytes_per_token("full") == 2 * 2 * 2 * 8 * 4
    assert layout.bytes_per_token() == 12 * 2 * 2 * 8 * 4
    # SmolLM2-135M as measured: 30 layers, 3 kv heads, 64 dims, bfloat16
    assert KVLayout(num_layers=30, num_kv_heads=3, head_dim=64).bytes_per_token() == 23_040


def test_equality_hash_repr_pickle():
    layouts = [short(), short(axes="LHTD"), short(num_layers=4), short(dtype="float16"), KVLayout(GEMMA)]
    layouts += [KVLayout(GEMMA[::-1]), KVLayout.mla(num_layers=3, latent_dim=16)]
    assert len(set(layouts)) == len(layouts)
    described = [json.dumps(layout.describe()) for layout in layouts]
    assert len(set(described)) == len(layouts)
    assert short() != "something else"
    for layout in layouts:
        assert pickle.loads(pickle.dumps(layout)) == layout
        assert eval(repr(layout)) == layout


def test_description_is_plain():
    assert KVLayout(GEMMA).describe() == {
        "axes": "LTHD",
        "groups": [
            {
                "name": "full",
                "layers": [5, 11],
                "window": None,
                "tensors": {"k": [2, 8, "float32"], "v": [2, 8, "float32"]},
            },
            {
                "name": "window-6",
                "layers": [0, 1, 2, 3, 4, 6, 7, 8, 9, 10],
                "window": 6,
                "tensors": {"k": [2, 8, "float32"], "v": [2, 8, "float32"]},
            },
        ],
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (KVLayout, "num_layers is None"),
        (lambda: short(num_layers=0), "num_layers is 0"),
        (lambda: short(num_kv_heads=-1), "num_kv_heads is -1"),
        (lambda: short(head_dim=True), "head_dim is True"),
        (lambda: short(head_dim=8.0), "head_dim is 8.0"),
        (lambda: short(dtype="float31"), "dtype 'float31'"),
        (lambda: short(dtype="bytes"), "dtype 'bytes'"),
        (lambda: short(axes="TLHD"), "axes is 'TLHD'; known: LTHD, LHTD"),
        (lambda: KVLayout(GEMMA, num_layers=2), "not both"),
        (lambda: KVLayout([]), "groups with names of their own"),
        (lambda: KVLayout([GEMMA[0], LayerGroup("full", [0], {"k": KV})]), "names of their own"),
        (lambda: KVLayout([GEMMA[0], LayerGroup("other", [5], {"k": KV})]), r"layers \[5\] are in group 'other'"),
        (lambda: LayerGroup("g", [], {"k": KV}), "at least one"),
        (lambda: LayerGroup("g", 0, {"k": KV}), "layers is 0"),
        (lambda: LayerGroup("g", [1, 0], {"k": KV}), "must ascend"),
        (lambda: LayerGroup("g", [1, 1], {"k": KV}), "must ascend"),
        (lambda: LayerGroup("g", [-1], {"k": KV}), "indices >= 0"),
        (lambda: LayerGroup("g", [0.0], {"k": KV}), "indices >= 0"),
        (lambda: LayerGroup("g", [0], {}), "has no tensors"),
        (lambda: LayerGroup("g", [0], {"": KV}), "tensor name is ''"),
        (lambda: LayerGroup("", [0], {"k": KV}), "layer group name is ''"),
        (lambda: LayerGroup("g\n", [0], {"k": KV}), "printable"),
        (lambda: LayerGroup("g" * 65, [0], {"k": KV}), "1 to 64"),
        (lambda: LayerGroup("g", [0], {"k": KV}, window=0), "window is 0"),
        (lambda: LayerGroup("g", [0], {"k": KV}, kind="state"), "kind 'state' is not supported .*recurrent"),
        (lambda: LayerGroup("g", [0], {"k": KV}, kind="mamba"), "kind 'mamba' is not supported"),
        (lambda: TensorSpec(0, 8), "heads is 0"),
        (lambda: KVLayout.mla(num_layers=2, latent_dim=0), "dim is 0"),
    ],
)
def test_layouts_that_make_no_sense(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_longest_name():
    assert LayerGroup("g" * 64, [0], {"k" * 64: KV}).name == "g" * 64


# Matching


@pytest.mark.parametrize("axes", ["LTHD", "LHTD"])
def test_match_one_group_in_both_forms(axes):
    layout = short(axes=axes)
    kv = kv_of(layout, 7)
    for given in (kv, kv["full"]):
        found = layout.match(given, tokens=7)
        assert found.keys() == {"full"}
        assert all(found["full"][name].data_ptr() == kv["full"][name].data_ptr() for name in ("k", "v"))


def test_match_takes_any_strides_and_drops_the_graph():
    layout = short()
    whole = torch.randn(3, 50, 2, 8, requires_grad=True)
    found = layout.match({"k": whole[:, 10:17], "v": whole[:, 20:27]}, tokens=7)
    assert found["full"]["k"].stride() == whole.stride()
    assert not found["full"]["k"].requires_grad


@pytest.mark.parametrize("tokens", [1, 4, 5, 6, 20])
def test_windowed_groups_come_whole_or_as_their_tail(tokens):
    layout = KVLayout(GEMMA)
    whole = kv_of(layout, tokens)
    assert layout.match(whole, tokens=tokens)["window-6"]["k"].shape[1] == tokens
    tail = {"full": whole["full"], "window-6": kv_of(layout, min(tokens, 5))["window-6"]}
    assert layout.match(tail, tokens=tokens)["window-6"]["k"].shape[1] == min(tokens, 5)


def test_windowed_groups_in_other_lengths():
    layout = KVLayout(GEMMA)
    whole = kv_of(layout, 20)
    for length in (4, 6, 19, 21):
        with pytest.raises(LayoutMismatchError, match=r"window-6\.k is float32 .* or float32"):
            layout.match({**whole, "window-6": kv_of(layout, length)["window-6"]}, tokens=20)
    mixed = {"k": whole["window-6"]["k"], "v": whole["window-6"]["v"][:, :5]}
    with pytest.raises(LayoutMismatchError, match=r"hold \[5, 20\] tokens"):
        layout.match({**whole, "window-6": mixed}, tokens=20)
    with pytest.raises(LayoutMismatchError, match=r"full\.k"):
        layout.match({**whole, "full": kv_of(layout, 5)["full"]}, tokens=20)


def test_a_window_of_one_keeps_nothing():
    layout = KVLayout([LayerGroup("w", 1, {"k": KV}, window=1)])
    assert layout.match({"k": torch.zeros(1, 0, 2, 8)}, tokens=9)["w"]["k"].shape == (1, 0, 2, 8)


def test_mla():
    layout = KVLayout.mla(num_layers=2, latent_dim=24, dtype="float32")
    spec = layout.specs("full", tokens=5, first_token=0)[0]
    assert (spec.name, spec.shape, spec.axes) == ("latent", (2, 5, 24), "LTD")
    assert layout.bytes_per_token() == 2 * 24 * 4
    flat, with_head = torch.randn(2, 5, 24), torch.randn(2, 5, 1, 24)
    assert torch.equal(layout.match({"latent": flat}, tokens=5)["full"]["latent"], flat)
    assert torch.equal(layout.match({"latent": with_head}, tokens=5)["full"]["latent"], with_head[:, :, 0])
    heads_first = KVLayout.mla(num_layers=2, latent_dim=24, dtype="float32", axes="LHTD")
    assert heads_first.match({"latent": torch.randn(2, 1, 5, 24)}, tokens=5)["full"]["latent"].shape == (2, 5, 24)
    for wrong in (
        torch.randn(2, 1, 5, 24),
        torch.randn(2, 5, 2, 24),
        torch.randn(2, 5, 1, 1, 24),
        torch.randn(2, 5, 23),
    ):
        with pytest.raises(LayoutMismatchError, match=r"full\.latent"):
            layout.match({"latent": wrong}, tokens=5)


def test_keys_keep_their_head_axis_of_one():
    layout = short(num_kv_heads=1)
    assert layout.match(kv_of(layout, 4), tokens=4)["full"]["k"].shape == (3, 4, 1, 8)


def test_fp8_with_scales():
    tensors = {name: TensorSpec(2, 8, "float8_e4m3fn") for name in ("k", "v")}
    tensors |= {f"{name}_scale": TensorSpec(2, 1, "float32") for name in ("k", "v")}
    layout = KVLayout([LayerGroup("full", 3, tensors)])
    assert layout.match(kv_of(layout, 4), tokens=4)["full"].keys() == tensors.keys()
    assert layout.bytes_per_token() == 3 * 2 * (2 * 8 + 2 * 4)


GOOD = {"k": torch.zeros(3, 7, 2, 8), "v": torch.zeros(3, 7, 2, 8)}


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        (None, "kv is a NoneType"),
        ([GOOD["k"], GOOD["v"]], "kv is a list"),
        (GOOD["k"], "kv is a Tensor"),
        ({}, "layout has"),
        ({"k": GOOD["k"]}, r"tensors of group 'full' are \['k'\], the layout has \['k', 'v'\]"),
        ({**GOOD, "x": GOOD["k"]}, r"are \['k', 'v', 'x'\]"),
        ({**GOOD, 1: GOOD["k"]}, "are "),
        ({"other": GOOD}, r"layer groups are \['other'\], the layout has \['full'\]"),
        ({"full": GOOD, "more": GOOD}, "layer groups"),
        ({"full": [1]}, "group 'full' is a list"),
        ({"full": {**GOOD, "v": [1.0]}}, r"full\.v is a list"),
        ({**GOOD, "v": GOOD["v"].half()}, r"full\.v is float16 \[3, 7, 2, 8\], the layout has float32 \[3, 7, 2, 8\]"),
        ({**GOOD, "v": GOOD["v"][:2]}, r"full\.v is float32 \[2, 7, 2, 8\]"),
        ({**GOOD, "v": GOOD["v"][:, :6]}, r"\[3, 6, 2, 8\]"),
        ({**GOOD, "v": GOOD["v"][None]}, r"\[1, 3, 7, 2, 8\]"),
        ({**GOOD, "v": GOOD["v"].transpose(1, 2)}, r"\(LTHD\)"),
    ],
)
def test_kv_that_does_not_fit(kv, message):
    with pytest.raises(LayoutMismatchError, match=message):
        short().match(kv, tokens=7)


def test_kv_that_is_not_dense():
    with pytest.raises(InvalidValueError, match=r"full\.v is a meta tensor"):
        short().match({**GOOD, "v": torch.empty(3, 7, 2, 8, device="meta")}, tokens=7)


def test_unknown_groups():
    with pytest.raises(LayoutMismatchError, match="no layer group 'x'; known: full, window-6"):
        KVLayout(GEMMA).specs("x", tokens=1, first_token=0)
