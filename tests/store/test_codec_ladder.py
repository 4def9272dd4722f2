"""Values on their way between tiers of different forms: a lossy step is taken once, whatever way they go."""

import random

import pytest
import torch

import kvtier
from kvtier.codecs.int8 import Int8Codec
from kvtier.errors import ConfigError

LAYOUT = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=32)
CHUNK = 32
PROMPTS = [[100 * number + token for token in range(2 * CHUNK)] for number in range(7)]


def made(number):
    generator = torch.Generator().manual_seed(number)
    return {name: (torch.randn((2, 2 * CHUNK, 2, 32), generator=generator) * 3).bfloat16() for name in "kv"}


def once_through_int8(kv):
    """What one pass through the codec makes of each chunk."""
    codec, out = Int8Codec(), {name: torch.empty_like(tensor) for name, tensor in kv.items()}
    for first in (0, CHUNK):
        for spec in LAYOUT.specs("full", tokens=CHUNK, first_token=first):
            piece = kv[spec.name][:, first : first + CHUNK]
            into = memoryview(bytearray(codec.bound(piece.nbytes, spec)))
            size = codec.encode_tensor(piece, into, spec)
            codec.decode_tensor(into[:size], out[spec.name][:, first : first + CHUNK], spec)
    return out


EXACT = [made(number) for number in range(len(PROMPTS))]
ONCE = [once_through_int8(kv) for kv in EXACT]
SHAPES = {
    "raw, int8, int8+zstd": ([], ["int8"], ["int8", "zstd"]),
    "raw, int8+zstd": ([], ["int8", "zstd"]),
    "int8, int8, int8+zstd": (["int8"], ["int8"], ["int8", "zstd"]),
    "raw, raw, int8": ([], [], ["int8"]),
    "raw, zstd, int8: no ladder": ([], ["zstd"], ["int8"]),
}


def ladder(kit, chains, write):
    top, *lower = chains
    tiers = [kit.memory(capacity="80KiB", codecs=top)]
    for place, chain in enumerate(lower):
        capacity = "64MiB" if place == len(lower) - 1 else "120KiB"
        tiers.append(kit.medium(name=f"medium{place}", capacity=capacity, codecs=chain, write=write))
    return kit.open(*tiers, layout=LAYOUT, chunk_tokens=CHUNK)


def is_one_of(kv, number, length):
    """Each chunk on its own is exact, or went through the codec once."""
    for first in range(0, length, CHUNK):
        part = slice(first, first + CHUNK)
        wanted = (EXACT[number], ONCE[number])
        if not any(all(torch.equal(kv[name][:, part], other[name][:, part]) for name in "kv") for other in wanted):
            return False
    return True


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_lossy_at_most_once_on_any_way(kit, opened, shape, write):
    assert not any(torch.equal(exact["k"], once["k"]) for exact, once in zip(EXACT, ONCE, strict=True))
    moved = hits = lossy = 0
    for seed in range(4):
        chance = random.Random(f"{shape}{write}{seed}")
        store = await opened(ladder(kit, SHAPES[shape], write))
        known = set()
        for _ in range(40):
            number = chance.randrange(len(PROMPTS))
            action = chance.choice(("put", "get", "get", "get", "flush", "prefetch"))
            if action == "put" and number not in known:
                known.add(number)
                await store.put(PROMPTS[number], EXACT[number])
            elif action == "get":
                hit = await store.get(PROMPTS[number])
                if hit is not None:
                    hits += 1
                    lossy += hit.lossy
                    assert is_one_of(hit.kv, number, hit.num_tokens), f"{shape}, {write}, seed {seed}: lossy twice"
                    if not hit.lossy:
                        assert torch.equal(hit.kv["k"], EXACT[number]["k"][:, : hit.num_tokens])
            elif action == "prefetch":
                await store.prefetch(PROMPTS[number])
            else:
                await store.flush()
        tiers = store.stats().tiers.values()
        moved += sum(tier.promoted + tier.demoted for tier in tiers)
        kit.assert_books_balance(store)
    assert hits > 10
    assert lossy or "no ladder" in shape, "nothing ever went through the codec"
    assert moved, "nothing was promoted or demoted"


