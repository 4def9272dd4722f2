"""The shape of a model's KV cache: layer groups, their tensors, and what a chunk of each looks like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.chunk.dtypes import ITEMSIZE, dtype_name
from kvtier.chunk.segments import SegmentSpec
from kvtier.errors import ConfigError, InvalidValueError, LayoutMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

AXES = ("LTHD", "LHTD")
MAX_NAME_LENGTH = 64
MOST_LAYERS = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layer: `heads` kv heads of `dim` elements per token; `heads=None` for a latent without heads."""

    heads: int | None
    dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.heads is not None:
            _count("heads", self.heads)
        _count("dim", self.dim)
        try:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        except InvalidValueError as exc:
            raise ConfigError(str(exc)) from None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer."""
        return (self.heads or 1) * self.dim * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, init=False)
class LayerGroup:
    """Layers stored together, because they keep the same tokens.

    `layers` are indices into the model (a number n stands for `range(n)`). `window` is the number of tokens that a
    sliding window sees, the newest included; `None` for full attention.
    """

    name: str
    layers: tuple[int, ...]
    tensors: Mapping[str, TensorSpec]
    window: int | None

    def __init__(
        self,
        name: str,
        layers: int | Sequence[int],
        tensors: Mapping[str, TensorSpec],
        window: int | None = None,
        kind: str = "attention",
    ) -> None:
        _check_name("layer group", name)
        if kind != "attention":
            advice = "recurrent state is reserved for later" if kind == "state" else "known: attention"
            raise ConfigError(f"layer group {name!r}: kind {kind!r} is not supported ({advice})")
        given: object = tensors  # may come straight from a user
        if not isinstance(given, Mapping) or not tensors:
            raise ConfigError(f"layer group {name!r} has no tensors; give a mapping of names to TensorSpec")
        for tensor, spec in given.items():
            _check_name(f"layer group {name!r}: tensor", tensor)
            if not isinstance(spec, TensorSpec):
                raise ConfigError(f"layer group {name!r}: tensor {tensor!r} is {spec!r}; give a TensorSpec")
        if window is not None:
            _count(f"layer group {name!r}: window", window)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "layers", _layer_indices(name, layers))
        object.__setattr__(self, "tensors", dict(sorted(tensors.items())))  # one order, whatever the caller's
        object.__setattr__(self, "window", window)

    def __hash__(self) -> int:
        return hash((self.name, self.layers, tuple(self.tensors.items()), self.window))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers of the group."""
        return len(self.layers) * sum(spec.bytes_per_token for spec in self.tensors.values())

    def describe(self) -> dict[str, object]:
        """Return plain values for the namespace."""
        return {
            "name": self.name,
            "layers": list(self.layers),
            "window": self.window,
            "tensors": {name: [spec.heads, spec.dim, spec.dtype] for name, spec in self.tensors.items()},
        }


