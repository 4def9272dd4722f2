"""From a file, a mapping or nothing to a checked `StoreConfig`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from kvtier.config.problems import InvalidConfigError, Problem, failure, show
from kvtier.config.store import StoreConfig
from kvtier.errors import ConfigError
from kvtier.keys import user_cache_folder
from kvtier.registry import nearest_first

T = TypeVar("T")

DEFAULT_MEMORY = "1GiB"
DEFAULT_DISK = "20GiB"


def load_config(config: str | Path | Mapping[str, object] | StoreConfig | None = None) -> StoreConfig:
    """Return the checked config, with absolute paths.

    `config` is the path of a TOML or YAML file, the same as a mapping, or a `StoreConfig`. `None` means memory and
    disk in the user's cache directory. Relative paths start at the file's directory, else at the working directory.

    Raises:
        ConfigError: it cannot be read, or says something wrong; the message lists every mistake.
    """
    if config is None:
        return _checked(default_config(), base=Path.cwd(), source="")
    if isinstance(config, StoreConfig):
        return config.anchored(Path.cwd())
    if isinstance(config, Mapping):
        return _checked(config, base=Path.cwd(), source="")
    if isinstance(config, str | Path):
        path = Path(config).expanduser()
        return _checked(_read(path), base=path.absolute().parent, source=str(config))
    raise ConfigError(f"config is {type(config).__name__}; give a path, a mapping, a StoreConfig or None")


def default_config() -> dict[str, object]:
    """Return the config that stands for none at all."""
    return {
        "tiers": [
            {"backend": "pinned-cpu", "capacity": DEFAULT_MEMORY},
            {"backend": "local-disk", "capacity": DEFAULT_DISK, "path": str(user_cache_folder())},
        ],
    }


def reconcile(name: str, argument: T | None, configured: T | None) -> T | None:
    """Return what holds of an argument and the config's value of the same thing; `None` means not given.

    Raises:
        ConfigError: both are given and differ.
    """
    if argument is not None and configured is not None and argument != configured:
        raise ConfigError(
            f"{name}: the argument says {show(argument, name=name)}, the config says {show(configured, name=name)}; "
            "give one of them, or the same twice"
        )
    return configured if argument is None else argument


def _checked(values: Mapping[str, object], *, base: Path, source: str) -> StoreConfig:
    stray = _stray_keys(values, "")
    if stray:
        raise failure(stray, source=source)
    try:
        return StoreConfig(**values).anchored(base)
    except InvalidConfigError as exc:
        problems = exc.problems
    raise failure(problems, source=source)


def _read(path: Path) -> Mapping[str, object]:
    suffix = path.suffix.lower()
    if suffix not in {".toml", ".yaml", ".yml"}:
        raise ConfigError(f"config file {str(path)!r} is neither .toml nor .yaml; rename it, or give a mapping")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no config file {str(path)!r}{_similar(path)}") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {exc}") from exc
    return _from_toml(text, path) if suffix == ".toml" else _from_yaml(text, path)


def _from_toml(text: str, path: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path} is not TOML: {exc}") from exc


def _from_yaml(text: str, path: Path) -> Mapping[str, object]:
    try:
        from kvtier.config.yaml_text import parse_yaml  # noqa: PLC0415  # PyYAML is optional
    except ImportError as exc:
        raise ConfigError(f"{path} needs PyYAML: pip install 'kvtier[yaml]', or write it as TOML") from exc
    values = parse_yaml(text, str(path))
    if isinstance(values, Mapping):
        return values
    raise ConfigError(f"{path} holds {type(values).__name__}, not a table of options")


def _similar(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in {".toml", ".yaml", ".yml"}]
    except OSError:
        return f"; the directory {str(path.parent)!r} cannot be read"
    return f"; there are: {', '.join(nearest_first(path.name, names)[:5])}" if names else ""


def _stray_keys(value: object, path: str) -> list[Problem]:
    """Find keys that are no texts, which YAML and Python allow."""
    if isinstance(value, Mapping):
        stray = [
            Problem(path=path, text=f"key {key!r} is not a text; put it in quotes")
            for key in value
            if not isinstance(key, str)
        ]
        for key, item in value.items():
            stray += _stray_keys(item, f"{path}.{key}" if path else str(key))
        return stray
    if isinstance(value, list | tuple):
        return [problem for i, item in enumerate(value) for problem in _stray_keys(item, f"{path}[{i}]")]
    return []
