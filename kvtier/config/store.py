"""The whole config: chunk size, namespace, tiers in their order, limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, Strict

from kvtier.config.choices import trial
from kvtier.config.planner import PlannerConfig
from kvtier.config.problems import Problem, join, show
from kvtier.config.sizes import format_size
from kvtier.config.tables import BoolOption, CountOption, SecondsOption, SizeOption, Table, TextOption
from kvtier.config.tier import TierConfig
from kvtier.errors import ConfigError
from kvtier.keys.namespace import Namespace

if TYPE_CHECKING:
    import pathlib
    from typing import Self

MAX_CHUNK_TOKENS = 65_536

ShareName: TypeAlias = Annotated[str, Strict(), Field(pattern=r"^[0-9a-f]{16}$")]
Share: TypeAlias = Annotated[float, Strict(), Field(gt=0, le=1, allow_inf_nan=False)]


def _tiers(value: object) -> object:
    if isinstance(value, dict):
        raise ValueError("is one table; write [[tiers]] above each tier")  # noqa: TRY004  # pydantic wants ValueError
    if isinstance(value, list | tuple) and not value:
        raise ValueError("is empty; add a [[tiers]] table with a backend and a capacity")
    return value


class NamespaceConfig(Table):
    """Whose KV this is. `revision` or `weights` tell two checkpoints of one model apart; persistent tiers need one."""

    model: TextOption = Field(description='name the model, for example model = "org/name"')
    revision: TextOption | None = None
    weights: TextOption | None = None
    config: TextOption | None = None
    kv_dtype: TextOption | None = None
    rope: Literal["short", "long"] | None = None
    tp: Annotated[int, Strict(), Field(ge=0)] = 0
    tp_size: CountOption = 1
    pp: Annotated[int, Strict(), Field(ge=0)] = 0
    pp_size: CountOption = 1

    def __init__(self, **values: object) -> None:  # type checkers would make one up, without the human units
        super().__init__(**values)

    def build(self) -> Namespace:
        """Return the namespace that this describes."""
        return Namespace(**self.model_dump())

    def _fill(self, values: dict[str, object]) -> list[Problem]:
        return super()._fill(values) or trial(self.build)


class MemoryConfig(Table):
    """Host memory beside the entries of memory tiers."""

    sizes: ClassVar[frozenset[str]] = frozenset({"staging_bytes", "results_bytes"})

    staging_bytes: SizeOption | None = Field(
        default=None, description="room for 8 of the largest chunks, at least 64 MiB, when not given"
    )
    results_bytes: SizeOption = 1 << 30
    lease_share: Annotated[float, Strict(), Field(gt=0, le=1, allow_inf_nan=False)] = 0.5
    lease_seconds: SecondsOption = 60.0
    huge_pages: BoolOption = True
    lock: BoolOption = False
    numa_node: Annotated[int, Strict(), Field(ge=0)] | None = Field(
        default=None, description="the GPU's, when not given"
    )

    def __init__(self, **values: object) -> None:  # type checkers would make one up, without the human units
        super().__init__(**values)


class StoreConfig(Table):
    """Everything `kvtier.open` needs to know, checked.

    Raises:
        ConfigError: on construction, listing everything that is wrong.
    """

    chunk_tokens: Annotated[int, Strict(), Field(ge=1, le=MAX_CHUNK_TOKENS)] = 256
    namespace: NamespaceConfig | None = None
    tiers: Annotated[tuple[TierConfig, ...], BeforeValidator(_tiers)] = Field(
        description="add a [[tiers]] table with a backend and a capacity"
    )
    deadline_seconds: SecondsOption = 5.0
    close_seconds: SecondsOption = 10.0
    coherence_seconds: SecondsOption = 30.0
    strict: BoolOption = False
    lossless: BoolOption = False
    threads: CountOption = 4
    memory: MemoryConfig = MemoryConfig()
    planner: PlannerConfig = PlannerConfig()
    shares: dict[ShareName, Share] = Field(default={}, description="the most of each tier that a namespace may hold")

    def __init__(self, **values: object) -> None:  # type checkers would make one up, without the human units
        super().__init__(**values)

    def anchored(self, base: pathlib.Path) -> Self:
        """Return this config with relative paths starting at `base`."""
        tiers = tuple(tier.anchored(base) for tier in self.tiers)
        return self.model_copy(update={"tiers": tiers, "planner": self.planner.anchored(base)})

    def effective(self) -> dict[str, object]:
        """Return every option with its value, defaults included, as plain data; secrets are masked."""
        from kvtier.config.effective import plain  # noqa: PLC0415  # it knows this module

        return plain(self)

    def check_chunk_bytes(self, chunk_bytes: int) -> None:
        """Check that every tier can hold at least one chunk.

        Raises:
            ConfigError: naming each tier whose capacity is smaller than `chunk_bytes`.
        """
        small = [(i, tier) for i, tier in enumerate(self.tiers) if tier.capacity < chunk_bytes]
        lines = [
            f"{join('tiers', i, 'capacity')} = {format_size(tier.capacity)!r}: holds not even one chunk of "
            f"{self.chunk_tokens} tokens; write at least {format_size(chunk_bytes)}"
            for i, tier in small
        ]
        if lines:
            raise ConfigError("\n".join(lines))

    def _fill(self, values: dict[str, object]) -> list[Problem]:
        return super()._fill(values) or [*self._name_clashes(), *self._lossy_tiers(), *self._first_filter()]

    def _name_clashes(self) -> list[Problem]:
        seen: dict[str, int] = {}
        problems = []
        for i, tier in enumerate(self.tiers):
            first = seen.setdefault(tier.name, i)
            if first != i:
                text = f"tiers[{first}] has this name too; give one of them another"
                problems.append(Problem(path=join("tiers", i, "name"), shown=show(tier.name), text=text))
        return problems

    def _first_filter(self) -> list[Problem]:
        if self.tiers[0].admit == "always":
            return []
        text = "has no tier above in which a value could wait for its second use; remove it"
        return [Problem(path=join("tiers", 0, "admit"), shown=show(self.tiers[0].admit), text=text)]

    def _lossy_tiers(self) -> list[Problem]:
        if not self.lossless:
            return []
        problems = []
        for i, tier in enumerate(self.tiers):
            step = tier.lossy_codec
            if step is not None:
                text = "loses precision, which lossless = true rules out; remove one of the two"
                shown = show(tier.codecs[step].name)
                problems.append(Problem(path=join("tiers", i, "codecs", step), shown=shown, text=text))
        return problems
