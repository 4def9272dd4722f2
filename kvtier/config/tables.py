"""The base of all config tables: frozen, unknown keys refused, every mistake a ConfigError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, WithJsonSchema

from kvtier.config.problems import Problem, collect, failure
from kvtier.config.sizes import parse_size

if TYPE_CHECKING:
    from typing import Self

SIZE_SCHEMA: dict[str, list[dict[str, object]]] = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([kKmMgGtT]?[iI]?[bB])?\s*$"},
    ]
}

SizeOption: TypeAlias = Annotated[int, BeforeValidator(parse_size), WithJsonSchema(SIZE_SCHEMA)]
SecondsOption: TypeAlias = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
CountOption: TypeAlias = Annotated[int, Strict(), Field(ge=1)]
TextOption: TypeAlias = Annotated[str, Strict(), Field(min_length=1)]
BoolOption: TypeAlias = Annotated[bool, Strict()]


class Table(BaseModel):
    """One table of the config.

    Raises:
        ConfigError: on construction, listing everything that is wrong, one line each.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, arbitrary_types_allowed=True
    )

    sizes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, **values: object) -> None:
        problems = self._fill(values)
        if problems:  # raised here, outside the handler: pydantic's error would show secrets
            raise failure(problems)

    @classmethod
    def model_validate(cls, obj: object, **_kwargs: object) -> Self:
        """Build the table from a mapping; raises `ConfigError` like the constructor."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, dict):
            raise failure([Problem(path="", text=f"{cls.__name__} needs a table, not {type(obj).__name__}")])
        return cls(**obj)

    def _fill(self, values: dict[str, object]) -> list[Problem]:
        try:
            super().__init__(**values)
        except ValidationError as exc:
            return collect(exc, {name: field.description or "" for name, field in type(self).model_fields.items()})
        return []
