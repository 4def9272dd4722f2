"""Sizes as options: "4GiB", or one line that says what is wrong."""

from __future__ import annotations

from kvtier.errors import InvalidValueError


def size_in(option: str, text: str) -> int:
    """Return the bytes that an option's text means; raises `InvalidValueError` that names the option."""
    from kvtier.config.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as exc:
        raise InvalidValueError(f"{option} {text!r} {exc}") from None
