"""What of a model's configuration decides its KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Final

from kvtier.errors import ConfigError
from kvtier.keys.wire import digest

VOLATILE: Final = frozenset(
    {
        # where it came from, and what wrote it
        "_name_or_path", "_model_name_or_path", "_commit_hash", "name_or_path", "transformers_version", "auto_map",
        # how it is held and run: the weights' dtype is in their digest, the KV's in `kv_dtype`
        "torch_dtype", "dtype", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
        "_attn_implementation_internal", "_experts_implementation", "_experts_implementation_internal", "use_cache",
        "torchscript", "gradient_checkpointing", "return_dict", "use_return_dict", "output_attentions",
        "output_hidden_states", "return_dict_in_generate",
        # what comes after the KV
        "architectures", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
        "task_specific_params", "pad_token_id", "bos_token_id", "eos_token_id",
    }
)  # fmt: skip
"""Fields that do not count. Any other field does, known or not: too much costs a miss, too little a wrong hit."""

_ROPE_FIELDS: Final = frozenset({"rope_scaling", "rope_parameters"})
_LONG_TOO: Final = frozenset({"longrope", "su"})  # two sets of frequencies: one short, one long
_SHORT_ONLY: Final = frozenset({"dynamic", "use_dynamic_ntk"})  # beyond the first length, others for every length


def config_digest(settings: Mapping[str, object]) -> str:
    """Return a hex digest of the settings that decide KV.

    Raises:
        ConfigError: for a value whose text could differ between processes.
    """
    return digest("model-config", _plain("config", settings)).hex()


def check_rope(settings: Mapping[str, object], rope: str | None) -> None:
    """Refuse a model whose frequencies depend on the prompt's length, unless `rope` says which ones are used.

    Keys are computed after rotation: with such a model the KV of a short prompt is wrong in a long one.

    Raises:
        ConfigError: `rope` is missing, not needed, or not enough.
    """
    found = set(_length_dependent(settings))
    if not found and rope is None:
        return
    if not found:
        raise ConfigError(f"rope is {rope!r}, but this model's RoPE does not depend on the length; leave it out")
    kind = min(found)
    if rope is None:
        raise ConfigError(
            f"RoPE type {kind!r} changes its frequencies with the prompt's length; pass rope='short' if all prompts"
            " stay within the original length" + (" or rope='long' if none does" if found <= _LONG_TOO else "")
        )
    if rope == "long" and not found <= _LONG_TOO:
        raise ConfigError(
            f"rope is 'long', but RoPE type {kind!r} has other frequencies for every length; only 'short'"
        )


def _length_dependent(value: object) -> Iterator[str]:
    """Yield the RoPE types found anywhere in the settings whose frequencies depend on the length."""
    if isinstance(value, Mapping):
        if value.get("use_dynamic_ntk") is True:
            yield "use_dynamic_ntk"
        for name, item in value.items():
            if name in _ROPE_FIELDS:
                yield from _rope_types(item)
            yield from _length_dependent(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _length_dependent(item)


def _rope_types(parameters: object) -> Iterator[str]:
    """Yield the types in one set of parameters, or in one set per kind of layer."""
    if not isinstance(parameters, Mapping):
        return
    for name in ("rope_type", "type"):
        if parameters.get(name) in _LONG_TOO | _SHORT_ONLY:
            yield str(parameters[name])
    for item in parameters.values():
        yield from _rope_types(item)


def _plain(where: str, value: object) -> object:
    if isinstance(value, Enum):
        return _plain(where, value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if key not in VOLATILE}
        return {key: _plain(f"{where}.{key}", item) for key, item in kept.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(where, item) for item in value), key=repr)
    if isinstance(value, Sequence):
        return [_plain(f"{where}[{index}]", item) for index, item in enumerate(value)]
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        return _plain(where, to_dict())
    if type(value).__module__ == "torch":
        return str(value)  # a dtype or device
    raise ConfigError(f"{where} is a {type(value).__name__}, which cannot be hashed; give weights= and config= by hand")
