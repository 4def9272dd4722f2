"""Case 13: chunk keys are the same in every process, for every hash seed, container and way to say "nothing"."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier.keys
from kvtier.errors import InvalidKeyError
from kvtier.keys import Namespace, Prefix, chunk_keys

ROOT = Path(kvtier.keys.__file__).parents[2]

CHILD = """
import importlib.util, json, random
from array import array
from kvtier.keys import Namespace, Prefix, chunk_keys

drawn = random.Random(13)
SEQUENCES = [[], [0], list(range(7)), [2**31 - 1] * 9, [2**32 - 1, 2**31, 0, 1]]
SEQUENCES += [[drawn.randrange(150_000) for _ in range(length)] for length in (8, 64, 255, 256, 1000)]

CONTAINERS = [list, tuple, lambda tokens: array("I", tokens), lambda tokens: array("q", tokens)]
if importlib.util.find_spec("numpy"):
    import numpy
    CONTAINERS += [lambda tokens, name=name: numpy.array(tokens, dtype=name) for name in ("uint32", "int64", ">i8")]
    CONTAINERS.append(lambda tokens: numpy.array(tokens, "int32" if max(tokens, default=0) < 2**31 else "int64"))
if importlib.util.find_spec("torch"):
    import torch
    CONTAINERS.append(lambda tokens: torch.tensor(tokens, dtype=torch.int64))

NOTHING = [{}, {"salt": None, "lora": None, "media": None}, {"salt": "", "lora": "", "media": []}, {"media": ()}]
SOMETHING = [[{"salt": "tenant", "lora": "digest"}], [{"salt": b"tenant"}]]
space = Namespace(model="org/model", revision="0123abc").fingerprint(
    layout={"axes": "LTHD", "groups": []}, chunk_tokens=8
)

def keys(tokens, extras):
    found = chunk_keys(Prefix(tokens, **extras), namespace=space, chunk_tokens=8)
    return (*found.keys, found.partial)

def derived(tokens, alike):
    # every different answer: one, if all is well
    return list({keys(make(tokens), extras) for make in CONTAINERS for extras in alike})

print(json.dumps([[derived(tokens, alike) for alike in (NOTHING, *SOMETHING)] for tokens in SEQUENCES]))
"""


def environment(seed):
    others = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    return {**others, "PYTHONPATH": str(ROOT), **({} if seed is None else {"PYTHONHASHSEED": seed})}


def interpreters():
    """This one, and another supported version if there is one that can import the package."""
    found = [shutil.which(f"python3.{minor}") for minor in (14, 13, 12)]
    others = [path for path in found if path and run(path, "import kvtier.keys", None).returncode == 0]
    return [sys.executable, *others, sys.executable][:2]


def run(interpreter, code, seed):
    command = [interpreter, "-c", code]
    return subprocess.run(command, env=environment(seed), capture_output=True, check=False, timeout=280)


def derive(interpreter, seed):
    answer = run(interpreter, CHILD, seed)
    assert answer.returncode == 0, answer.stderr.decode()
    return json.loads(answer.stdout)


def test_six_processes_derive_the_same_keys():
    derived = [derive(interpreter, seed) for interpreter in interpreters() for seed in (None, "0", "1")]
    assert len(derived) == 6
    assert all(each == derived[0] for each in derived)
    assert [[len(different) for different in sequence] for sequence in derived[0]] == [[1, 1, 1]] * 10
    lengths = [len(sequence[0][0]) for sequence in derived[0]]
    assert lengths == [1, 1, 1, 2, 1, 2, 9, 32, 33, 126]  # full chunks of 8, and the tail or None


def test_a_key_is_the_committed_one():
    space = Namespace(model="org/model", revision="0123abc").fingerprint(
        layout={"axes": "LTHD", "groups": []}, chunk_tokens=8
    )
    assert chunk_keys(Prefix(range(8)), namespace=space, chunk_tokens=8).keys == (
        "b73ce161a2d44769/0000000000000000/d685b3061a8095aedd80e3ebd66288b9",
    )


@pytest.mark.parametrize("token", [True, False, 1.0, 1.5, -1, 2**32, None, "1"])
def test_what_is_no_token_is_never_cast(token):
    with pytest.raises(InvalidKeyError, match="token 1 is "):
        Prefix([1, token])
