"""The content of a model in memory, as one digest."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Protocol

from kvtier.errors import ConfigError
from kvtier.keys.wire import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

_PIECE: Final = 1 << 20  # bytes hashed at a time: large enough for the GIL to be free, small enough to stay in cache
_MAX_THREADS: Final = 8
_ADVICE: Final = "give weights=<digest> or Namespace(model=, revision=)"


class ConfigLike(Protocol):
    """A transformers configuration."""

    def to_dict(self) -> Mapping[str, object]:
        """Return the settings as plain values."""
        ...


class ModelLike(Protocol):
    """A transformers `PreTrainedModel`, as far as it is looked at here."""

    @property
    def config(self) -> ConfigLike:
        """The model's configuration."""
        ...

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return parameters and persistent buffers by name."""
        ...


def base_model(model: ModelLike) -> ModelLike:
    """Return the model inside `torch.compile` and peft wrappers."""
    inner: ModelLike = getattr(model, "_orig_mod", model)
    unwrap: Callable[[], ModelLike] | None = getattr(inner, "get_base_model", None)
    return inner if unwrap is None else unwrap()


def weights_digest(model: ModelLike) -> str:
    """Return a hex digest of all parameters and persistent buffers: name, dtype, shape and every byte.

    Layers that peft injected for LoRA are left out and the names they changed are changed back, so that a base model
    has one digest with and without adapters. Reads all weights, on several threads.

    Raises:
        ConfigError: if some weights are not in memory or have no plain bytes.
    """
    state = dict(model.state_dict())
    jobs = [(name, state[name]) for name in sorted(state) if not _is_lora(name)]
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="kvtier-weights") as pool:
        found = list(pool.map(lambda job: _tensor_entry(*job), jobs))
    return digest("weights-memory", sorted(found)).hex()


def _is_lora(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def _tensor_entry(name: str, tensor: torch.Tensor) -> list[str | list[int]]:
    import torch  # noqa: PLC0415  # loaded already: the model is made of it

    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"weight {name!r} is a {type(tensor).__name__}, not a tensor; {_ADVICE}")
    if tensor.is_meta:
        raise ConfigError(f"weight {name!r} is not in memory (offloaded to disk?); {_ADVICE}")
    try:
        content = _content_digest(tensor)
    except (RuntimeError, NotImplementedError) as exc:
        raise ConfigError(
            f"weight {name!r} ({type(tensor).__name__}, {tensor.dtype}) has no plain bytes; {_ADVICE}"
        ) from exc
    return [name.replace(".base_layer.", "."), str(tensor.dtype), list(tensor.shape), content]


def _content_digest(tensor: torch.Tensor) -> str:
    import torch  # noqa: PLC0415

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    hasher = sha256()
    if not flat.numel():
        return hasher.hexdigest()
    piece = bytearray(min(_PIECE, flat.numel()))
    landing = torch.frombuffer(piece, dtype=torch.uint8)
    for start in range(0, flat.numel(), len(piece)):
        part = flat[start : start + len(piece)]
        landing[: part.numel()].copy_(part)  # to host, wherever the weights are; numpy may be absent
        hasher.update(memoryview(piece)[: part.numel()])
    return hasher.hexdigest()
