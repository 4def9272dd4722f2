"""Tokens of every container become the same words; what is no token is refused by index and value."""

import enum
from array import array
from collections import UserList, deque

import numpy as np
import pytest
import torch

from kvtier.errors import InvalidKeyError
from kvtier.keys.tokens import token_words

TOKENS = [0, 1, 255, 256, 65_535, 65_536, 2**31 - 1]
LARGE = [*TOKENS, 2**31, 2**32 - 1]


def words(tokens):
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def little(dtype):
    return np.array(TOKENS, dtype=dtype)


@pytest.mark.parametrize(
    "tokens",
    [
        list(TOKENS),
        tuple(TOKENS),
        deque(TOKENS),
        UserList(TOKENS),
        array("i", TOKENS),
        array("I", TOKENS),
        array("l", TOKENS),
        array("q", TOKENS),
        array("Q", TOKENS),
        memoryview(array("i", TOKENS)),
        little("<i4"),
        little(">i4"),
        little("<u4"),
        little(">u8"),
        little("i8"),
        little("u8"),
        little("i8").reshape(1, -1),
        np.repeat(little("i4"), 3)[::3],
        np.repeat(little("i8"), 2)[::2],
        little("i4")[::-1][::-1],
        list(little("i8")),
        list(torch.tensor(TOKENS)),
        torch.tensor(TOKENS),
        torch.tensor(TOKENS, dtype=torch.int32),
        torch.tensor(TOKENS).to(torch.uint32),
        torch.tensor(TOKENS).to(torch.uint64),
        torch.tensor(TOKENS)[None],
        torch.tensor(TOKENS).repeat_interleave(3)[::3],
        torch.tensor([TOKENS, TOKENS]).t()[:, 1],
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', getattr(tokens, 'typecode', ''))}",
)
def test_containers_agree(tokens):
    assert token_words(tokens) == words(TOKENS)


@pytest.mark.parametrize(
    "tokens",
    [
        LARGE,
        array("I", LARGE),
        array("q", LARGE),
        np.array(LARGE, dtype="u4"),
        np.array(LARGE, dtype="u8"),
        np.array(LARGE, dtype=">i8"),
        torch.tensor(LARGE),
        torch.tensor(LARGE).to(torch.uint32),
        torch.tensor(LARGE).to(torch.uint64),
    ],
)
def test_all_32_bits_are_tokens(tokens):
    assert token_words(tokens) == words(LARGE)


@pytest.mark.parametrize("code", "bBhH")
def test_narrow_integers_widen(code):
    assert token_words(array(code, [0, 1, 127])) == words([0, 1, 127])
    dtype = np.array([], dtype=np.dtype(code)).dtype
    assert token_words(np.array([0, 1, 127], dtype=dtype)) == words([0, 1, 127])
    assert token_words(torch.tensor([0, 1, 127]).to(getattr(torch, str(dtype)))) == words([0, 1, 127])


def test_a_range_and_an_enumeration_hold_integers():
    class Special(enum.IntEnum):
        BOS = 1

    assert token_words(range(3, 6)) == words([3, 4, 5])
    assert token_words([Special.BOS, 2]) == words([1, 2])


@pytest.mark.parametrize("empty", [[], (), array("i"), np.array([], dtype="i8"), torch.tensor([], dtype=torch.int64)])
def test_no_tokens_are_legal(empty):
    assert token_words(empty) == b""


BAD = [
    True,
    1.0,
    -1,
    2**32,
    2**80,
    None,
    "7",
    b"7",
    [7],
    float("nan"),
    np.float32(1),
    np.bool_(True),
    torch.tensor(1.0),
]


@pytest.mark.parametrize("bad", [*BAD, torch.tensor(True), ...], ids=repr)
@pytest.mark.parametrize("container", [list, tuple, deque])
def test_a_bad_token_is_named(bad, container):
    with pytest.raises(InvalidKeyError, match=r"^token 2 is .* integers from 0 to 4294967295$") as caught:
        token_words(container([1, 2, bad, bad, 3]))
    assert repr(bad)[:30] in str(caught.value)


@pytest.mark.parametrize(
    "tokens",
    [
        array("i", [1, -1]),
        array("b", [1, -1]),
        array("q", [1, 2**32]),
        array("Q", [1, 2**63]),
        np.array([1, -1], dtype=">i4"),
        np.array([1, -1], dtype="i8"),
        torch.tensor([1, -1]),
        torch.tensor([1, -1], dtype=torch.int32),
        torch.tensor([1, 2**32]),
    ],
)
def test_a_bad_token_in_a_buffer_is_named(tokens):
    with pytest.raises(InvalidKeyError, match=rf"^token 1 is {int(tokens[1])} "):
        token_words(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        array("d", [1.0]),
        np.array([1.0]),
        np.array([True]),
        np.array(["1"]),
        np.array([1], dtype=object),
        np.array([1], dtype="m8[s]"),
        np.zeros(2, dtype=[("a", "i4")]),
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor([1j]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([1], device="meta"),
        torch.tensor([0, 1]).to_sparse(),
        "12",
        b"12",
        bytearray(b"12"),
        5,
        None,
        {1, 2},
        {1: 2},
        iter([1, 2]),
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_other_containers_are_refused(tokens):
    with pytest.raises(InvalidKeyError, match="token"):
        token_words(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        np.zeros((2, 3), dtype="i4"),
        np.zeros((3, 1), dtype="i4"),
        np.array(5),
        torch.zeros((2, 3), dtype=torch.int64),
        torch.zeros((1, 1, 3), dtype=torch.int64),
        torch.tensor(5),
    ],
)
def test_several_rows_are_refused(tokens):
    with pytest.raises(InvalidKeyError, match=r"shape .* give one prompt: \[n\] or \[1, n\]"):
        token_words(tokens)


def test_a_nested_list_is_named_by_its_first_row():
    with pytest.raises(InvalidKeyError, match=r"token 0 is \[0, 1, 2.*\.\.\. \(list\)"):
        token_words([list(range(100))])
