"""A model, loaded or in a folder, as the digests that a namespace is made of."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.keys.file_digests import FileDigests, user_cache_folder
from kvtier.keys.live_model import base_model, weights_digest
from kvtier.keys.model_config import check_rope, config_digest
from kvtier.keys.wire import digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.keys.live_model import ModelLike

_WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_NOT_WEIGHTS: Final = ("adapter_model", "optimizer", "scheduler", "rng_state", "training_args", "scaler")
_THREADS: Final = 2  # files at a time: enough for a disk, and hashing leaves cores to others


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFingerprint:
    """What was found: the model's family (`model_type`), digests of weights and settings, dtype if it is loaded."""

    family: str
    weights: str
    config: str
    dtype: str | None


def fingerprint_model(
    model: ModelLike | str | os.PathLike[str], *, rope: str | None, known_weights: str | None
) -> ModelFingerprint:
    """Read a model or a checkpoint folder; `known_weights` stands in for reading the weights.

    Raises:
        ConfigError: as `Namespace.from_model` says.
    """
    if isinstance(model, str | os.PathLike):
        return _of_folder(Path(model).expanduser(), rope, known_weights)
    return _of_loaded(model, rope, known_weights)


def _of_loaded(model: ModelLike, rope: str | None, known_weights: str | None) -> ModelFingerprint:
    model = base_model(model)
    if not hasattr(getattr(model, "config", None), "to_dict") or not hasattr(model, "state_dict"):
        raise ConfigError(
            f"a {type(model).__name__} is no transformers model; give one, or the path of a checkpoint folder"
        )
    settings = model.config.to_dict()
    check_rope(settings, rope)
    dtype = getattr(model, "dtype", None)
    return ModelFingerprint(
        family=_family(settings),
        weights=known_weights or weights_digest(model),
        config=config_digest(settings),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
    )


def _of_folder(folder: Path, rope: str | None, known_weights: str | None) -> ModelFingerprint:
    if not folder.is_dir():
        raise ConfigError(
            f"no folder {str(folder)!r}; from_model takes a loaded model or a local folder and never downloads:"
            f" use Namespace(model={str(folder)!r}, revision=<commit hash>) for a model of a hub"
        )
    try:
        settings = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read {folder / 'config.json'}: {exc}") from exc
    if not isinstance(settings, dict):
        raise ConfigError(f"{folder / 'config.json'} holds no settings")
    check_rope(settings, rope)
    weights = known_weights or _files_digest(folder)
    return ModelFingerprint(family=_family(settings), weights=weights, config=config_digest(settings), dtype=None)


def _family(settings: Mapping[str, object]) -> str:
    family = settings.get("model_type")
    return family if isinstance(family, str) and family else "unknown"


def _files_digest(folder: Path) -> str:
    """Return a digest of all weight files by name and content: which of them a loader picks is not guessed."""
    files = sorted(path for path in folder.iterdir() if _is_weights(path))
    if not files:
        raise ConfigError(f"no weight files ({', '.join(sorted(_WEIGHT_SUFFIXES))}) in {folder}; give weights=<digest>")
    digests = FileDigests(user_cache_folder() / "weight-digests.json")
    try:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-weights") as pool:
            found = list(pool.map(digests.digest, files))
    except OSError as exc:
        raise ConfigError(f"cannot read the weights in {folder}: {exc}") from exc
    return digest("weights-files", [[path.name, each] for path, each in zip(files, found, strict=True)]).hex()


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHT_SUFFIXES and not path.name.startswith(_NOT_WEIGHTS) and path.is_file()
