"""What a codec does to a model: the distance between its next-token distributions with exact and with restored KV."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from kvtier.chunk.segments import SegmentSpec
from kvtier.codecs.chain import CodecChain, Scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

    from kvtier.codecs.base import Codec

CHUNK = 256
TEXTS = {
    "prose": ("kvtier.demo", "handbook.txt"),
    "code": ("kvtier.testing.texts", "code.txt"),
    "chat": ("kvtier.testing.texts", "chat.txt"),
    "german": ("kvtier.testing.texts", "german.txt"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How far restored KV is from the exact one.

    `kl` is the mean over positions of the Kullback-Leibler divergence of the next-token distributions in nats, `kl_p99`
    its 99th percentile. `perplexity` is the ratio to the exact KV's. `agreement` is the share of positions with the
    same most likely token. `bits` are stored bits per number, all side data counted.
    """

    kl: float
    kl_p99: float
    perplexity: float
    agreement: float
    bits: float


@dataclass(frozen=True, slots=True)
class KV:
    """Keys and values of a prompt as [layers, tokens, heads, channels] in bfloat16."""

    k: torch.Tensor
    v: torch.Tensor


def text(name: str) -> str:
    """Return one of the texts in `TEXTS`."""
    package, file = TEXTS[name]
    return files(package).joinpath(file).read_text(encoding="utf-8")


def restored(kv: KV, chain: Sequence[Codec], *, chunk: int = CHUNK) -> tuple[KV, float]:
    """Send every chunk through the codecs and back; return the result and the stored bits per number.

    Shapes and dtype stay as they are: see `KV`.
    """
    codecs, scratch = CodecChain(chain), Scratch()
    parts: dict[str, torch.Tensor] = {}
    stored = 0
    for name, tensor in (("k", kv.k), ("v", kv.v)):
        parts[name] = torch.empty_like(tensor)
        for first in range(0, tensor.shape[1], chunk):
            piece = tensor[:, first : first + chunk].contiguous()
            spec = SegmentSpec(name=name, dtype="bfloat16", shape=tuple(piece.shape), axes="LTHD", first_token=first)
            into = memoryview(bytearray(codecs.bound(piece.nbytes, spec)))
            size = codecs.encode(_bytes(piece), into, spec, scratch)
            back = torch.empty_like(piece)
            codecs.decode(into[:size], _bytes(back), spec, scratch)
            parts[name][:, first : first + chunk] = back
            stored += size
    return KV(parts["k"], parts["v"]), stored * 8 / (kv.k.numel() + kv.v.numel())


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).reshape(-1).numpy().data


class Judge:
    """One model and one text: the KV of its beginning, and what the model says of the rest on top of restored KV.

    Args:
        model: a causal language model with full attention, computing in float32.
        ids: the text's tokens, [1, at least context + 1].
        context: tokens whose KV is restored; the tokens after them are what the model is judged on.
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, *, context: int) -> None:
        self._model = model
        self._ids = ids
        self.context: int = context
        cache = self._cache()
        self._run(cache, ids[:, :context], keep=1)
        self.exact: KV = kv_of(cache)
        self._rest = ids[
            :, context - 1 :
        ]  # the last token of the context is given again: it predicts the first new one
        self._reference = self._distributions(self.exact)
        self._surprise = self._surprise_of(self._reference)

    def judge(self, kv: KV, bits: float = 16.0) -> Quality:
        """Compare restored KV, of the shape and dtype of the exact one (see `KV`), with that."""
        found = self._distributions(kv)
        kl = (self._reference.exp() * (self._reference - found)).sum(-1).clamp_min(0)
        return Quality(
            kl=kl.mean().item(),
            kl_p99=kl.quantile(0.99).item(),
            perplexity=math.exp(self._surprise_of(found) - self._surprise),
            agreement=(found.argmax(-1) == self._reference.argmax(-1)).float().mean().item(),
            bits=bits,
        )

    def turns(self, count: int, tokens: int, through: Callable[[KV], KV]) -> list[Quality]:
        """Extend the context `count` times by `tokens`, sending all KV so far `through` something before each turn.

        `through` keeps shape and dtype (see `KV`).
        What the model computes in a turn stands on restored KV, and is itself restored in the next one. Returns each
        turn's distance from the same turns on exact KV.
        """
        exact, lossy = self._until(self._ids.shape[1] - count * tokens), None
        lossy = exact
        found = []
        for turn in range(count):
            begin = self._ids.shape[1] - (count - turn) * tokens
            ids = self._ids[:, begin - 1 : begin + tokens]
            exact, reference = self._extend(exact, ids)
            lossy, distributions = self._extend(through(lossy), ids)
            kl = (reference.exp() * (reference - distributions)).sum(-1).clamp_min(0)
            same = (distributions.argmax(-1) == reference.argmax(-1)).float().mean().item()
            found.append(
                Quality(kl=kl.mean().item(), kl_p99=kl.quantile(0.99).item(), perplexity=1.0, agreement=same, bits=16.0)
            )
        return found

    def _until(self, length: int) -> KV:
        cache = self._cache()
        self._run(cache, self._ids[:, :length], keep=1)
        return kv_of(cache)

    def _extend(self, kv: KV, ids: torch.Tensor) -> tuple[KV, torch.Tensor]:
        cache = self._filled(KV(kv.k[:, :-1], kv.v[:, :-1]))
        logits = self._run(cache, ids[:, :-1])
        longer = kv_of(cache)
        # The token that was given again keeps the KV it had.
        longer.k[:, : kv.k.shape[1]], longer.v[:, : kv.v.shape[1]] = kv.k, kv.v
        return longer, logits

    def _distributions(self, kv: KV) -> torch.Tensor:
        cache = self._filled(KV(kv.k[:, : self.context - 1], kv.v[:, : self.context - 1]))
        return self._run(cache, self._rest[:, :-1])

    def _surprise_of(self, distributions: torch.Tensor) -> float:
        said = self._rest[0, 1:]
        return -distributions.gather(1, said[:, None]).mean().item()

    def _cache(self) -> DynamicCache:
        from transformers import DynamicCache  # noqa: PLC0415  # optional

        return DynamicCache()

    def _filled(self, kv: KV) -> DynamicCache:
        cache = self._cache()
        for layer, (keys, values) in enumerate(zip(kv.k, kv.v, strict=True)):
            cache.update(keys.float().transpose(0, 1)[None], values.float().transpose(0, 1)[None], layer)
        return cache

    def _run(self, cache: DynamicCache, ids: torch.Tensor, *, keep: int = 0) -> torch.Tensor:
        from kvtier.adapters.transformers.plan import cache_argument  # noqa: PLC0415  # optional

        options: dict[str, object] = {cache_argument(self._model): cache, "use_cache": True, "logits_to_keep": keep}
        with torch.no_grad():
            logits = self._model(ids, **options).logits[0]
        return torch.log_softmax(logits.float(), -1)


def kv_of(cache: DynamicCache) -> KV:
    """Return what a cache holds as [layers, tokens, heads, channels], rounded to bfloat16."""
    k, v = (
        torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers]).to(torch.bfloat16)
        for name in ("keys", "values")
    )
    return KV(k.contiguous(), v.contiguous())


def token_ids(tokenizer: PreTrainedTokenizerBase, name: str, most: int) -> torch.Tensor:
    """Return the first `most` tokens of a text as [1, tokens], int64."""
    ids: torch.Tensor = tokenizer(text(name), return_tensors="pt", add_special_tokens=False).input_ids
    return ids[:, :most]
