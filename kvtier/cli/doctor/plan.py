"""What is wrong with a config before anything is opened: order, chains, sizes, names."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from kvtier.cli.doctor.finding import Finding
from kvtier.cli.output import human_bytes
from kvtier.cli.tiers import outlives
from kvtier.config.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.config import StoreConfig, TierConfig

SPEED_ORDER = ("cuda", "pinned-cpu", "local-disk", "redis", "s3")  # the fastest first
_PLACES = {"local-disk": ("path",), "redis": ("url", "prefix"), "s3": ("endpoint", "bucket", "prefix")}


def check_plan(config: StoreConfig, *, chunk_bytes: int | None) -> Iterator[Finding]:
    """Look at the config alone; `chunk_bytes` is one chunk's size, None if the model's layout is not known."""
    yield from _namespace(config)
    yield from _order(config)
    yield from _places(config)
    yield from _chains(config)
    if chunk_bytes is None:
        yield Finding(
            level="note",
            check="chunk-size",
            text="the model's layout is not known here, so sizes were not held against a chunk",
            fix="give --model-config config.json, --model or --token-bytes",
        )
    else:
        yield from _sizes(config, chunk_bytes)


def _namespace(config: StoreConfig) -> Iterator[Finding]:
    lasting = [tier.name for tier in config.tiers if outlives(tier)]
    named = config.namespace
    if named is None:
        yield Finding(
            level="note",
            check="namespace",
            text="no [namespace] in the config: the program that opens it must give one",
        )
    elif lasting and named.revision is None and named.weights is None:
        yield Finding(
            level="problem",
            check="namespace",
            text=f"namespace {named.model!r} has neither revision nor weights: "
            f"{', '.join(lasting)} would mix checkpoints",
            fix='add revision = "..." (the commit) or weights = "..." (a digest) under [namespace]',
        )
    if not lasting:
        yield Finding(
            level="warning",
            check="persistence",
            text="no tier outlives the process: a restart forgets everything",
            fix="add a tier on local-disk, redis or s3",
        )


def _order(config: StoreConfig) -> Iterator[Finding]:
    for upper, lower in pairwise(config.tiers):
        if upper.backend in SPEED_ORDER and lower.backend in SPEED_ORDER:
            swapped = SPEED_ORDER.index(str(upper.backend)) > SPEED_ORDER.index(str(lower.backend))
            if swapped:
                yield Finding(
                    level="problem",
                    check="tier-order",
                    tier=upper.name,
                    text=f"{upper.name} stands above {lower.name}, which is faster: "
                    "every hit would come from the slower one",
                    fix=f"move the [[tiers]] table of {lower.name} above that of {upper.name}",
                )
                continue
        if lower.capacity < upper.capacity and upper.promote != "never":
            yield Finding(
                level="warning",
                check="capacity-order",
                tier=lower.name,
                text=f"{lower.name} ({human_bytes(lower.capacity)}) holds less than {upper.name} above it "
                f"({human_bytes(upper.capacity)}): it adds next to nothing but survival",
                fix=f"give {lower.name} a larger capacity, or {upper.name} a smaller one",
            )


def _places(config: StoreConfig) -> Iterator[Finding]:
    seen: dict[tuple[object, ...], str] = {}
    for tier in config.tiers:
        options = _PLACES.get(str(tier.backend))
        if options is None:
            continue
        first = seen.setdefault((tier.backend, *(tier.options.get(option) for option in options)), tier.name)
        if first != tier.name:
            yield Finding(
                level="problem",
                check="same-place",
                tier=tier.name,
                text=f"{first} and {tier.name} keep their entries in one place",
                fix=f"give one of them another {' or '.join(options)}",
            )


def _chains(config: StoreConfig) -> Iterator[Finding]:
    for tier in config.tiers:
        lossy = tier.lossy_codec
        if lossy is not None:
            yield Finding(
                level="warning",
                check="lossy-chain",
                tier=tier.name,
                text=f"{tier.codecs[lossy].name!r} loses precision: what {tier.name} gives back is not bit-equal",
                fix="fine if that is meant (see the codecs' table of quality); else take 'zstd' or 'bf16-split', "
                "and set lossless = true",
            )
    for upper, lower in pairwise(config.tiers):
        above, below = _names(upper), _names(lower)
        if below[: len(above)] != above:
            yield Finding(
                level="warning",
                check="codec-ladder",
                tier=lower.name,
                text=f"the codecs {below} of {lower.name} do not begin with {above} of {upper.name}: "
                "each move between them decodes and encodes anew",
                fix=f"begin the codecs of {lower.name} with {above}",
            )


def _names(tier: TierConfig) -> list[str]:
    return [codec.name for codec in tier.codecs if codec.name != "raw"]


def _sizes(config: StoreConfig, chunk: int) -> Iterator[Finding]:
    limits = [
        (tier.name, option, size)
        for tier in config.tiers
        for option, size in (
            ("capacity", tier.capacity),
            ("max_value_bytes", tier.max_value_bytes),
            ("max_in_flight_bytes", tier.max_in_flight_bytes),
            ("write_queue_bytes", tier.write_queue_bytes),
        )
    ]
    small = [
        Finding(
            level="problem",
            check="smaller-than-a-chunk",
            tier=name,
            text=f"{option} = {format_size(size)!r} is less than one chunk of {config.chunk_tokens} tokens "
            f"({human_bytes(chunk)})",
            fix=f"write {option} = {format_size(chunk)!r} or more for {name}, or a smaller chunk_tokens",
        )
        for name, option, size in limits
        if size < chunk
    ]
    memory = config.memory
    for option, given in (("staging_bytes", memory.staging_bytes), ("results_bytes", memory.results_bytes)):
        if given is not None and given < chunk:
            small.append(
                Finding(
                    level="problem",
                    check="arena-smaller-than-a-chunk",
                    text=f"memory.{option} = {format_size(given)!r} is less than one chunk ({human_bytes(chunk)}): "
                    "no value could pass",
                    fix=f"write {option} = {format_size(8 * chunk)!r} under [memory], or leave it out",
                )
            )
    yield from small
    if not small:
        yield Finding(level="ok", check="chunk-size", text=f"every limit has room for a chunk of {human_bytes(chunk)}")
