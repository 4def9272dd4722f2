"""Types for the keyword parameters of backends, codecs and policies, which are their options in a config.

The config derives each plug-in's options from its `__init__`: name, type and default of every keyword parameter.
These types tell it more: `Size` takes "4GiB", `LocalPath` expands `~` and starts at the config file's directory,
`Secret` and `SecretUrl` never show what they hold. They need no pydantic, and neither does a plug-in.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, TypeAlias
from urllib.parse import urlsplit

MASK: Final = "***"

# Up to the last "@" of the word: a password may hold "/", ":" or "@" that nobody escaped.
_CREDENTIALS = re.compile(r"(?<=://)\S*(?=@)")
_QUERY_SECRET = re.compile(r"(?i)([?&;][^=&;\s]*(?:pass|secret|token|key|credential|signature)[^=&;\s]*=)[^&;#\s]*")


class Marker:
    """What an annotated option means beyond its Python type."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name: str = name

    def __repr__(self) -> str:
        return self.name


SIZE: Final = Marker("SIZE")
PATH: Final = Marker("PATH")
SECONDS: Final = Marker("SECONDS")

Size: TypeAlias = Annotated[int, SIZE]
"""Bytes, at least 1; a config also takes "512MiB", "10 GB" and the like."""

LocalPath: TypeAlias = Annotated[Path, PATH]
"""A path on this machine; in a config `~` is expanded and a relative path starts at the config file's directory."""

Seconds: TypeAlias = Annotated[float, SECONDS]
"""A time span: finite and greater than 0."""


class Secret:
    """A text that shows only as `***`; `reveal()` gives it to the one place that needs it."""

    __slots__ = ("_text",)

    def __init__(self, text: str | Secret) -> None:
        self._text: str = text.reveal() if isinstance(text, Secret) else text

    def reveal(self) -> str:
        """Return the text itself."""
        return self._text

    def masked(self) -> str:
        """Return what may be shown."""
        return MASK

    def __str__(self) -> str:
        return self.masked()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.masked()!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


class SecretUrl(Secret):
    """A URL that may hold a password: shows scheme, user, host and path, never the password."""

    __slots__ = ()

    @property
    def scheme(self) -> str:
        """The URL's scheme in lower case, "" when there is none."""
        return urlsplit(self._text).scheme

    def masked(self) -> str:
        """Return the URL with its password (or a lone token before `@`) and secret query values hidden."""
        return mask_url(self._text)


def mask_url(text: str) -> str:
    """Hide the credentials and secret query values of every URL inside `text`; other text stays as it is."""
    return _QUERY_SECRET.sub(rf"\1{MASK}", _CREDENTIALS.sub(_mask_credentials, text))


def _mask_credentials(match: re.Match[str]) -> str:
    user, colon, _password = match[0].partition(":")
    plain = bool(colon) and "/" not in user
    return f"{user}:{MASK}" if plain else MASK  # without a colon it may be a token
