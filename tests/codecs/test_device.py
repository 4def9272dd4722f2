"""The kernels for a GPU, in Triton's interpreter: the same limits, codes and values as torch's operations."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 before anything imports Triton (make triton)", allow_module_level=True)
pytest.importorskip("triton")

import torch

from kvtier.chunk.segments import SegmentSpec
from kvtier.codecs import device, eager
from kvtier.codecs.int4 import Int4Codec, K5V4Codec
from kvtier.codecs.int8 import Int8Codec


def reference(blocks, plan):
    limits = torch.empty(plan.limit_shape, dtype=torch.int16)
    planes = [torch.empty((plan.blocks, rows, plan.channels), dtype=torch.uint8) for rows in plan.plane_rows]
    return eager.encode(blocks, plan, limits, planes), limits, planes


@pytest.mark.parametrize("codec", [Int8Codec, Int4Codec, K5V4Codec], ids=lambda cls: cls.name)
@pytest.mark.parametrize("name", ["k", "v"])
def test_same_as_torch(codec, name):
    cases = [(65, (1, 64), 1.0), (24, (2, 48), 1e-39), (33, (1, 32), 1e30), (205, (1, 32), 1.0)]
    for tokens, (heads, head), scale in cases:
        shape = (2, tokens, heads, head)
        spec = SegmentSpec(name=name, dtype="bfloat16", shape=shape, axes="LTHD", first_token=256)
        plan = codec().plan(spec)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(tokens)) * scale
        values[..., :2] *= 20
        whole = torch.zeros(2, tokens + 5, heads * head).bfloat16()
        blocks = whole[:, 3 : 3 + tokens]
        blocks.copy_(values.flatten(2))
        assert device.triton_suits(plan, blocks)
        marked, limits, planes = reference(blocks, plan)
        found, limits_found, planes_found = device.encode(blocks, plan)
        assert not marked
        assert not found
        assert torch.equal(limits_found, limits), f"{tokens} {heads} {head} {scale}"
        for plane, wanted in zip(planes_found, planes, strict=True):
            assert torch.equal(plane, wanted), f"{tokens} {heads} {head} {scale}"
        back, wanted = torch.zeros_like(whole), torch.zeros_like(whole)
        device.decode(back[:, 3 : 3 + tokens], plan, limits, planes)
        eager.decode(wanted[:, 3 : 3 + tokens], plan, limits, planes)
        assert torch.equal(back.view(torch.int16), wanted.view(torch.int16)), f"{tokens} {heads} {head} {scale}"


@pytest.mark.parametrize("name", ["k", "v"])
def test_groups_that_are_kept_are_marked(name):
    spec = SegmentSpec(name=name, dtype="bfloat16", shape=(2, 24, 2, 64), axes="LTHD", first_token=256)
    blocks = torch.randn(2, 24, 128).bfloat16()
    blocks[1, 20, 5] = float("nan")
    blocks[0, 1, 70] = -3e38
    plan = Int8Codec().plan(spec)
    marked, limits, _ = device.encode(blocks, plan)
    assert marked == (2 if name == "v" else 4), "two groups, of one limit or of two"
    assert torch.equal(limits == eager.MARK, reference(blocks, plan)[1] == eager.MARK)
