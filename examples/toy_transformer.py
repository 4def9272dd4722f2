"""A transformer small enough to read, whose KV lies in blocks as in a serving engine.

It always works on one block of tokens at a time, whatever is loaded: so its results are the same to the last bit, with
a store and without.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch

import kvtier

LAYERS, HEADS, DIM, VOCABULARY = 3, 4, 16, 499
WIDTH = HEADS * DIM
BLOCK_TOKENS = 16
NAMESPACE = kvtier.Namespace(model="example/toy-transformer", revision="1")


class Transformer:
    """Causal attention and a small MLP per layer, random weights; `heads` chooses a tensor-parallel rank's part."""

    def __init__(
        self, heads: range = range(HEADS), reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """Make the weights; `reduce` sums a tensor over all ranks."""
        dice = torch.Generator().manual_seed(7)

        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=dice).div(rows**0.5)

        self.embedding = weights(VOCABULARY, WIDTH) * VOCABULARY**0.5
        self.layers = [
            {name: weights(WIDTH, WIDTH) for name in ("q", "k", "v", "out", "up", "down")} for _ in range(LAYERS)
        ]
        self.heads = heads
        self.reduce = reduce or (lambda tensor: tensor)
        self.computed_tokens = 0

    def forward(self, tokens: Sequence[int], position: int, cache: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        """Compute at most one block of tokens from `position` on, write their KV to `blocks`, return the last logits.

        `cache` is [2, layers, blocks, tokens, heads, dim] of this rank's heads.
        """
        count, mine = len(tokens), slice(self.heads.start * DIM, self.heads.stop * DIM)
        positions = torch.arange(position, position + count)
        x = self.embedding[torch.tensor(tokens)] + torch.sin(positions[:, None] / (1.0 + torch.arange(WIDTH)))
        for number, layer in enumerate(self.layers):
            normed = torch.nn.functional.layer_norm(x, (WIDTH,))
            q, k, v = ((normed @ layer[name][:, mine]).view(count, len(self.heads), DIM) for name in "qkv")
            block, place = blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            cache[0, number, block, place : place + count] = k
            cache[1, number, block, place : place + count] = v
            keys, values = (cache[i, number, list(blocks)].flatten(0, 1)[: position + count] for i in range(2))
            scores = torch.einsum("qhd,khd->hqk", q, keys) / DIM**0.5
            scores.masked_fill_(torch.arange(position + count) > positions[:, None], float("-inf"))
            seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(count, -1)
            x = x + self.reduce(seen @ layer["out"][mine])
            hidden = torch.nn.functional.layer_norm(x, (WIDTH,)) @ layer["up"]
            x = x + torch.relu(hidden) @ layer["down"]
        self.computed_tokens += count
        logits: torch.Tensor = x[-1] @ self.embedding.T
        return logits


def digest(logits: Sequence[torch.Tensor]) -> str:
    """Return a short name for exactly these logits."""
    return hashlib.sha256(b"".join(row.numpy().tobytes() for row in logits)).hexdigest()[:16]


def prompt(number: int, length: int = 150) -> list[int]:
    """Return a prompt; all begin with the same 96 tokens."""
    dice = torch.Generator().manual_seed(number)
    shared = torch.randint(0, VOCABULARY, (96,), generator=torch.Generator().manual_seed(0)).tolist()
    return [*shared, *torch.randint(0, VOCABULARY, (length - 96,), generator=dice).tolist()]
