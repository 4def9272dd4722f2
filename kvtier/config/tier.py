"""One `[[tiers]]` table: which backend, how large, what goes in and out of it."""

from __future__ import annotations

import pathlib
import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, PlainValidator, Strict, WithJsonSchema

from kvtier import registry
from kvtier.backends.base import Backend
from kvtier.config.choices import CodecChoice, PluginTable, PolicyChoice, PolicyConfig, construct
from kvtier.config.plugins import path_options
from kvtier.config.problems import InvalidConfigError, Problem
from kvtier.config.tables import BoolOption, CountOption, SecondsOption, SizeOption
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _backend(value: object) -> str | Backend:
    if isinstance(value, Backend) or (isinstance(value, str) and value):
        return value
    raise ValueError(f"is no backend; known: {', '.join(registry.backends.names())}")


def _name(value: object) -> str:
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise ValueError(
        "is no tier name; write up to 64 letters, digits, '.', '_' and '-', starting with a letter or digit"
    )


BackendOption: TypeAlias = Annotated[str | Backend, PlainValidator(_backend), WithJsonSchema({"type": "string"})]
NameOption: TypeAlias = Annotated[
    str, PlainValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"})
]


class TierConfig(PluginTable):
    """One level of the hierarchy; the options of its backend stand flat beside these.

    In Python `backend` may also be a `Backend` instance, which then has its options already.
    """

    selector: ClassVar[str] = "backend"
    sizes: ClassVar[frozenset[str]] = frozenset(
        {"capacity", "max_in_flight_bytes", "write_queue_bytes", "max_value_bytes", "warm"}
    )

    backend: BackendOption = Field(description="name a backend, for example backend = 'local-disk'")
    name: NameOption
    capacity: SizeOption = Field(description='say how much the tier may hold, for example capacity = "4GiB"')
    policy: PolicyChoice = PolicyConfig(name="lru")
    codecs: tuple[CodecChoice, ...] = ()
    write: Literal["through", "back"] = "through"
    promote: Literal["always", "never", "second-touch"] = "always"
    admit: Literal["always", "second-touch"] = "always"
    pin_fraction: Annotated[float, Strict(), Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    required: BoolOption = True
    on_full: Literal["drop", "wait"] = "drop"
    ttl_seconds: SecondsOption | None = None
    deadline_seconds: SecondsOption | None = Field(default=None, description="the store's, when not given")
    negative_seconds: SecondsOption = 1.0
    max_in_flight: CountOption = 32
    max_in_flight_bytes: SizeOption = 512 << 20
    max_value_bytes: SizeOption = 1 << 30
    write_queue_bytes: SizeOption = 256 << 20
    writers: CountOption = 4
    threads: CountOption = 4
    warm: SizeOption | None = Field(default=None, description="how much to load from the tiers below after open")

    def __init__(self, **values: object) -> None:  # type checkers would make one up, without the human units
        super().__init__(**values)

    @classmethod
    def load_plugin(cls, named: object) -> type[Backend] | None:
        """Return the backend's class, `None` for an instance."""
        return registry.backends.load(named) if isinstance(named, str) and named else None

    def build_backend(self) -> Backend:
        """Return a new backend with the tier's options, or the instance that was given.

        Raises:
            ConfigError: the backend refuses its options.
        """
        if isinstance(self.backend, Backend):
            return self.backend
        try:
            return construct(registry.backends.load(self.backend), self.options)
        except InvalidConfigError:
            raise
        except ConfigError as exc:
            raise ConfigError(f"tier {self.name!r}: {exc}") from exc

    @property
    def lossy_codec(self) -> int | None:
        """Index of the first codec that loses precision, `None` if all keep every bit."""
        return next((i for i, codec in enumerate(self.codecs) if codec.build().lossy), None)

    def anchored(self, base: pathlib.Path) -> Self:
        """Return this tier with relative paths among its options starting at `base`."""
        if isinstance(self.backend, Backend):
            return self
        paths = path_options(registry.backends.load(self.backend))
        moved = {
            name: base / value if name in paths and isinstance(value, pathlib.Path) else value
            for name, value in self.options.items()
        }
        copy = self.model_copy()
        copy._options = moved  # noqa: SLF001  # a copy of our own
        return copy

    def _fill(self, values: dict[str, object]) -> list[Problem]:
        backend = values.get("backend")
        if values.get("name") is None:
            values = values | {"name": backend if isinstance(backend, str) and backend else _kind(backend)}
        return super()._fill(values)


def _kind(backend: object) -> str:
    """Return a tier name made from a class name: "my-disk" for a `MyDiskBackend`."""
    words = re.sub(r"Backend$", "", type(backend).__name__) or "backend"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", words).strip("_").lower() or "backend"
