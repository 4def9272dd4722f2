"""Options of backends, codecs and policies, derived from the keyword parameters of their `__init__`."""

from __future__ import annotations

import inspect
import pathlib
import typing
from collections.abc import Callable
from functools import lru_cache, partial
from types import NoneType, UnionType
from typing import Annotated, Final, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, Strict, WithJsonSchema, create_model

from kvtier.config.tables import SecondsOption, SizeOption
from kvtier.errors import ConfigError
from kvtier.options import PATH, SECONDS, SIZE, Secret, SecretUrl
from kvtier.policies.base import Policy

Adapt: TypeAlias = Callable[[object], object]
"""Turns a parameter's annotation into the type that a config validates."""

_STRICT: Final = (bool, int, float, str)


@lru_cache(maxsize=256)
def options_model(cls: type) -> type[BaseModel]:
    """Return the pydantic model of `cls(**options)`.

    Raises:
        ConfigError: the class's parameters cannot be read; that is a mistake of its author.
    """
    fields: dict[str, tuple[object, object]] = {}
    hints = _hints(cls)
    for name, parameter in _parameters(cls).items():
        default: object = ... if parameter.default is parameter.empty else parameter.default
        if isinstance(default, Secret):
            default = Field(default_factory=partial(_same, default))  # a schema shows no secret, nor can it
        fields[name] = (adapt(hints.get(name, object)), default)
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
    # mypy cannot follow fields that are computed
    model: type[BaseModel] = create_model(f"{cls.__name__}Options", __config__=config, **fields)  # type: ignore[call-overload]  # see above
    return model


def _same(default: Secret) -> Secret:
    return default


def secret_options(cls: type) -> frozenset[str]:
    """Return the names of the options of `cls` whose values are never shown."""
    return frozenset(name for name, hint in _hints(cls).items() if _mentions(hint, Secret))


def path_options(cls: type) -> frozenset[str]:
    """Return the names of the options of `cls` that are paths on this machine."""
    return frozenset(name for name, hint in _hints(cls).items() if _mentions(hint, pathlib.Path))


def size_options(cls: type) -> frozenset[str]:
    """Return the names of the options of `cls` that are sizes in bytes."""
    return frozenset(name for name, hint in _hints(cls).items() if _mentions(hint, SIZE))


def adapt(hint: object) -> object:
    """Return the type to validate for a parameter annotated with `hint`."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _adapt_marked(hint)
    if origin in {typing.Union, UnionType}:
        parts = [adapt(part) for part in typing.get_args(hint) if not (part is str and _mentions(hint, pathlib.Path))]
        return typing.Union[tuple(parts)]  # noqa: UP007  # built at run time
    if hint in _STRICT:
        return Annotated[hint, Strict()]
    if not isinstance(hint, type):
        return hint
    if issubclass(hint, pathlib.Path):
        return _PATH
    if issubclass(hint, Secret):
        schema = {"type": "string", "format": "uri" if issubclass(hint, SecretUrl) else "password"}
        return Annotated[hint, PlainValidator(partial(_secret, hint)), WithJsonSchema(schema)]
    if issubclass(hint, Policy):
        from kvtier.config.choices import PolicyChoice  # noqa: PLC0415  # policies hold policies

        return PolicyChoice
    return hint


def _adapt_marked(hint: object) -> object:
    marks = typing.get_args(hint)[1:]
    if SIZE in marks:
        return SizeOption
    if SECONDS in marks:
        return SecondsOption
    return _PATH if PATH in marks else hint


def expand(value: object) -> pathlib.Path:
    """Return `value` as a path with `~` expanded."""
    if not isinstance(value, str | pathlib.Path) or not str(value):
        raise ValueError("is not a path; write it in quotes")
    if "\0" in str(value):
        raise ValueError("holds a NUL character, which no path can")
    try:
        return pathlib.Path(value).expanduser()
    except RuntimeError as exc:
        raise ValueError(f"cannot be expanded: {exc}") from exc


_PATH: Final = Annotated[pathlib.Path, BeforeValidator(expand), WithJsonSchema({"type": "string", "format": "path"})]


def _secret(cls: type[Secret], value: object) -> Secret:
    if isinstance(value, str | Secret):
        return cls(value)
    raise ValueError("is not a text; put it in quotes")


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(cls).parameters
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


def _hints(cls: type) -> dict[str, object]:
    init: object = cls.__init__  # type: ignore[misc]  # reading the signature of the very class is the point
    if not inspect.isfunction(init):
        return {}
    try:
        hints = typing.get_type_hints(init, include_extras=True)
    except NameError as exc:
        where = f"{cls.__module__}.{cls.__qualname__}"
        raise ConfigError(
            f"the options of {where} cannot be read: {exc}; import that name outside TYPE_CHECKING"
        ) from exc
    hints.pop("return", None)
    return hints


def _mentions(hint: object, wanted: object) -> bool:
    if hint is wanted or (isinstance(hint, type) and isinstance(wanted, type) and issubclass(hint, wanted)):
        return hint is not NoneType
    parts = [*typing.get_args(hint), *getattr(hint, "__metadata__", ())]
    return any(_mentions(part, wanted) for part in parts)
