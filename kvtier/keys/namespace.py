"""Whose KV it is: the fingerprint of everything that changes KV for the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.keys.chain import check_chunk_tokens
from kvtier.keys.wire import SCHEME, digest

if TYPE_CHECKING:
    import os

    from kvtier.keys.live_model import ModelLike

FORMAT: Final = 1
"""Raised when what is stored under a key changes its meaning, so that old entries become misses."""

_TEXTS: Final = ("revision", "weights", "config", "kv_dtype", "rope")


@dataclass(frozen=True, slots=True)
class NamespaceDigest:
    """A namespace with its layout and chunk size, as 32 bytes."""

    bytes32: bytes

    @property
    def text16(self) -> str:
        """16 hex digits: the first part of every key in this namespace."""
        return self.bytes32[:8].hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Model, weights, numerics and parallel rank that KV was computed with; no adapter (see `Prefix.lora`).

    Attributes:
        model: a name for people and, with `revision`, for identity, e.g. `"org/name"`.
        revision: what pins the weights under that name: a commit hash. A branch name pins nothing.
        weights: digest of the weights, in place of a revision.
        config: digest of the model's configuration.
        kv_dtype: what KV is computed in, e.g. `"bfloat16"`; quantised KV and its scheme belong here too.
        rope: `"short"` or `"long"` for models whose RoPE frequencies depend on the prompt's length.
        tp: tensor-parallel rank of `tp_size`.
        tp_size: number of tensor-parallel ranks.
        pp: pipeline-parallel rank of `pp_size`.
        pp_size: number of pipeline-parallel ranks.

    Raises:
        ConfigError: naming the field that is empty, of the wrong type or out of range.
    """

    model: str
    revision: str | None = None
    weights: str | None = None
    config: str | None = None
    kv_dtype: str | None = None
    rope: str | None = None
    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        _check_text("model", self.model)
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None:
                _check_text(name, value)
        if self.rope not in {None, "short", "long"}:
            raise ConfigError(f"namespace.rope is {self.rope!r}; known: 'short', 'long'")
        _check_rank("tp", self.tp, self.tp_size)
        _check_rank("pp", self.pp, self.pp_size)

    @classmethod
    def from_model(
        cls,
        model: ModelLike | str | os.PathLike[str],
        *,
        revision: str | None = None,
        weights: str | None = None,
        kv_dtype: str | None = None,
        rope: str | None = None,
    ) -> Namespace:
        """Fingerprint a loaded transformers model or a local checkpoint folder; never asks a hub.

        A loaded model is hashed by the content of its parameters and persistent buffers as they are now, whatever
        file they came from; LoRA layers injected by peft are left out. A folder is hashed by its weight files;
        their digests are remembered in the user's cache folder. Loaded and folder namespaces differ, even for one
        checkpoint: use one way everywhere. Reads all weights and blocks meanwhile: call it before serving.

        Args:
            model: a model with `config` and `state_dict()`, or the path of a folder with `config.json`.
            revision: recorded besides the digests; not in place of them.
            weights: a digest that the caller vouches for; then the weights are not read.
            kv_dtype: what KV is computed in; default: the loaded model's dtype.
            rope: `"short"` if every prompt stays within the length that the model was first trained for, `"long"`
                if none does. Needed for RoPE types `dynamic` (`"short"` only) and `longrope`, refused for others.

        Raises:
            ConfigError: no such folder, no weights in it, weights that are not in memory (offloaded) or not plain
                tensors, a RoPE type that needs `rope`.
        """
        from kvtier.keys.fingerprint import fingerprint_model  # noqa: PLC0415  # reads files: for callers of this only

        found = fingerprint_model(model, rope=rope, known_weights=weights)
        return cls(
            model=found.family,
            revision=revision,
            weights=found.weights,
            config=found.config,
            kv_dtype=kv_dtype or found.dtype,
            rope=rope,
        )

    def rank(self, *, tp: int = 0, tp_size: int = 1, pp: int = 0, pp_size: int = 1) -> Namespace:
        """Return the namespace of one rank's share of the KV."""
        return replace(self, tp=tp, tp_size=tp_size, pp=pp, pp_size=pp_size)

    @property
    def persistent_ok(self) -> bool:
        """Whether this pins the weights, so that KV may outlive the process."""
        return self.revision is not None or self.weights is not None

    def fingerprint(self, *, layout: Mapping[str, object], chunk_tokens: int, scheme: str = SCHEME) -> NamespaceDigest:
        """Return the digest under which chunks of this size and layout are stored.

        `layout` is `KVLayout.describe()`. MLA latents (tensors without heads only) are equal on all tensor-parallel
        ranks: for them `tp` and `tp_size` do not count.

        Raises:
            InvalidKeyError: if `chunk_tokens` is no int from 1 on.
        """
        replicated = _replicated(layout)
        fields = {
            "format": FORMAT,
            "scheme": scheme,
            "model": self.model,
            "revision": self.revision,
            "weights": self.weights,
            "config": self.config,
            "kv_dtype": self.kv_dtype,
            "rope": self.rope,
            "tp": None if replicated else [self.tp, self.tp_size],
            "pp": [self.pp, self.pp_size],
            "layout": layout,
            "chunk_tokens": check_chunk_tokens(chunk_tokens),
        }
        return NamespaceDigest(digest("namespace", fields))


def _replicated(layout: Mapping[str, object]) -> bool:
    """Tell whether no tensor has heads to split over tensor-parallel ranks."""
    groups = layout.get("groups")
    if not isinstance(groups, list) or not groups:
        return False
    heads: list[object] = []
    for group in groups:
        tensors = group.get("tensors") if isinstance(group, Mapping) else None
        if not isinstance(tensors, Mapping):
            return False
        heads += [spec[0] for spec in tensors.values()]
    return all(count is None for count in heads)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"namespace.{name} is {value!r}; give a non-empty string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise ConfigError(f"namespace.{name} {value!r} holds a lone surrogate at character {exc.start}") from exc


def _check_rank(name: str, rank: object, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"namespace.{name}_size is {size!r}; give an int of at least 1")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
        raise ConfigError(f"namespace.{name} is {rank!r}; give an int from 0 to {size - 1}")