async def test_a_step_down_adds_only_what_is_missing(kit, opened, monkeypatch):
    calls = []
    encode, decode = Int8Codec.encode_tensor, Int8Codec.decode_tensor
    monkeypatch.setattr(Int8Codec, "encode_tensor", lambda *a: calls.append("encode") or encode(*a))
    monkeypatch.setattr(Int8Codec, "decode_tensor", lambda *a: calls.append("decode") or decode(*a))
    store = await opened(ladder(kit, (["int8"], ["int8", "zstd"]), "through"))
    await store.put(PROMPTS[0], EXACT[0])
    await store.flush()
    quantised = calls.count("encode")
    assert quantised == 4, "K and V of two chunks, once: straight from the caller's tensors"
    for tier in store._engine.memory_tiers:
        for entry in list(tier.ledger.index.entries.values()):
            tier.drop(entry, "evicted")
    hit = await store.get(PROMPTS[0])
    assert hit.tiers == {"medium0": 2}
    assert calls.count("encode") == quantised, "a promotion quantises nothing"
    assert all(torch.equal(hit.kv[name], ONCE[0][name]) for name in "kv")


async def test_whole_chunks_are_decoded_into_the_callers_tensors_and_parts_are_cut_out(kit, opened, monkeypatch):
    targets = []
    decode = Int8Codec.decode_tensor
    monkeypatch.setattr(Int8Codec, "decode_tensor", lambda *a: targets.append(a[2].data_ptr()) or decode(*a))
    store = await opened(ladder(kit, (["int8"], ["int8"]), "through"))
    await store.put(PROMPTS[0], EXACT[0])
    out = {name: torch.zeros(2, 2 * CHUNK, 2, 32).bfloat16() for name in "kv"}
    hit = await store.get(PROMPTS[0], out=out)
    assert hit.num_tokens == 2 * CHUNK
    assert all(torch.equal(out[name], ONCE[0][name]) for name in "kv")
    assert {tensor[:, first:].data_ptr() for tensor in out.values() for first in (0, CHUNK)} == set(targets)
    for start, stop in ((0, 40), (5, 64), (10, 20), (33, 60)):
        hit = await store.get(PROMPTS[0], start=start, max_tokens=stop)
        assert all(torch.equal(hit.kv[name], ONCE[0][name][:, start:stop]) for name in "kv"), (start, stop)


async def test_no_shared_ladder_no_encoding_on_the_way_in(kit, opened):
    store = await opened(ladder(kit, (["int8"], ["zstd"]), "through"))
    await store.put(PROMPTS[0], EXACT[0])
    await store.flush()
    for tier in store._engine.memory_tiers:
        for entry in list(tier.ledger.index.entries.values()):
            tier.drop(entry, "evicted")
    hit = await store.get(PROMPTS[0])
    assert hit.tiers == {"medium0": 2}
    assert not hit.lossy
    assert all(torch.equal(hit.kv[name], EXACT[0][name]) for name in "kv"), "the lower tier got the exact value"


async def test_values_that_the_codec_keeps_exactly_fit_as_well(kit, opened):
    store = await opened(ladder(kit, (["int8"], ["int8", "zstd"]), "through"))
    kv = {name: torch.full_like(tensor, float("nan")) for name, tensor in EXACT[1].items()}
    result = await store.put(PROMPTS[1], kv)
    assert [chunk.status for chunk in result.chunks] == ["stored", "stored"]
    await store.flush()
    hit = await store.get(PROMPTS[1])
    assert all(torch.equal(hit.kv[name].view(torch.int16), kv[name].view(torch.int16)) for name in "kv")
    kit.assert_books_balance(store)


@pytest.mark.parametrize("codec", ["int8", "int4", "k5v4", "fp8"])
def test_a_lossless_store_refuses_what_loses(kit, codec):
    for chains in (([codec],), ([], [codec, "zstd"])):
        tiers = [kit.memory(codecs=chains[0])]
        if len(chains) > 1:
            tiers.append(kit.disk(codecs=chains[1]))
        with pytest.raises(ConfigError, match=codec):
            kvtier.open_chunks(kit.config(*tiers), lossless=True)
        with pytest.raises(ConfigError, match=codec):
            kvtier.open_chunks(kit.config(*tiers, lossless=True))


async def test_a_lossless_store_takes_what_loses_nothing(kit, opened):
    store = await opened(
        kit.open(
            kit.memory(codecs=["bf16-split"]),
            kit.disk(codecs=["bf16-split", "zstd"]),
            layout=LAYOUT,
            chunk_tokens=CHUNK,
            lossless=True,
        )
    )
    await store.put(PROMPTS[0], EXACT[0])
    hit = await store.get(PROMPTS[0])
    assert not hit.lossy
    assert all(torch.equal(hit.kv[name], EXACT[0][name]) for name in "kv")
