"""Tables that name a plug-in and hold its options beside their own: codecs and policies here, tiers build on it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeAlias, TypeVar

from pydantic import BeforeValidator, PrivateAttr, ValidationError

from kvtier import registry
from kvtier.config.plugins import options_model, secret_options
from kvtier.config.problems import InvalidConfigError, Problem, collect, show, unknown
from kvtier.config.tables import Table, TextOption
from kvtier.errors import ConfigError, UnknownPluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvtier.codecs.base import Codec
    from kvtier.policies.base import Policy

T = TypeVar("T")


class PluginTable(Table):
    """A table whose keys are its own fields and, flat beside them, the options of the class it names."""

    selector: ClassVar[str] = "name"
    """The field that names the class."""

    _options: dict[str, object] = PrivateAttr(default_factory=dict)

    @property
    def options(self) -> Mapping[str, object]:
        """All options of the plug-in, validated; those not given have the defaults of its class."""
        return self._options

    def __repr_args__(self) -> Iterable[tuple[str | None, object]]:
        yield from super().__repr_args__()
        yield from self._options.items()

    @classmethod
    @abstractmethod
    def load_plugin(cls, named: object) -> type | None:
        """Return the class that the selector's value names, `None` if it takes no options here; raise `ConfigError`."""

    def _fill(self, values: dict[str, object]) -> list[Problem]:
        fields = type(self).model_fields
        problems = super()._fill({name: value for name, value in values.items() if name in fields})
        others = {name: value for name, value in values.items() if name not in fields}
        if self.selector not in values:
            return problems
        named = values[self.selector]
        try:
            plugin = self.load_plugin(named)
            options, more = ({}, []) if plugin is None else check_options(plugin, others, set(fields))
        except ConfigError as exc:
            lost = isinstance(exc, UnknownPluginError)
            return [*problems, Problem(path=self.selector, shown=show(named), text=str(exc), plugin=lost)]
        if plugin is None and not any(problem.path == self.selector for problem in problems):
            more = [unknown(name, value, fields) for name, value in others.items()]
        if not problems and not more:
            self._options = options
        return [*problems, *more]


def check_options(
    plugin: type, values: Mapping[str, object], fields: set[str]
) -> tuple[dict[str, object], list[Problem]]:
    """Validate the options `values` for `plugin(**options)`; return all of them, and what is wrong.

    `fields` are the names that the table itself uses.
    """
    model = options_model(plugin)
    clash = fields & set(model.model_fields)
    if clash:
        where = f"{plugin.__module__}.{plugin.__qualname__}"
        raise ConfigError(
            f"parameter(s) {', '.join(sorted(clash))} of {where} have names that a tier's table uses itself"
        )
    try:
        checked = model.model_validate(dict(values))
    except ValidationError as exc:
        known = dict.fromkeys([*model.model_fields, *sorted(fields)], "")
        return {}, collect(exc, known, secret_options(plugin))
    return {name: getattr(checked, name) for name in model.model_fields}, []


def construct(factory: Callable[..., T], options: Mapping[str, object]) -> T:
    """Call `factory` with the options, policies among them built first."""
    return factory(
        **{name: value.build() if isinstance(value, PolicyConfig) else value for name, value in options.items()}
    )


class CodecConfig(PluginTable):
    """One step of a tier's codec chain: `"zstd"`, or `{name = "zstd", level = 3}`."""

    name: TextOption

    def __init__(self, **values: object) -> None:  # type checkers would make one up, without the human units
        super().__init__(**values)

    @classmethod
    def load_plugin(cls, named: object) -> type[Codec] | None:
        """Return the codec's class."""
        return registry.codecs.load(named) if isinstance(named, str) else None

    def build(self) -> Codec:
        """Return the codec; raise `ConfigError` where it refuses its options."""
        return construct(registry.codecs.load(self.name), self.options)

    def _fill(self, values: dict[str, object]) -> list[Problem]:
        return super()._fill(values) or trial(self.build)


class PolicyConfig(PluginTable):
    """A tier's eviction policy: `"lru"`, or `{name = "ttl", seconds = 3600, inner = "s3-fifo"}`."""

    name: TextOption

    def __init__(self, **values: object) -> None:  # type checkers would make one up, without the human units
        super().__init__(**values)

    @classmethod
    def load_plugin(cls, named: object) -> type[Policy] | None:
        """Return the policy's class."""
        return registry.policies.load(named) if isinstance(named, str) else None

    def build(self) -> Policy:
        """Return a new policy; raise `ConfigError` where it refuses its options."""
        return construct(registry.policies.load(self.name), self.options)

    def _fill(self, values: dict[str, object]) -> list[Problem]:
        return super()._fill(values) or trial(self.build)


def trial(build: Callable[[], object]) -> list[Problem]:
    """Build once to hear now, with the option's path, what the class itself refuses."""
    try:
        build()
    except InvalidConfigError as exc:
        return list(exc.problems)
    except ConfigError as exc:
        return [Problem(path="", text=str(exc))]
    return []


def _named(value: object) -> object:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict | PluginTable):
        return value
    raise ValueError("is neither a name nor a table with a name")


CodecChoice: TypeAlias = Annotated[CodecConfig, BeforeValidator(_named)]
PolicyChoice: TypeAlias = Annotated[PolicyConfig, BeforeValidator(_named)]
