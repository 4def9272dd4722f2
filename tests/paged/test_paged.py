"""Blocks of every layout against the plainest possible loop, bit for bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtier
from kvtier.paged import PagedLayout

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.float64]
SIZES = {"2": 2, "L": 3, "B": 7, "N": 4, "H": 2, "D": 8}
FUSED = ["2LBNHD", "L2BNHD", "LB2NHD", "LBN2HD", "2LBHND", "LBNH2D", "BLN2HD", "DH2NBL"]


def random_bits(shape, dtype, seed):
    """Any bits, NaNs of every kind included."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(one, other):
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def reference(cache, axes, table):
    """Return k and v as [L, T, H, D], token by token; `table` has (block, place) of each."""
    ordered = cache.permute([axes.index(letter) for letter in "2LBNHD"])
    return [torch.stack([ordered[part, :, block, place] for block, place in table], dim=1) for part in range(2)]


def make_cache(axes, dtype, seed, *, gaps):
    shape = [SIZES[letter] for letter in axes]
    if not gaps:
        return random_bits(shape, dtype, seed)
    wide = random_bits([*shape[:-1], shape[-1] + 3], dtype, seed)
    return wide[..., 2 : 2 + shape[-1]]  # a view with holes


blocks_of_any_number = st.lists(st.integers(0, SIZES["B"] - 1), min_size=1, max_size=SIZES["B"], unique=True)
slots_of_any_number = st.lists(
    st.integers(0, SIZES["B"] * SIZES["N"] - 1), min_size=1, max_size=SIZES["B"] * SIZES["N"], unique=True
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FUSED), st.sampled_from(DTYPES), st.integers(0, 9), st.booleans(), blocks_of_any_number)
def test_gather_and_scatter_by_block_table(axes, dtype, seed, gaps, blocks):
    cache = make_cache(axes, dtype, seed, gaps=gaps)
    paged = PagedLayout.from_stacked(cache, axes)
    table = [(block, place) for block in blocks for place in range(SIZES["N"])]
    k, v = reference(cache, axes, table)
    chunk = paged.gather(blocks)
    assert same(chunk["k"], k)
    assert same(chunk["v"], v)
    other = make_cache(axes, dtype, seed + 100, gaps=gaps)
    wanted = other.clone()
    target = PagedLayout.from_stacked(other, axes)
    target.scatter(chunk, blocks)
    assert same(target.gather(blocks)["k"], k)
    untouched = [block for block in range(SIZES["B"]) if block not in blocks]
    if untouched:
        before = PagedLayout.from_stacked(wanted, axes).gather(untouched)
        assert all(same(target.gather(untouched)[name], before[name]) for name in "kv")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FUSED), st.sampled_from(DTYPES), st.integers(0, 9), slots_of_any_number)
def test_gather_and_scatter_by_slot_mapping(axes, dtype, seed, slots):
    cache = make_cache(axes, dtype, seed, gaps=False)
    paged = PagedLayout.from_stacked(cache, axes)
    k, v = reference(cache, axes, [divmod(slot, SIZES["N"]) for slot in slots])
    chunk = paged.gather_slots(torch.tensor(slots))
    assert same(chunk["k"], k)
    assert same(chunk["v"], v)
    other = make_cache(axes, dtype, seed + 100, gaps=False)
    target = PagedLayout.from_stacked(other, axes)
    target.scatter_slots(chunk, slots)
    assert same(target.gather_slots(slots)["v"], v)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FUSED),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
    st.booleans(),
    slots_of_any_number
    | blocks_of_any_number.map(lambda blocks: [b * SIZES["N"] + i for b in blocks for i in range(4)]),
    st.sampled_from(["heads first", "every second element"]),
)
def test_gather_and_scatter_with_chunks_of_other_strides(axes, dtype, seed, gaps, slots, chunk_order):
    paged = PagedLayout.from_stacked(make_cache(axes, dtype, seed, gaps=gaps), axes)
    wanted = paged.gather_slots(slots)

    def empty():
        shape = (SIZES["L"], len(slots), SIZES["H"], SIZES["D"])
        if chunk_order == "heads first":
            return torch.zeros([shape[i] for i in (0, 2, 1, 3)], dtype=dtype).transpose(1, 2)
        return torch.zeros((*shape, 2), dtype=dtype)[..., 0]

    chunk = paged.gather_slots(slots, out={name: empty() for name in "kv"})
    assert all(same(chunk[name], wanted[name]) for name in "kv")
    target = PagedLayout.from_stacked(make_cache(axes, dtype, seed + 100, gaps=gaps), axes)
    target.scatter_slots(chunk, slots)
    assert all(same(target.gather_slots(slots)[name], wanted[name]) for name in "kv")


