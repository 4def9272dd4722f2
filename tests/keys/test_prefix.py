"""Chunk keys of a prefix: what they depend on, what they share, and that extending gives what building gives."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import InvalidKeyError
from kvtier.keys import BlockHashes, Namespace, NamespaceDigest, Prefix, chunk_keys, group_key, salt_text
from kvtier.keys import prefix as prefix_module

NAMESPACE = bytes(range(32))
NS16 = "0001020304050607"


def keys_of(prefix, space, chunk_tokens=4):
    return chunk_keys(prefix, namespace=space, chunk_tokens=chunk_tokens)


def test_keys_have_three_parts(space):
    keys = keys_of(Prefix(range(8), salt="tenant-7"), space)
    namespace, salt, digest = keys.keys[0].split("/")
    assert namespace == space.text16 == NS16
    assert salt == salt_text("tenant-7")
    assert len(bytes.fromhex(digest)) == 16
    assert keys_of(Prefix(range(8)), space).keys[0].split("/")[1] == salt_text(None) == "0" * 16


tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
salts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.binary(max_size=5)


@settings(deadline=None)
@given(tokens, st.integers(1, 9), salts, salts, st.data())
def test_keys_equal_the_reference(reference, tokens, size, salt, lora, data):
    item = st.tuples(st.integers(0, max(len(tokens) - 1, 0)), st.text("ab", min_size=1))
    media = data.draw(st.lists(item, max_size=3)) if tokens else []
    keys = keys_of(Prefix(tokens, salt=salt, lora=lora, media=media), NamespaceDigest(NAMESPACE), size)
    expected = reference.chain(NAMESPACE, size, tokens, salt=salt, lora=lora, media=media)
    assert (list(keys.keys), keys.partial) == expected
    assert (keys.num_tokens, keys.chunk_tokens) == (len(tokens), size)


def test_a_key_stands_for_every_token_before(space):
    base = keys_of(Prefix(range(12)), space).keys
    for changed in range(12):
        tokens = list(range(12))
        tokens[changed] = 99
        keys = keys_of(Prefix(tokens), space).keys
        same = changed // 4
        assert keys[:same] == base[:same]
        assert all(one != other for one, other in zip(keys[same:], base[same:], strict=True))


def test_an_empty_prefix_has_no_keys(space):
    keys = keys_of(Prefix([]), space)
    assert (keys.keys, keys.partial, keys.num_tokens) == ((), None, 0)
    assert len(Prefix([])) == 0


def test_a_tail_is_never_a_full_chunk(space):
    seen = set()
    for size in (1, 2, 3, 4, 5, 8):
        for length in range(1, 17):
            keys = keys_of(Prefix(range(length)), space, size)
            seen.add((keys.partial is None, length % size == 0))
            if keys.partial is not None:
                full = {key for other in (1, 2, 3, 4, 5, 8) for key in keys_of(Prefix(range(64)), space, other).keys}
                assert keys.partial not in full
    assert seen == {(True, True), (False, False)}


def test_a_tail_is_found_only_by_a_prefix_that_ends_there(space):
    tails = {keys_of(Prefix(range(length)), space, 8).partial for length in range(1, 8)}
    assert len(tails) == 7


def test_none_and_emptiness_mean_nothing(space):
    plain = keys_of(Prefix(range(9)), space)
    for extras in ({"salt": None, "lora": None, "media": None}, {"salt": "", "lora": "", "media": []}, {"salt": b""}):
        assert keys_of(Prefix(range(9), **extras), space) == plain
        assert Prefix(range(9), **extras) == Prefix(range(9))


def test_media_count_from_the_chunk_they_start_in(space):
    plain = keys_of(Prefix(range(16)), space).keys
    for position in range(16):
        keys = keys_of(Prefix(range(16), media=[(position, "image")]), space).keys
        first = position // 4
        assert keys[:first] == plain[:first]
        assert not set(keys[first:]) & set(plain)
    assert keys_of(Prefix(range(16), media=[(4, "a"), (5, "b")]), space) == keys_of(
        Prefix(range(16), media=[(5, "b"), (4, "a")]), space
    )
    assert keys_of(Prefix(range(16), media=[(4, "a"), (5, "b")]), space) != keys_of(
        Prefix(range(16), media=[(4, "b"), (5, "a")]), space
    )


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 8, 11, 12])
@pytest.mark.parametrize("asked_before", [False, True])
def test_extending_gives_the_keys_of_the_whole(space, cut, asked_before):
    extras = {"salt": "s", "lora": "l"}
    media = [(place, "n") for place in (0, 2, 10) if place < cut]
    first = Prefix(range(cut), **extras, media=media)
    if asked_before:
        keys_of(first, space)
    extended = first.extend(range(cut, 14), media=[(13, "m")])
    whole = Prefix(range(14), **extras, media=[*media, (13, "m")])
    assert keys_of(extended, space) == keys_of(whole, space)
    assert extended == whole
    assert hash(extended) == hash(whole)
    assert keys_of(first.extend(range(cut, 14), salt="s", media=[(13, "m")]), space) == keys_of(whole, space)


def test_extending_hashes_only_what_is_new(space, monkeypatch):
    hashed = []
    original = prefix_module.chain_chunks

    def recording(words, previous, chunks, extras, chunk_tokens):
        hashed.append(chunks)
        return original(words, previous, chunks, extras, chunk_tokens)

    monkeypatch.setattr(prefix_module, "chain_chunks", recording)
    document = Prefix(range(22))
    keys_of(document, space)
    turn = document.extend([1] * 10)
    keys_of(turn, space)
    assert keys_of(turn, space) is keys_of(turn, space)
    keys_of(turn.extend([2]), space)
    assert hashed == [range(5), range(5, 8)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from([None, "a", "b"])), min_size=1, max_size=5), st.booleans()
)
def test_a_salt_of_its_own_counts_from_the_first_extended_token(reference, parts, ask):
    space = NamespaceDigest(NAMESPACE)
    prefix = Prefix(range(parts[0][0]), salt=parts[0][1])
    salts, salt = [(0, parts[0][1])], parts[0][1]
    for count, own in parts[1:]:
        if ask:
            keys_of(prefix, space)
        salt = own or salt
        salts.append((len(prefix), salt))
        prefix = prefix.extend(range(len(prefix), len(prefix) + count), salt=own)
    keys = keys_of(prefix, space)
    expected = reference.chain(NAMESPACE, 4, range(len(prefix)), salt=salts[0][1], salt_from=salts[1:])
    assert (list(keys.keys), keys.partial) == expected


def test_equal_prefixes_compare_equal_however_they_were_made():
    salted = Prefix(range(5), salt="a")
    assert Prefix([]).extend(range(5), salt="a") == salted
    assert Prefix(range(4), salt="a").extend([], salt="b").extend([4], salt="a") == salted
    assert Prefix(range(4), salt="a").extend([4], salt="b") != salted


@pytest.mark.parametrize("length", [8, 9, 11])
def test_a_public_document_stays_shared_under_private_turns(space, length):
    document = Prefix(range(length))
    public = keys_of(document, space).keys
    mine = keys_of(document.extend(range(50, 60), salt="me"), space).keys
    yours = keys_of(document.extend(range(50, 60), salt="you"), space).keys
    assert mine[:2] == yours[:2] == public
    assert not set(mine[2:]) & set(yours[2:])
    assert [key.split("/")[1] for key in mine] == [salt_text(None)] * 2 + [salt_text("me")] * (len(mine) - 2)


def test_a_salt_without_tokens_yet_changes_no_key(space):
    for length in (8, 9):
        document = Prefix(range(length))
        waiting = document.extend([], salt="me")
        assert keys_of(waiting, space) == keys_of(document, space)
        turn = waiting.extend([7] * 4)
        assert [key.split("/")[1] for key in keys_of(turn, space).keys] == [salt_text(None)] * 2 + [salt_text("me")]
        assert keys_of(turn, space) == keys_of(document.extend([7] * 4, salt="me"), space)


def test_what_was_private_stays_private(space):
    turn = Prefix(range(4)).extend(range(4), salt="me")
    for next_turn in (turn.extend(range(8)), turn.extend(range(8), salt="")):
        assert {key.split("/")[1] for key in keys_of(next_turn, space).keys[1:]} == {salt_text("me")}


def test_a_prefix_keeps_its_own_tokens(space):
    tokens = torch.arange(8)
    prefix = Prefix(tokens)
    tokens.zero_()
    assert keys_of(prefix, space) == keys_of(Prefix(range(8)), space)


def test_namespace_and_chunk_size_are_in_every_key(space):
    other = NamespaceDigest(space.bytes32[:8] + bytes(24))  # the same sixteen digits
    prefix = Prefix(range(24))
    seen = [key for where in (space, other) for size in (1, 2, 4, 8) for key in keys_of(prefix, where, size).keys]
    assert len(set(seen)) == len(seen) == 2 * (24 + 12 + 6 + 3)


def test_asking_in_many_namespaces_forgets_old_chains_only(space):
    prefix = Prefix(range(9))
    spaces = [Namespace(model=f"m{n}").fingerprint(layout={}, chunk_tokens=4) for n in range(20)]
    asked = [keys_of(prefix, each) for each in spaces]
    assert asked == [keys_of(Prefix(range(9)), each) for each in spaces]
    assert len(prefix._chains) <= 5


def test_coerce_wraps_tokens_and_passes_prefixes():
    prefix, hashes = Prefix([1]), BlockHashes([bytes(16)], tokens_per_hash=1, scheme="x")
    assert Prefix.coerce(prefix) is prefix
    assert Prefix.coerce(hashes) is hashes
    assert Prefix.coerce([1]) == prefix
    assert prefix != [1]
    assert prefix != hashes


@pytest.mark.parametrize("salt", [5, 1.0, True, ["s"], "\ud800"])
def test_a_salt_is_text_or_bytes(salt):
    for build in (lambda: Prefix([1], salt=salt), lambda: Prefix([1]).extend([2], salt=salt), lambda: salt_text(salt)):
        with pytest.raises(InvalidKeyError, match="salt"):
            build()


@pytest.mark.parametrize(
    "media",
    [[(8, "x")], [(-1, "x")], [(True, "x")], [(1.0, "x")], [(1, "")], [(1, None)], [(1,)], ["ab"], [(1, 5)], [7]],
)
def test_media_are_positions_and_digests(media):
    with pytest.raises(InvalidKeyError, match=r"media\[0\]"):
        Prefix(range(8), media=media)


def test_extended_media_lie_among_the_new_tokens():
    with pytest.raises(InvalidKeyError, match="from 4 to 7"):
        Prefix(range(4)).extend(range(4), media=[(3, "x")])


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None, 2**24 + 1])
def test_a_chunk_size_is_a_count(space, size):
    for prefix in (Prefix(range(4)), BlockHashes([bytes(16)], tokens_per_hash=1, scheme="x")):
        with pytest.raises(InvalidKeyError, match="chunk_tokens"):
            keys_of(prefix, space, size)


def test_a_salt_shows_nowhere(space):
    prefix = Prefix(range(9), salt="tenant-7", lora="secret-adapter")
    assert "tenant-7" not in repr(prefix) + "".join(keys_of(prefix, space).keys)
    assert repr(prefix) == "<Prefix of 9 tokens, salted=True, lora=True, media=0>"


def test_group_keys_stay_in_place_and_apart(space, reference):
    key = keys_of(Prefix(range(4), salt="s"), space).keys[0]
    windowed = group_key(key, "window-512")
    assert windowed.rpartition("/")[0] == key.rpartition("/")[0]
    assert len({key, windowed, group_key(key, "other"), group_key(key, "")}) == 4
    expected = (
        reference.pack("kvtier-group-1") + reference.pack(bytes.fromhex(key[-32:])) + reference.pack("window-512")
    )
    assert windowed[-32:] == hashlib.sha256(expected).hexdigest()[:32]


@pytest.mark.parametrize("key", ["", "a/b/c", "0123", "a/b/" + "0" * 30, "a/b/" + "g" * 32])
def test_a_group_key_needs_a_chunk_key(key):
    with pytest.raises(InvalidKeyError, match="not the key of a chunk"):
        group_key(key, "g")
