"""Finds backends, codecs and policies by name, through entry points, and imports only those that are asked for."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Generic, TypeVar

from kvtier.backends.base import Backend
from kvtier.codecs.base import Codec
from kvtier.errors import ConfigError, UnknownPluginError
from kvtier.policies.base import Policy

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def nearest_first(word: str, known: Iterable[str]) -> list[str]:
    """Return `known`, the most similar to `word` first; of equals, one with the same letters."""
    folded = _fold(word)

    def distance(name: str) -> tuple[float, bool, str]:
        other = _fold(name)
        return -difflib.SequenceMatcher(None, folded, other).ratio(), sorted(folded) != sorted(other), name

    return sorted(known, key=distance)


def _fold(name: str) -> str:
    return name.lower().replace("_", "-")


class Registry(Generic[T]):
    """Classes of one kind under their names: those of installed packages, and those registered in this process.

    Nothing is imported before `load`. Entry points are read once, and again when a name is not found, so that a
    package installed meanwhile is seen.
    """

    def __init__(self, group: str, base: type[T]) -> None:
        self._group = group
        self._base = base
        self._noun = base.__name__.lower()
        self._registered: dict[str, type[T]] = {}
        self._found: dict[str, list[EntryPoint]] | None = None

    def names(self) -> tuple[str, ...]:
        """Return every known name, sorted; imports nothing."""
        return tuple(sorted({*self._registered, *self._entry_points()}))

    def register(self, name: str, cls: type[T]) -> None:
        """Make `cls` known as `name` in this process; the same class again is accepted.

        Raises:
            ConfigError: `cls` is not of this registry's kind, or the name belongs to another class.
        """
        self._check(name, cls, "registered")
        taken = self._registered.get(name)
        if taken is cls:
            return
        if taken is not None:
            raise ConfigError(f"{self._noun} {name!r} is registered already, as {_path(taken)}; choose another name")
        if name in self._entry_points():
            owner = _origin(self._entry_points()[name][0])
            raise ConfigError(f"{self._noun} {name!r} is provided by {owner} already; choose another name")
        self._registered[name] = cls

    def load(self, name: str) -> type[T]:
        """Import and return the class called `name`.

        Raises:
            UnknownPluginError: nothing has this name; the message lists what has, nearest first.
            ConfigError: two packages claim the name, its module cannot be imported, or it is not of this kind.
        """
        if name in self._registered:
            return self._registered[name]
        entry = self._entry_point(name)
        try:
            loaded: object = entry.load()
        except (ImportError, AttributeError) as exc:
            raise ConfigError(f"{self._noun} {name!r} cannot be imported: {exc}{_remedy(entry, exc)}") from exc
        return self._check(name, loaded, f"provided by {_origin(entry)}")

    def _check(self, name: str, cls: object, how: str) -> type[T]:
        if isinstance(cls, type) and issubclass(cls, self._base):
            return cls
        wanted = _path(self._base)
        raise ConfigError(f"{self._noun} {name!r}, {how}, is {cls!r}, not a subclass of {wanted}")

    def _entry_point(self, name: str) -> EntryPoint:
        claims = self._entry_points().get(name)
        if claims is None:
            self._found = None
            claims = self._entry_points().get(name)
        if claims is None:
            known = ", ".join(nearest_first(name, self.names())) or "none (is kvtier itself installed?)"
            raise UnknownPluginError(f"no {self._noun} {name!r}; known: {known}")
        if len({claim.value for claim in claims}) > 1:
            origins = " and ".join(sorted(_origin(claim) for claim in claims))
            raise ConfigError(f"{self._noun} {name!r} is claimed by {origins}; uninstall one of them")
        return claims[0]

    def _entry_points(self) -> dict[str, list[EntryPoint]]:
        if self._found is None:
            self._found = {}
            for entry in entry_points(group=self._group):
                self._found.setdefault(entry.name, []).append(entry)
        return self._found


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _origin(entry: EntryPoint) -> str:
    dist = entry.dist
    return f"{dist.name} {dist.version} ({entry.value})" if dist is not None else entry.value


def _remedy(entry: EntryPoint, exc: Exception) -> str:
    """Name the extra that brings the missing package, when the entry point declares one."""
    if entry.dist is None or not isinstance(exc, ImportError):
        return ""
    extras = f"[{','.join(entry.extras)}]" if entry.extras else ""
    return f"; try: pip install '{entry.dist.name}{extras}'"


# mypy wants a concrete class for type[T]; these are the abstract contracts on purpose.
backends: Registry[Backend] = Registry("kvtier.backends", Backend)  # type: ignore[type-abstract]  # see above
codecs: Registry[Codec] = Registry("kvtier.codecs", Codec)  # type: ignore[type-abstract]  # see above
policies: Registry[Policy] = Registry("kvtier.policies", Policy)  # type: ignore[type-abstract]  # see above
