"""What is wrong with a config, one line per problem: option, value, way out; secrets never shown."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError, UnknownPluginError
from kvtier.options import MASK, Secret, mask_url
from kvtier.registry import nearest_first

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_SHOWN_CHARS: Final = 80
_CLOSE: Final = 0.5
_NAMES: Final = 8
_SECRET_NAME = re.compile(
    r"(?i)passw|passphrase|pwd|secret|credential|signature|(?:api|access|auth|bearer|session|security|private|mac)[_-]?(?:key|token)$|^(?:key|token)$"
)

_WHOLE = "is not a whole number"
_TEXTS: Final[Mapping[str, str]] = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": "is not a number",
    "float_parsing": "is not a number",
    "finite_number": "is not finite; write a number of seconds or another finite number",
    "bool_type": "is neither true nor false",
    "bool_parsing": "is neither true nor false",
    "string_type": "is not a text; put it in quotes",
    "list_type": "is not a list; write [...]",
    "tuple_type": "is not a list; write [...]",
    "dict_type": "is not a table",
    "model_type": "is not a table",
    "mapping_type": "is not a table",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake: the option's dotted path, the value as it may be shown ("" if there is none), and the way out."""

    path: str
    shown: str = ""
    text: str
    plugin: bool = False  # the option names a plug-in that nobody provides

    def __str__(self) -> str:
        value, text = f" = {self.shown}" if self.shown else "", mask_url(self.text)
        return f"{self.path}{value}: {text}" if self.path else text

    def below(self, prefix: str) -> Problem:
        """Return this problem as seen from the table that holds `prefix`."""
        return replace(self, path=join(prefix, self.path))


class InvalidConfigError(ConfigError):
    """Everything that is wrong with one config.

    Attributes:
        problems: the single mistakes, in the order of the config.
    """

    def __init__(self, problems: Sequence[Problem], *, source: str = "") -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        where = f"{source}: " if source else ""
        if len(lines) == 1:
            super().__init__(f"{where}{lines[0]}")
        else:
            super().__init__("\n  ".join([f"{where}{len(lines)} problems", *lines]))


class UnknownChoiceError(InvalidConfigError, UnknownPluginError):
    """A config that names a plug-in nobody provides, among other mistakes perhaps."""


def failure(problems: Sequence[Problem], *, source: str = "") -> InvalidConfigError:
    """Return the exception that tells of `problems`."""
    kind = UnknownChoiceError if any(problem.plugin for problem in problems) else InvalidConfigError
    return kind(problems, source=source)


def join(*parts: str | int) -> str:
    """Return a dotted path: `join("tiers", 1, "path")` is `tiers[1].path`."""
    path = ""
    for part in parts:
        if isinstance(part, int) or part.startswith("["):
            path += f"[{part}]" if isinstance(part, int) else part
        elif part:
            path += f".{part}" if path else part
    return path


def show(value: object, *, name: str = "", secret: bool = False) -> str:
    """Return `value` as an error may show it: short, and with secrets masked.

    `name` is the option's name, which alone may betray a secret.
    """
    if secret or isinstance(value, Secret) or _SECRET_NAME.search(name):
        return repr(mask_url(str(value))) if "://" in str(value) else MASK
    text = mask_url(repr(value)) if not isinstance(value, dict | list | tuple) else _show_nested(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def unknown(name: str, value: object, known: Iterable[str], secrets: Collection[str] = ()) -> Problem:
    """Return the problem of an option nobody knows, with the nearest right names."""
    names = nearest_first(name, known)
    close = difflib.get_close_matches(name.lower(), names[:1], cutoff=_CLOSE)
    hint = f"did you mean {close[0]!r}? " if close else ""
    shown, more = ", ".join(names[:_NAMES]), len(names) - _NAMES
    rest = f"known: {shown}{f' and {more} more' if more > 0 else ''}" if names else "there are none here"
    misspelt_secret = bool(close) and (close[0] in secrets or _SECRET_NAME.search(close[0]) is not None)
    return Problem(
        path=name, shown=show(value, name=name, secret=misspelt_secret), text=f"unknown option; {hint}{rest}"
    )


def collect(error: ValidationError, known: Mapping[str, str], secrets: Collection[str] = ()) -> list[Problem]:
    """Translate pydantic's errors about one table; values of the options in `secrets` stay hidden.

    `known` has the table's options and what to say when they are missing ("" for nothing special).
    """
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        for problem in _translate(detail, known, secrets):
            first = found.get(problem.path)
            if first is None:
                found[problem.path] = problem
            elif problem.text not in first.text:  # the alternatives of a union complain one by one
                found[problem.path] = replace(first, text=f"{first.text}; or it {problem.text}")
    return list(found.values())


def _translate(detail: ErrorDetails, known: Mapping[str, str], secrets: Collection[str]) -> list[Problem]:
    loc = detail["loc"]
    name = str(loc[0]) if loc else ""
    value: object = detail["input"]
    kind = detail["type"]
    context = detail.get("ctx", {})
    cause = context.get("error")
    path = join(name, *[part for part in loc[1:] if isinstance(part, int)])
    if isinstance(cause, InvalidConfigError):
        return [problem.below(path) for problem in cause.problems]
    if kind == "extra_forbidden":
        return [unknown(name, value, known, secrets)]
    if kind == "missing":
        return [Problem(path=name, text=f"is missing; {known.get(name) or 'give it a value'}")]
    if cause is not None:
        text = str(cause)
    elif kind == "literal_error":
        text = f"must be {context['expected']}"
    else:
        text = _TEXTS.get(kind) or detail["msg"].replace("Input should", "must")
    return [Problem(path=path, shown=show(value, name=name, secret=name in secrets), text=text)]


def _show_nested(value: object, name: str = "") -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_show_nested(item, str(key))}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_show_nested(item, name) for item in value) + "]"
    return show(value, name=name)
