"""The Triton kernel against torch, in Triton's interpreter: a GPU is not needed, Triton is (CUDA builds bring it)."""

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from kvtier.paged import PagedLayout
from kvtier.paged.kernels import as_words, place_table
from kvtier.paged.places import SlotMapping
from kvtier.paged.triton_kernels import copy_tokens

slots = [3, 9, 8, 20, 1]
places = SlotMapping(slots, block_tokens=4, num_blocks=6).places(0, 5)
for dtype in (torch.bfloat16, torch.float32, torch.int8):
    cache = torch.randn(2, 2, 6, 4, 2, 24).mul(50).to(dtype)
    for axes, tensor in (("2LBNHD", cache), ("2LBHND", cache.transpose(3, 4).contiguous())):
        paged = PagedLayout.from_stacked(tensor, axes)
        pages = paged.groups["full"].tensors["k"]
        out = torch.zeros(2, 5, 2, 24, dtype=dtype)
        copy_tokens(*as_words(pages.stacked, out), place_table(places), scatter=False)
        assert torch.equal(out, paged.gather_slots(slots)["k"])
        new = torch.randn(2, 5, 2, 24).mul(50).to(dtype)
        copy_tokens(*as_words(pages.stacked, new), place_table(places), scatter=True)
        assert torch.equal(new, paged.gather_slots(slots)["k"])
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_copies_what_torch_copies():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert "equal" in done.stdout, done.stdout + done.stderr