def _layer_indices(name: str, layers: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(layers, int):
        if _count(f"layer group {name!r}: layers", layers) > MOST_LAYERS:
            raise ConfigError(f"layer group {name!r}: {layers} layers; at most {MOST_LAYERS}")
        return tuple(range(layers))
    given: object = layers  # may come straight from a user
    indices = tuple(given) if isinstance(given, Iterable) else (given,)
    if not indices or any(type(index) is not int or index < 0 for index in indices):
        raise ConfigError(f"layer group {name!r}: layers are indices >= 0, at least one; got {indices!r}")
    if list(indices) != sorted(set(indices)):
        raise ConfigError(f"layer group {name!r}: layers must ascend without repeats; got {indices!r}")
    return indices


def _count(what: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{what} is {value!r}; a whole number >= 1 is needed")
    return value


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise ConfigError(f"{what} name is {name!r}; 1 to {MAX_NAME_LENGTH} printable characters are needed")


class KVLayout:
    """What the KV of a prompt looks like; part of the namespace, so two layouts never share keys.

    Either `groups`, or the short form for models whose layers are all alike: `num_layers`, `num_kv_heads`,
    `head_dim`, `dtype`. `axes` orders every tensor's dimensions: L layer, T token, H kv head, D head dim.

    Raises:
        ConfigError: sizes that are no positive integers, unknown axes or dtype, two groups with one name or layer.
    """

    __slots__ = ("_described", "_groups", "axes")

    def __init__(
        self,
        groups: Sequence[LayerGroup] | None = None,
        *,
        num_layers: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        dtype: str | torch.dtype = "bfloat16",
        axes: str = "LTHD",
    ) -> None:
        short = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        if groups is None:
            layers, heads, dim = (_count(f"KVLayout: {name}", value) for name, value in short.items())
            spec = TensorSpec(heads, dim, str(dtype))
            groups = [LayerGroup("full", layers, {"k": spec, "v": spec})]
        elif any(value is not None for value in short.values()):
            raise ConfigError("KVLayout takes groups or num_layers, num_kv_heads and head_dim, not both")
        if axes not in AXES:
            raise ConfigError(f"KVLayout: axes is {axes!r}; known: {', '.join(AXES)}")
        self.axes = axes
        groups = _checked_groups(groups)
        self._groups = {group.name: group for group in groups}
        self._described = (axes, groups)

    @classmethod
    def mla(
        cls, *, num_layers: int, latent_dim: int, dtype: str | torch.dtype = "bfloat16", axes: str = "LTHD"
    ) -> KVLayout:
        """Return the layout of multi-head latent attention: one tensor "latent" of shape [L, T, D], no heads.

        `latent_dim` counts the compressed KV and the rotary part together (DeepSeek: 512 + 64).
        """
        group = LayerGroup("full", num_layers, {"latent": TensorSpec(None, latent_dim, str(dtype))})
        return cls([group], axes=axes)

    @classmethod
    def from_config(
        cls, hf_config: object, tp_size: int = 1, *, dtype: str | torch.dtype | None = None, axes: str = "LTHD"
    ) -> KVLayout:
        """Read a transformers model config; see `kvtier.chunk.hf_config`."""
        from kvtier.chunk.hf_config import read_config  # noqa: PLC0415  # the two modules need each other

        return read_config(hf_config, tp_size, dtype=dtype, axes=axes)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups, in order."""
        return tuple(self._groups.values())

    def __eq__(self, other: object) -> bool:
        return self._described == other._described if isinstance(other, KVLayout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._described)

    def __repr__(self) -> str:
        return f"KVLayout({list(self.groups)!r}, axes={self.axes!r})"

    def describe(self) -> dict[str, object]:
        """Return plain values (str, int, None, list, dict) that differ wherever two layouts differ."""
        return {"axes": self.axes, "groups": [group.describe() for group in self.groups]}

    def group(self, name: str) -> LayerGroup:
        """Return a group by name.

        Raises:
            LayoutMismatchError: there is none.
        """
        try:
            return self._groups[name]
        except KeyError:
            raise LayoutMismatchError(f"no layer group {name!r}; known: {', '.join(self._groups)}") from None

    def bytes_per_token(self, group: str | None = None) -> int:
        """Return the bytes one token takes in one group, or in all of them."""
        chosen = self.groups if group is None else (self.group(group),)
        return sum(item.bytes_per_token for item in chosen)

    def specs(self, group: str, *, tokens: int, first_token: int) -> tuple[SegmentSpec, ...]:
        """Return what a run of `tokens` tokens from position `first_token` looks like, one spec per tensor."""
        layers = len(self.group(group).layers)
        return tuple(
            SegmentSpec(
                name=name,
                dtype=spec.dtype,
                shape=_shape(self.axes, layers, tokens, spec),
                axes=self.axes if spec.heads is not None else "LTD",
                first_token=first_token,
            )
            for name, spec in self.group(group).tensors.items()
        )

    def match(self, kv: object, *, tokens: int) -> dict[str, dict[str, torch.Tensor]]:
        """Return `kv` as {group: {tensor name: tensor}}, checked; nothing is copied.

        With one group, {name: tensor} will do. A windowed group may hold all `tokens` or its last
        `min(tokens, window - 1)` only. A latent may have a head axis of length 1.

        Raises:
            LayoutMismatchError: names, dtypes or shapes differ from the layout.
            InvalidValueError: a tensor that is not dense.
        """
        from kvtier.chunk.match import match_kv  # noqa: PLC0415  # the only part of a layout that needs torch

        return match_kv(self, kv, tokens)


def _checked_groups(given: object) -> tuple[LayerGroup, ...]:
    groups = tuple(given) if isinstance(given, Iterable) else (given,)
    for group in groups:
        if not isinstance(group, LayerGroup):
            raise ConfigError(f"KVLayout: {group!r} is no layer group; give a list of LayerGroup")
    if not groups or len({group.name for group in groups}) != len(groups):
        raise ConfigError(f"KVLayout needs groups with names of their own; got {[group.name for group in groups]}")
    seen: set[int] = set()
    for group in groups:
        twice = seen.intersection(group.layers)
        if twice:
            raise ConfigError(f"KVLayout: layers {sorted(twice)} are in group {group.name!r} and in an earlier one")
        seen.update(group.layers)
    return groups


def _shape(axes: str, layers: int, tokens: int, spec: TensorSpec) -> tuple[int, ...]:
    if spec.heads is None:
        return (layers, tokens, spec.dim)
    if axes == "LTHD":
        return (layers, tokens, spec.heads, spec.dim)
    return (layers, spec.heads, tokens, spec.dim)