def separate(dtype=torch.bfloat16):
    return [[random_bits((7, 4, 2, 8), dtype, seed + i) for i in range(3)] for seed in (0, 50)]


def test_lists_of_tensors_in_allocations_of_their_own():
    k_list, v_list = separate()
    paged = PagedLayout.from_list(k_list, v_list)
    chunk = paged.gather([5, 0, 3])
    for layer in range(3):
        assert same(chunk["k"][layer], k_list[layer][[5, 0, 3]].flatten(0, 1))
    before = [tensor.clone() for tensor in v_list]
    paged.scatter(chunk, [0, 5, 6])
    assert same(v_list[2][6], before[2][3])
    assert same(v_list[2][1], before[2][1])
    assert all(pages.stacked is None for pages in paged.groups["full"].tensors.values())


def test_latents():
    cache = random_bits((3, 7, 4, 24), torch.bfloat16, 1)
    paged = PagedLayout.from_stacked(cache, "LBND")
    assert paged.kv_layout() == kvtier.KVLayout.mla(num_layers=3, latent_dim=24)
    chunk = paged.gather([6, 1])
    assert same(chunk["latent"], cache[:, [6, 1]].flatten(1, 2))
    listed = PagedLayout.from_list([layer.clone() for layer in cache])
    assert same(listed.gather([6, 1])["latent"], chunk["latent"])


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((2, 7, 4, 3, 8), "2BNHD"),
        ((7, 2, 4, 3, 8), "B2NHD"),
        ((2, 7, 3, 4, 8), "2BHND"),
        ((7, 2, 3, 4, 8), "B2HND"),
    ],
)
def test_vllm_caches_by_name(shape, axes):
    caches = {f"model.layers.{i}.self_attn.attn": random_bits(shape, torch.bfloat16, i) for i in (10, 2, 7)}
    paged = PagedLayout.from_vllm(caches, block_tokens=4)
    assert paged.groups["full"].layers == (2, 7, 10)
    layer = caches["model.layers.7.self_attn.attn"]
    k, _ = reference(layer.unsqueeze(0), "L" + axes, [(3, place) for place in range(4)])
    assert same(paged.gather([3])["k"][1], k[0])


def test_vllm_axes_that_a_shape_leaves_open():
    with pytest.raises(kvtier.ConfigError, match="2BNHD, 2BHND; give axes="):
        PagedLayout.from_vllm([torch.zeros(2, 7, 4, 3, 8)])
    with pytest.raises(kvtier.ConfigError, match="none of"):
        PagedLayout.from_vllm([torch.zeros(3, 7, 4, 3, 8)])
    assert PagedLayout.from_vllm([torch.zeros(7, 4, 24)]).groups["full"].tensors.keys() == {"latent"}


def test_layer_by_layer_is_the_same():
    cache = random_bits([SIZES[letter] for letter in "2LBNHD"], torch.bfloat16, 3)
    paged = PagedLayout.from_stacked(cache, layers=[4, 8, 9])
    whole = paged.gather([2, 6])
    for place, index in enumerate([4, 8, 9]):
        part = paged.layer(index).gather([2, 6])
        assert same(part["v"][0], whole["v"][place])
    paged.layer(8).scatter({name: tensor[1:2] for name, tensor in whole.items()}, [0, 1])
    assert same(paged.gather([0, 1])["k"][1], whole["k"][1])
    with pytest.raises(kvtier.InvalidValueError, match="layer 5"):
        paged.layer(5)


@pytest.mark.parametrize(("axes", "names"), [("2LBHND", ["k", "v"]), ("LB2NHD", ["kv"]), ("L2BNHD", ["k", "v"])])
def test_native_order_moves_blocks_as_they_are(axes, names):
    cache = random_bits([SIZES[letter] for letter in axes], torch.bfloat16, 3)
    paged = PagedLayout.from_stacked(cache, axes, order="native")
    assert [name.split(".")[0] for name in paged.groups["full"].tensors] == names
    other = PagedLayout.from_stacked(torch.zeros_like(cache), axes, order="native")
    other.scatter(paged.gather([5, 1]), [1, 5])
    canonical = PagedLayout.from_stacked(cache, axes)
    found = PagedLayout.from_stacked(other_cache(other, cache, axes), axes)
    assert same(found.gather([1, 5])["k"], canonical.gather([5, 1])["k"])
    with pytest.raises(kvtier.InvalidValueError, match="whole blocks"):
        paged.gather_slots([1, 2])


def other_cache(other, cache, axes):
    """The tensor behind a layout."""
    pages = next(iter(other.groups["full"].tensors.values()))
    flat = torch.empty(0, dtype=torch.uint8).set_(pages.layers[0].untyped_storage())
    return flat.view(cache.dtype).view(cache.shape)


