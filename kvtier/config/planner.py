"""The `[planner]` table: how fast the model computes and the tiers give, as far as it was measured before."""

from __future__ import annotations

import json
import math
import pathlib
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field, PlainValidator, Strict, WithJsonSchema

from kvtier.config.tables import Table
from kvtier.errors import ConfigError
from kvtier.planner import Link, Prefill

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self


def _path(value: object) -> pathlib.Path:
    if isinstance(value, str | pathlib.Path) and str(value):
        return pathlib.Path(value).expanduser()
    raise ValueError("is no path; write the file that `kvtier doctor --calibration` made")


PathOption: TypeAlias = Annotated[pathlib.Path, PlainValidator(_path), WithJsonSchema({"type": "string"})]
Tokens: TypeAlias = Annotated[int, Strict(), Field(ge=1)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PlannerConfig(Table):
    """What `plan` and `min_benefit_seconds` start from. Tiers are measured anew while they serve."""

    tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="speed of the prefill, where it hardly depends on the length"
    )
    measured: tuple[tuple[Tokens, Seconds], ...] = Field(
        default=(), description="prefills as [tokens, seconds], of two lengths or more"
    )
    calibration: PathOption | None = Field(default=None, description="a file made by `kvtier doctor --calibration`")

    def __init__(self, **values: object) -> None:  # type checkers would make one up, without the human units
        super().__init__(**values)

    def anchored(self, base: pathlib.Path) -> Self:
        """Return this table with a relative path starting at `base`."""
        return self.model_copy(update={"calibration": base / self.calibration}) if self.calibration else self

    def prefill(self) -> Prefill | None:
        """Return the model of the prefill; what is written here goes before the calibration file.

        Raises:
            ConfigError: measured lengths that tell nothing, or a bad file.
        """
        if self.measured:
            try:
                return Prefill.fit(self.measured)
            except ValueError as exc:
                raise ConfigError(f"planner.measured: {exc}") from None
        if self.tokens_per_second is not None:
            return Prefill.from_speed(self.tokens_per_second)
        return read_calibration(self.calibration)[0] if self.calibration else None

    def links(self) -> Mapping[str, Link]:
        """Return the speeds of tiers by name, from the calibration file. Raises `ConfigError` for a bad one."""
        return read_calibration(self.calibration)[1] if self.calibration else {}


def read_calibration(path: pathlib.Path) -> tuple[Prefill | None, Mapping[str, Link]]:
    """Return what `write_calibration` wrote.

    Raises:
        ConfigError: the file cannot be read, or is no calibration.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        prefill = Prefill(**told["prefill"]) if told.get("prefill") is not None else None
        links = {str(name): Link(**figures) for name, figures in told["links"].items()}
        numbers = [number for link in links.values() for number in (link.latency_seconds, link.bytes_per_second)]
        if any(not (math.isfinite(number) and number >= 0) for number in numbers):
            raise ValueError("speeds are numbers above 0")  # noqa: TRY301  # told as the other mistakes are
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise ConfigError(f"planner.calibration: {path}: {exc!r}; make it anew with kvtier doctor") from None
    return prefill, links


def write_calibration(path: pathlib.Path, prefill: Prefill | None, links: Mapping[str, Link]) -> None:
    """Write what was measured. Raises `OSError` where the file cannot be written."""
    told = {
        "prefill": None
        if prefill is None
        else {"linear_seconds": prefill.linear_seconds, "quadratic_seconds": prefill.quadratic_seconds},
        "links": {
            name: {"latency_seconds": link.latency_seconds, "bytes_per_second": link.bytes_per_second}
            for name, link in links.items()
        },
    }
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
