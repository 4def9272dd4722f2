"""Engine hashes as keys: each chunk takes the last hash inside it."""

import pytest

from kvtier.errors import InvalidKeyError
from kvtier.keys import BlockHashes, NamespaceDigest, chunk_keys, salt_text

HASHES = [bytes([n]) * 32 for n in range(8)]


def keys_of(space, hashes=HASHES, *, chunk_tokens=32, tokens_per_hash=16, scheme="vllm", **more):
    blocks = BlockHashes(hashes, tokens_per_hash=tokens_per_hash, scheme=scheme, **more)
    return chunk_keys(blocks, namespace=space, chunk_tokens=chunk_tokens)


def expected(reference, space, label, end, block, *, chunk_tokens=32, scheme="vllm", salt=None):
    fields = (space.bytes32, chunk_tokens, reference.salt_of(salt), scheme, end, block)
    return reference.text(space.bytes32, salt, reference.hashed(label, *map(reference.pack, fields)))


@pytest.mark.parametrize("salt", [None, "s"])
def test_a_chunk_takes_its_last_hash(space, reference, salt):
    keys = keys_of(space, salt=salt)
    chunks = [(32, 1), (64, 3), (96, 5), (128, 7)]
    assert list(keys.keys) == [expected(reference, space, "hash", end, HASHES[n], salt=salt) for end, n in chunks]
    assert (keys.num_tokens, keys.chunk_tokens, keys.partial) == (128, 32, None)
    assert keys.keys[0].split("/")[1] == salt_text(salt)


def test_changing_an_inner_hash_changes_nothing_else(space):
    """The engine chains its hashes, so those between chunk ends add nothing."""
    changed = [b"\xff" * 32, *HASHES[1:]]
    assert keys_of(space, changed) == keys_of(space)
    assert keys_of(space, changed, chunk_tokens=16).keys[0] != keys_of(space, chunk_tokens=16).keys[0]


def test_the_tail_needs_a_hash_that_covers_it(space, reference):
    whole = keys_of(space, HASHES[:3])  # 48 tokens: the third block ends where the prefix ends
    assert whole.partial == expected(reference, space, "hash-tail", 48, HASHES[2])
    assert keys_of(space, HASHES[:3], num_tokens=50).partial is None  # two tokens without a hash
    partly = keys_of(space, HASHES[:3], num_tokens=40)  # the third block is not full, and has a hash
    assert partly.partial == expected(reference, space, "hash-tail", 40, HASHES[2])
    assert partly.keys == whole.keys == keys_of(space, HASHES[:2]).keys


def test_schemes_and_chunk_sizes_stay_apart(space):
    seen = [
        key
        for scheme in ("vllm", "sglang")
        for chunk_tokens in (16, 32)
        for salt in (None, "s")
        for key in keys_of(space, scheme=scheme, chunk_tokens=chunk_tokens, salt=salt).keys
    ]
    other = NamespaceDigest(space.bytes32[:8] + bytes(24))
    seen += keys_of(other).keys
    assert len(set(seen)) == len(seen) == 2 * (8 + 4) * 2 + 4


@pytest.mark.parametrize(("per_hash", "per_chunk"), [(16, 24), (16, 8), (3, 4), (16, 250)])
def test_blocks_must_divide_chunks(space, per_hash, per_chunk):
    with pytest.raises(InvalidKeyError, match=f"blocks of {per_hash} tokens do not divide chunks of {per_chunk}"):
        keys_of(space, tokens_per_hash=per_hash, chunk_tokens=per_chunk)


@pytest.mark.parametrize("block", [b"", bytes(15), "00" * 16, 7, None, [0] * 16])
def test_a_hash_is_sixteen_bytes_or_more(block):
    with pytest.raises(InvalidKeyError, match="hash 1 "):
        BlockHashes([bytes(16), block], tokens_per_hash=16, scheme="x")


def test_any_bytes_like_hash_counts_by_content(space):
    blocks = [HASHES[0], bytearray(HASHES[1]), memoryview(HASHES[2]), HASHES[3]]
    assert keys_of(space, blocks) == keys_of(space, HASHES[:4])
    mine = BlockHashes(blocks, tokens_per_hash=16, scheme="vllm")
    blocks[1][:] = bytes(32)
    assert mine == BlockHashes(HASHES[:4], tokens_per_hash=16, scheme="vllm")
    assert len({mine, BlockHashes(HASHES[:4], tokens_per_hash=16, scheme="vllm")}) == 1
    assert mine != BlockHashes(HASHES[:4], tokens_per_hash=16, scheme="other")
    assert mine != blocks


@pytest.mark.parametrize("num_tokens", [0, 32, 64, 100, -1, True, 1.5])
def test_the_length_must_fit_the_hashes(num_tokens):
    with pytest.raises(InvalidKeyError, match="num_tokens is"):
        BlockHashes(HASHES[:3], tokens_per_hash=16, scheme="x", num_tokens=num_tokens)


@pytest.mark.parametrize(
    "wrong", [{"tokens_per_hash": 0}, {"tokens_per_hash": True}, {"scheme": ""}, {"scheme": b"x"}, {"scheme": None}]
)
def test_other_mistakes_are_named(wrong):
    (name,) = wrong
    with pytest.raises(InvalidKeyError, match=name):
        BlockHashes(HASHES, **{"tokens_per_hash": 16, "scheme": "x", **wrong})


def test_a_length_in_tokens(space):
    blocks = BlockHashes(HASHES, tokens_per_hash=16, scheme="vllm", num_tokens=130)
    assert len(blocks) == 130
    assert repr(blocks) == "<BlockHashes of 130 tokens, 8 hashes by 'vllm'>"
    empty = keys_of(space, [])
    assert (empty.keys, empty.partial, empty.num_tokens) == ((), None, 0)
    short = keys_of(space, [], num_tokens=5)
    assert (short.keys, short.partial, short.num_tokens) == ((), None, 5)