def test_orders_and_block_sizes_never_share_keys():
    cache = torch.zeros(2, 3, 8, 4, 2, 8, dtype=torch.bfloat16)
    layouts = [
        PagedLayout.from_stacked(cache, "2LBNHD"),
        PagedLayout.from_stacked(cache, "2LBNHD", order="native"),
        PagedLayout.from_stacked(cache.view(2, 3, 4, 8, 2, 8), "2LBNHD", order="native"),
        PagedLayout.from_stacked(cache.view(2, 3, 8, 2, 4, 8), "2LBHND", order="native"),
        PagedLayout.from_stacked(cache.view(torch.float16), "2LBNHD", order="native"),
    ]
    assert all(one.kv_layout() != other.kv_layout() for one, other in itertools.combinations(layouts, 2))
    halves = PagedLayout.from_stacked(cache.view(2, 3, 4, 8, 2, 8), "2LBNHD")
    assert halves.kv_layout() == layouts[0].kv_layout()  # canonical: the engine's block size is its own affair


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PagedLayout.from_stacked(torch.zeros(2, 2), "2L"), "each of LBND once"),
        (lambda: PagedLayout.from_stacked(torch.zeros(2, 2), "2LBNHD"), "name 6 dimensions"),
        (lambda: PagedLayout.from_stacked(torch.zeros(3, 1, 1, 1, 1, 1), "2LBNHD"), "has length 3"),
        (lambda: PagedLayout.from_stacked(torch.zeros(3, 1, 1, 1, 1), "LBNHD"), "name their dimension '2'"),
        (lambda: PagedLayout.from_list([]), "k_list is empty"),
        (lambda: PagedLayout.from_list([torch.zeros(1, 1, 1, 1)], []), "1 layers of keys, 0 of values"),
        (lambda: PagedLayout.from_list([torch.zeros(2, 4, 1, 8)], [torch.zeros(3, 4, 1, 8)]), "different blocks"),
        (lambda: PagedLayout.from_list([torch.zeros(2, 4, 8), torch.zeros(2, 4, 9)]), "layer 1 is"),
        (lambda: PagedLayout.from_stacked(torch.zeros(2, 4, 4, 8, dtype=torch.complex128), "LBND"), "more than 8"),
        (lambda: PagedLayout.from_stacked(torch.zeros(1, 2, 4, 8), "LBND", order="mine"), "order is 'mine'"),
        (lambda: PagedLayout.from_stacked(torch.zeros(1, 4, 2, 8), "LNBD", order="native"), "has gaps"),
        (lambda: PagedLayout.from_stacked(torch.zeros(1, 2, 4, 8), "LBND", layers=[1, 2]), "2 layer indices"),
        (lambda: PagedLayout.from_vllm({"layer": torch.zeros(1, 2, 3)}), "has no number"),
        (lambda: PagedLayout.from_vllm({}), "kv_caches is empty"),
        (lambda: PagedLayout.join(small(), small()), "names of their own"),
    ],
)
def test_layouts_that_cannot_be(make, text):
    with pytest.raises(kvtier.ConfigError, match=text):
        make()


def small(**options):
    return PagedLayout.from_stacked(torch.zeros(2, 1, 4, 2, 1, 8), "2LBNHD", **options)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda p: p.gather([4]), r"blocks\[0\] is 4: must be a number from 0 to 3"),
        (lambda p: p.gather([-1]), "must be a number"),
        (lambda p: p.gather([True]), "must be a number"),
        (lambda p: p.gather(torch.tensor([0.0])), "int32 or int64"),
        (lambda p: p.gather_slots([8]), r"slots\[0\] is 8: must be a number from 0 to 7"),
        (lambda p: p.scatter(p.gather([0, 1]), [2, 2]), "names a place twice"),
        (lambda p: p.target(slots=[3, 3]), "names a place twice"),
        (lambda p: p.scatter({"k": torch.zeros(1, 2, 1, 8)}, [0]), "'v' is missing"),
        (lambda p: p.scatter({name: torch.zeros(2, 2, 1, 8) for name in "kv"}, [0]), "is needed"),
        (lambda p: p.gather([0], group="other"), "no layer group 'other'"),
        (lambda p: p.source(), "give blocks or slots"),
        (lambda p: p.source([0], slots=[0]), "give blocks or slots"),
        (lambda p: p.source({"other": [0]}), "tables are for groups"),
        (lambda p: p.source([0], first=-1), "first=-1"),
    ],
)
def test_mistakes_of_the_caller(use, text):
    with pytest.raises(kvtier.InvalidValueError, match=text):
        use(small())
