"""What callers give, looked at before anything happens: a mistake is an error of ours that names the way out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch

from kvtier.errors import ConfigError, InvalidKeyError, InvalidValueError
from kvtier.keys import Hint, Namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


def check_hint(hint: object) -> None:
    """Raise `InvalidValueError` for what is no hint."""
    if hint is not None and not isinstance(hint, Hint):
        raise InvalidValueError(f"hint is a {type(hint).__name__}; give kvtier.Hint(...) or None")


def check_wait_seconds(seconds: object) -> None:
    """Raise `InvalidValueError` unless this is a time to wait, 0 for none."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not math.isfinite(seconds) or seconds < 0:  # type: ignore[arg-type, operator]  # a number by then
        raise InvalidValueError(f"wait_seconds={seconds!r}: must be a finite number of seconds, 0 or more")


def check_flag(name: str, flag: object) -> None:
    """Raise `InvalidValueError` unless this is True or False."""
    if not isinstance(flag, bool):
        raise InvalidValueError(f"{name}={flag!r}: must be True or False")


def check_device(device: object) -> None:
    """Raise `InvalidValueError` unless tensors can be brought to this device; None stands for where they are."""
    if device is None:
        return
    try:
        made = torch.empty(0, device=device)  # type: ignore[call-overload]  # whatever the caller gave
    except (RuntimeError, AssertionError, TypeError) as exc:  # torch has no error of its own for it
        reason = (str(exc).splitlines() or [""])[0]
        raise InvalidValueError(f"device={device!r}: no tensor can be made there ({reason})") from None
    if made.device.type == "meta":
        raise InvalidValueError(f"device={device!r}: tensors there have no elements")


def check_key_prefix(prefix: object) -> None:
    """Raise `InvalidKeyError` unless this is a text that keys may begin with."""
    if not isinstance(prefix, str):
        raise InvalidKeyError(f"the prefix of keys is a {type(prefix).__name__}; give a str, '' for all keys")


def check_namespace_kind(namespace: object) -> None:
    """Raise `ConfigError` for what is no namespace."""
    if not isinstance(namespace, Namespace):
        raise ConfigError(
            f"namespace is a {type(namespace).__name__}; give kvtier.Namespace(model=..., revision=...) "
            "or Namespace.from_model(model)"
        )


def listed(items: Iterable[T], what: str) -> Sequence[T]:
    """Return a batch as a list.

    Raises:
        InvalidValueError: it cannot be gone through, or is one text, which would be taken for its letters.
    """
    given: object = items  # may come straight from a user
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise InvalidValueError(f"{what} come as a {type(given).__name__}; give a list of them")
    return list(items)


def check_mapping(given: object, what: str) -> None:
    """Raise `InvalidValueError` unless this is a mapping."""
    if not isinstance(given, Mapping):
        raise InvalidValueError(f"{what} is a {type(given).__name__}; give a mapping")
