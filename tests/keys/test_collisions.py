"""Many prefixes that differ in structure only: no two of them share a key."""

import itertools

from kvtier.keys import BlockHashes, Namespace, Prefix, chunk_keys
from kvtier.keys.wire import digest, encode

CRAFTED = [
    "a",
    "b",
    "ab",
    b"a",
    b"ab",
    "a\0",
    "\0",
    "lora",
    "None",
    "kvtier-key-1",
    encode(None),
    encode("a"),
    encode("a") + encode(None),
    encode(None) + encode("a"),
    encode([(0, "a")]),
    digest("salt", "a"),
    digest("salt", "a").hex(),
    "0" * 16,
    "é",
    "e\u0301",
]
TOKENS = [
    [1, 2, 3, 4],
    [1, 2, 3, 4, 5],
    [0x0101, 0, 0, 0],
    [1, 0, 0, 0],
    [0, 0, 0, 1],
    [0, 0, 0, 0, 0],
    [2**32 - 1] * 8,
]
MEDIA = [(), ((0, "a"),), ((1, "a"),), ((0, "ab"),), ((0, b"a"),), ((0, "a"), (1, "b")), ((0, "a"), (0, "b"))]


def variants():
    for tokens, media in itertools.product(TOKENS, MEDIA):
        yield tokens, {"media": media}
        for crafted in CRAFTED:
            yield tokens, {"media": media, "salt": crafted}
            yield tokens, {"media": media, "lora": crafted}
            yield tokens, {"media": [*media, (2, crafted)]}
        for salt, lora in itertools.product(CRAFTED[:8], CRAFTED[:8]):
            yield tokens, {"media": media, "salt": salt, "lora": lora}


def test_no_two_structures_share_a_key(space):
    owners = {}
    for tokens, extras in variants():
        keys = chunk_keys(Prefix(tokens, **extras), namespace=space, chunk_tokens=4)
        said = (extras.get("salt"), extras.get("lora"), tuple(sorted(map(repr, extras["media"]))))
        named = [(tuple(tokens[: 4 * (index + 1)]), said) for index in range(len(keys.keys))]
        tail = [] if keys.partial is None else [(tuple(tokens), said, "tail")]
        for key, owner in zip([*keys.keys, *([keys.partial] * len(tail))], named + tail, strict=True):
            assert owners.setdefault(key.rpartition("/")[2], repr(owner)) == repr(owner)
    assert len(owners) > 5_000


def test_no_engine_hash_gives_a_token_key(space):
    tokens = chunk_keys(Prefix(range(64)), namespace=space, chunk_tokens=4)
    own = [bytes.fromhex(key.rpartition("/")[2]) for key in tokens.keys]
    for scheme in ("kvtier-key-1", "chunk", "x"):
        hashes = chunk_keys(BlockHashes(own, tokens_per_hash=4, scheme=scheme), namespace=space, chunk_tokens=4)
        assert not set(hashes.keys) & set(tokens.keys)


def test_no_two_namespaces_share_a_digest():
    fields = ["revision", "weights", "config", "kv_dtype"]
    spaces = [Namespace(model=model) for model in ("a", "b", "ab")]
    spaces += [Namespace(model="a", **{field: value}) for field in fields for value in ("x", "y", "None")]
    spaces += [Namespace(model="a", rope=rope) for rope in ("short", "long")]
    spaces += [Namespace(model="a").rank(tp=tp, tp_size=size) for size in (2, 3, 4) for tp in range(size)]
    spaces += [Namespace(model="a").rank(pp=pp, pp_size=size) for size in (2, 3) for pp in range(size)]
    layouts = [{}, {"axes": "LTHD"}, {"axes": "LHTD"}, {"axes": None}, {"groups": []}, {"groups": [{}]}, {"groups": {}}]
    digests = {
        space.fingerprint(layout=layout, chunk_tokens=size, scheme=scheme)
        for space in spaces
        for layout in layouts
        for size in (1, 16, 256)
        for scheme in ("kvtier-key-1", "kvtier-key-2")
    }
    assert len(digests) == len(spaces) * len(layouts) * 3 * 2
    assert len({each.text16 for each in digests}) == len(digests)
