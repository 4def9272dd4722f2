"""Committed keys: whatever changes one of these makes every stored entry unreachable."""

import pytest

from kvtier.keys import BlockHashes, Namespace, Prefix, chunk_keys, group_key, salt_text

LAYOUT = {
    "axes": "LTHD",
    "groups": [
        {
            "name": "full",
            "layers": [0, 1],
            "window": None,
            "tensors": {"k": [2, 64, "bfloat16"], "v": [2, 64, "bfloat16"]},
        }
    ],
}
MODEL = {"model": "org/model", "revision": "0123abc"}
SPACE = Namespace(**MODEL).fingerprint(layout=LAYOUT, chunk_tokens=4)
NAMESPACE = bytes.fromhex("fccf51189ea832c8e5fb45378a5ccce811abeb7c6b5d1f883dbfb3db8a0fb749")

PLAIN, TENANT, TENANT_BYTES = (
    f"fccf51189ea832c8/{salt}/" for salt in ("0" * 16, "a1488bc53180736d", "6d36198be5227abe")
)
TEN = range(10)
VECTORS = {
    "plain": (
        Prefix(TEN),
        (TEN, {}),
        [PLAIN + "e1c1a718896a4ed9bcbc5452d401d5ee", PLAIN + "21f0d1b71eca9863552d85f02a762238"],
        PLAIN + "f75fbb81853ab972287e024a74dd62ee",
    ),
    "salt": (
        Prefix(TEN, salt="tenant-7"),
        (TEN, {"salt": "tenant-7"}),
        [TENANT + "270684d98ce5309fe42c60aa872415c6", TENANT + "2e9df20c10be6ed54eccd29378fb031b"],
        TENANT + "0a928a8520cda984f1a1be262d1c34be",
    ),
    "salt of bytes": (
        Prefix(TEN, salt=b"tenant-7"),
        (TEN, {"salt": b"tenant-7"}),
        [TENANT_BYTES + "7fdd30dd3a62b9885c36e51c54040b3c", TENANT_BYTES + "580d1a163573ebbc468299d968d4e682"],
        TENANT_BYTES + "de96edecb14f335e0396bb6c94c6b402",
    ),
    "lora": (
        Prefix(TEN, lora="sha256:feed"),
        (TEN, {"lora": "sha256:feed"}),
        [PLAIN + "ef921109bed36ba729854f9839162040", PLAIN + "f2b52c34d776e6b1a116668f2c2c143f"],
        PLAIN + "5e32d15edc80a4174f6b11f27aac3a3d",
    ),
    "media": (
        Prefix(TEN, media=[(5, "img-1")]),
        (TEN, {"media": [(5, "img-1")]}),
        [PLAIN + "e1c1a718896a4ed9bcbc5452d401d5ee", PLAIN + "1902365f7de16c1014529ed1fbb9ac58"],
        PLAIN + "b52b95ecc98bb34c9ca4f3d52a8f3056",
    ),
    "extended": (
        Prefix(range(5)).extend(range(5, 10), salt="tenant-7"),
        (TEN, {"salt_from": [(5, "tenant-7")]}),
        [PLAIN + "e1c1a718896a4ed9bcbc5452d401d5ee", TENANT + "5bdca4d54817c6cc0343aec756d2ecb2"],
        TENANT + "d863834dae1ed43c94ba44834843ac03",
    ),
    "32 bits": (
        Prefix([0, 1, 2**31, 2**32 - 1]),
        ([0, 1, 2**31, 2**32 - 1], {}),
        [PLAIN + "30c3f262640abe2cd6e7ec7bef8606c0"],
        None,
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_prefix_vectors(reference, name):
    prefix, (tokens, extras), keys, partial = VECTORS[name]
    found = chunk_keys(prefix, namespace=SPACE, chunk_tokens=4)
    assert (list(found.keys), found.partial) == (keys, partial)
    assert reference.chain(NAMESPACE, 4, tokens, **extras) == (keys, partial)


def test_namespace_vector(reference):
    assert SPACE.bytes32 == NAMESPACE
    fields = {
        **MODEL,
        **dict.fromkeys(["weights", "config", "kv_dtype", "rope"]),
        "format": 1,
        "scheme": "kvtier-key-1",
        "tp": [0, 1],
        "pp": [0, 1],
        "layout": LAYOUT,
        "chunk_tokens": 4,
    }
    assert reference.hashed("namespace", reference.pack(fields)) == NAMESPACE


def test_block_hash_vector(reference):
    hashes = [bytes([n]) * 16 for n in range(5)]
    blocks = BlockHashes(hashes, tokens_per_hash=2, scheme="vllm-sha256_cbor")
    found = chunk_keys(blocks, namespace=SPACE, chunk_tokens=4)
    assert [key.removeprefix(PLAIN) for key in (*found.keys, found.partial)] == [
        "d37b688a003c33fb117c3a6b904f0528",
        "36e1fd33c5ce392d55b5701a0d178b3a",
        "82434af846f6b692501d3b0476c590db",
    ]
    for key, label, end, block in zip(
        (*found.keys, found.partial), ("hash", "hash", "hash-tail"), (4, 8, 10), (hashes[1], *hashes[3:]), strict=True
    ):
        frames = map(reference.pack, (NAMESPACE, 4, None, "vllm-sha256_cbor", end, block))
        assert key == reference.text(NAMESPACE, None, reference.hashed(label, *frames))


def test_group_and_salt_vectors(reference):
    key = VECTORS["plain"][2][0]
    assert group_key(key, "window-512") == PLAIN + "f3350c9e989b218f6b4de52d81aa6be8"
    assert salt_text("tenant-7") == "a1488bc53180736d" == reference.salt_of("tenant-7")[:8].hex()
