"""One Triton kernel for both directions. Not yet run on a GPU; Triton's interpreter runs it in the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

BLOCK: int = 1024  # words moved at a time by one program


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _copy_tokens(  # type: ignore[no-untyped-def]  # its arguments are pointers and constants of the kernel language  # noqa: ANN202, PLR0913, PLR0917
    pages,  # noqa: ANN001
    chunk,  # noqa: ANN001
    blocks,  # noqa: ANN001
    offsets,  # noqa: ANN001
    words,  # noqa: ANN001
    width,  # noqa: ANN001
    page_layer,  # noqa: ANN001
    page_block,  # noqa: ANN001
    page_token,  # noqa: ANN001
    page_head,  # noqa: ANN001
    chunk_layer,  # noqa: ANN001
    chunk_token,  # noqa: ANN001
    chunk_head,  # noqa: ANN001
    SCATTER: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    block = tl.load(blocks + token)
    offset = tl.load(offsets + token)
    page = pages + layer * page_layer + block * page_block + offset * page_token
    part = chunk + layer * chunk_layer + token * chunk_token
    for start in range(0, words, SIZE):
        i = start + tl.arange(0, SIZE)
        inside = i < words
        head = i // width
        word = i % width
        in_page = page + head * page_head + word
        in_chunk = part + head * chunk_head + word
        if SCATTER:
            tl.store(in_page, tl.load(in_chunk, mask=inside), mask=inside)
        else:
            tl.store(in_chunk, tl.load(in_page, mask=inside), mask=inside)


def copy_tokens(stacked: torch.Tensor, chunk: torch.Tensor, places: torch.Tensor, *, scatter: bool) -> None:
    """Copy between pages [L, B, N, H, W] and a chunk [L, T, H, W]; `places` is [2, T]: block and offset."""
    layers, tokens, heads, width = chunk.shape
    page_layer, page_block, page_token, page_head, _ = stacked.stride()
    chunk_layer, chunk_token, chunk_head, _ = chunk.stride()
    _copy_tokens[(tokens, layers)](
        stacked,
        chunk,
        places[0],
        places[1],
        heads * width,
        width,
        page_layer,
        page_block,
        page_token,
        page_head,
        chunk_layer,
        chunk_token,
        chunk_head,
        SCATTER=scatter,
        SIZE=BLOCK,
    )
