"""From a config to a store: what `kvtier.open` and `kvtier.open_chunks` do before anything is entered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier import registry
from kvtier.backends.base import SlotBackend
from kvtier.buffers.memory import PAGE
from kvtier.codecs.chain import CodecChain
from kvtier.config import format_size, load_config, reconcile
from kvtier.errors import ConfigError
from kvtier.store.arguments import check_namespace_kind
from kvtier.store.chunks import ChunkFace
from kvtier.store.engine import Engine
from kvtier.store.faces import check_layout, check_namespace, largest_object
from kvtier.store.kv import KVStore
from kvtier.store.settings import EngineSettings, TierParts
from kvtier.tier.settings import TierSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvtier.backends.base import Traits
    from kvtier.chunk.layout import KVLayout
    from kvtier.config import StoreConfig, TierConfig
    from kvtier.events import Observer
    from kvtier.keys import Namespace

    AnyConfig = str | Path | Mapping[str, object] | StoreConfig | None

LEAST_STAGING = 64 << 20
CHUNKS_IN_FLIGHT = 8  # of the largest kind that staging has room for


def open_store(
    config: AnyConfig = None,
    *,
    layout: KVLayout | None = None,
    namespace: Namespace | None = None,
    observer: Observer | None = None,
    strict: bool | None = None,
    lossless: bool | None = None,
) -> KVStore:
    """Return a store for one model's KV; nothing is opened before it is entered with `async with`.

    Args:
        config: path of a TOML or YAML file, a mapping, a `StoreConfig`; None for memory and disk in the user's cache.
        layout: what the model's KV looks like.
        namespace: which model it is; may stand in the config instead.
        observer: told of every event.
        strict: storage faults raise instead of being misses.
        lossless: refuse lossy codecs and never serve lossy entries.

    Raises:
        ConfigError: anything wrong, with the option's name and the way out.
    """
    checked = load_config(config)
    if layout is None:
        raise ConfigError("layout is missing; give kvtier.open(..., layout=KVLayout.from_config(model.config))")
    check_layout(layout)
    chosen = _namespace(checked, namespace)
    check_namespace(chosen, outliving=[tier.name for tier in checked.tiers if _outlives(tier)])
    chunk = largest_object(layout, checked.chunk_tokens)
    checked.check_chunk_bytes(chunk)
    engine = _engine(checked, observer=observer, strict=strict, lossless=lossless, chunk_bytes=chunk)
    store = KVStore(engine, namespace=chosen, layout=layout, chunk_tokens=checked.chunk_tokens)
    store.prefill = checked.planner.prefill()
    return store


def open_chunks(
    config: AnyConfig = None,
    *,
    observer: Observer | None = None,
    strict: bool | None = None,
    lossless: bool | None = None,
) -> ChunkFace:
    """Return the key level alone: any blob under any key, on the same tiers. Needs no namespace and no layout.

    Raises:
        ConfigError: as `open_store`.
    """
    checked = load_config(config)
    return ChunkFace(_engine(checked, observer=observer, strict=strict, lossless=lossless, chunk_bytes=0))


def _namespace(config: StoreConfig, argument: Namespace | None) -> Namespace:
    if argument is not None:
        check_namespace_kind(argument)
    configured = config.namespace.build() if config.namespace is not None else None
    chosen = reconcile("namespace", argument, configured)
    if chosen is None:
        raise ConfigError(
            "namespace is missing: KV of two models must never share keys; give namespace=Namespace.from_model(model), "
            'or [namespace] model = "org/name" and revision = "..." in the config'
        )
    return chosen


def _outlives(tier: TierConfig) -> bool:
    """Tell whether entries outlive the process; so does a backend whose traits depend on its options."""
    backend = tier.backend
    kind = registry.backends.load(backend) if isinstance(backend, str) else backend
    traits: Traits | None = getattr(kind, "traits", None)
    return traits is None or traits.persistent or traits.shared


def _engine(
    config: StoreConfig, *, observer: Observer | None, strict: bool | None, lossless: bool | None, chunk_bytes: int
) -> Engine:
    if observer is not None and not callable(getattr(observer, "on_event", None)):
        raise ConfigError(f"observer is a {type(observer).__name__} without a method on_event(event)")
    lossless = _flag("lossless", argument=lossless, configured=config.lossless)
    parts = [_tier_parts(config, tier) for tier in config.tiers]
    if lossless:
        _refuse_lossy(parts)
    _check_staging(config, on_top=isinstance(parts[0].backend, SlotBackend), chunk_bytes=chunk_bytes)
    settings = EngineSettings(
        deadline_seconds=config.deadline_seconds,
        close_seconds=config.close_seconds,
        coherence_seconds=config.coherence_seconds,
        strict=_flag("strict", argument=strict, configured=config.strict),
        lossless=lossless,
        staging_bytes=config.memory.staging_bytes or max(LEAST_STAGING, CHUNKS_IN_FLIGHT * chunk_bytes),
        result_bytes=config.memory.results_bytes,
        lease_share=config.memory.lease_share,
        huge_pages=config.memory.huge_pages,
        lock_memory=config.memory.lock,
        numa_node=config.memory.numa_node,
        lease_seconds=config.memory.lease_seconds,
        copy_threads=config.threads or 4,
        codecs={name: registry.codecs.load(name) for name in _codec_names(config)},
        links=config.planner.links(),
    )
    return Engine(settings, parts, observer=observer)


def _check_staging(config: StoreConfig, *, on_top: bool, chunk_bytes: int) -> None:
    """Refuse memory for values on their way that not even one chunk fits; without a memory tier on top, half of it."""
    given = config.memory.staging_bytes
    chunk = -(-max(chunk_bytes, 1) // PAGE) * PAGE
    least = chunk if on_top else 2 * chunk
    if given is not None and given < least:
        raise ConfigError(
            f"memory.staging_bytes = {format_size(given)!r}: has no room for one chunk on its way; write at least "
            f"{format_size(least)}, or leave it out"
        )


def _codec_names(config: StoreConfig) -> set[str]:
    """Return the codecs that entries may name: the built-ins, and what the config uses."""
    return {"raw", "zstd"} | {codec.name for tier in config.tiers for codec in tier.codecs}


def _flag(name: str, *, argument: bool | None, configured: bool) -> bool:
    """Return an argument, or the config's flag when it is not given; a flag that the config sets cannot be unset.

    Raises:
        ConfigError: the argument says False, the config True.
    """
    if argument is not None and not isinstance(argument, bool):
        raise ConfigError(f"{name}={argument!r}: must be True or False")
    if argument is False and configured:
        raise ConfigError(f"{name}: the argument says False, the config says True; give one of them")
    return bool(argument) or configured


def _refuse_lossy(parts: list[TierParts]) -> None:
    for part in parts:
        if part.chain.lossy:
            raise ConfigError(f"tier {part.settings.name!r} has the lossy chain {part.chain!r}, but lossless = true")


def _tier_parts(config: StoreConfig, tier: TierConfig) -> TierParts:
    settings = TierSettings(
        name=tier.name,
        capacity=tier.capacity,
        write=tier.write,
        promote=tier.promote,
        admit=tier.admit,
        required=tier.required,
        on_full=tier.on_full,
        ttl_seconds=tier.ttl_seconds,
        deadline_seconds=tier.deadline_seconds or config.deadline_seconds,
        max_in_flight_bytes=tier.max_in_flight_bytes,
        max_in_flight=tier.max_in_flight,
        write_queue_bytes=tier.write_queue_bytes,
        writers=tier.writers,
        threads=tier.threads,
        negative_seconds=tier.negative_seconds,
        max_value_bytes=tier.max_value_bytes,
        warm_bytes=tier.warm or 0,
        pin_fraction=tier.pin_fraction,
        shares=config.shares,
    )
    chain = CodecChain([codec.build() for codec in tier.codecs])
    return TierParts(settings=settings, backend=tier.build_backend(), policy=tier.policy.build(), chain=chain)
