"""`kvtier bench`: how fast the tiers of a config take and give KV."""

from __future__ import annotations

import asyncio
import signal
import statistics
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.output import human_bytes, print_json, print_table, progress
from kvtier.cli.sizes import size_in
from kvtier.cli.tiers import ConfigOption, DeadlineOption, JsonOption, find_tier, read_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.cli.measuring import Measured, Measurement
    from kvtier.config import TierConfig

TOTAL = "256MiB"
INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def bench(
    config: ConfigOption = None,
    tier: Annotated[list[str] | None, typer.Option("--tier", "-t", help="measure this tier; may be repeated")] = None,
    model: Annotated[str, typer.Option(help="a known shape, see `kvtier size --help`")] = "llama-3.1-8b",
    model_config: Annotated[Path | None, typer.Option(help="the model's Hugging Face config.json instead")] = None,
    total: Annotated[str, typer.Option(help="KV to put into each tier, in all")] = TOTAL,
    in_flight: Annotated[int, typer.Option(min=1, help="chunks moved at once for the throughput")] = 4,
    json: JsonOption = False,
    deadline_seconds: DeadlineOption = 60.0,
) -> None:
    """Put and get KV through each tier alone, tell bytes per second and times, and remove it again."""
    from kvtier.cli.measuring import Measurement
    from kvtier.sim.shapes import shape_in, shape_of

    store = read_config(config)
    tiers = store.tiers if not tier else tuple(find_tier(store, name) for name in tier)
    layout = shape_of(model) if model_config is None else shape_in(model_config)
    measurement = Measurement(
        store, layout, total_bytes=size_in("--total", total), in_flight=in_flight, seconds=deadline_seconds
    )
    with progress("measuring", measurement.steps * len(tiers), shown=not json) as tell:
        found = asyncio.run(_measured(measurement, tiers, tell))
    about = {
        "model": str(model_config) if model_config is not None else model,
        "chunk_tokens": store.chunk_tokens,
        "chunk_bytes": measurement.chunk_bytes,
        "in_flight": in_flight,
    }
    if json:
        print_json({**about, "tiers": [each.plain() for each in found]})
    else:
        _show(about, found)
    if len(found) < len(tiers):
        typer.echo("kvtier: interrupted; what was put is removed", err=True)
        raise typer.Exit(INTERRUPTED)
    if any(each.problem for each in found):
        raise typer.Exit(1)


async def _measured(measurement: Measurement, tiers: Sequence[TierConfig], tell: Callable[..., None]) -> list[Measured]:
    """Measure tier after tier; Ctrl-C and SIGTERM end it after what was put is removed, with the tiers done by then."""
    found: list[Measured] = []
    loop, done = asyncio.get_running_loop(), 0
    task = asyncio.current_task()
    assert task is not None  # noqa: S101  # this is a coroutine
    with suppress(ValueError, RuntimeError):  # in another thread than the main one signals are somebody else's
        loop.add_signal_handler(signal.SIGTERM, task.cancel)

    def step() -> None:
        nonlocal done
        done += 1
        tell(done)

    try:
        for tier in tiers:
            found.append(await measurement.of(tier, step))  # noqa: PERF401  # what is done by an interruption counts
    except asyncio.CancelledError:
        return found
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    return found


def _show(about: dict[str, object], found: Sequence[Measured]) -> None:
    rows = [
        [
            each.tier,
            _speed(each.put_bytes_per_second),
            _speed(each.get_bytes_per_second),
            _times(each.put_seconds),
            _times(each.get_seconds),
            f"{each.stored_ratio:.3f}" if each.chunks else "-",
        ]
        for each in found
    ]
    title = (
        f"{about['model']}, chunks of {about['chunk_tokens']} tokens, {human_bytes(float(str(about['chunk_bytes'])))}"
    )
    print_table(title, ["tier", "put/s", "get/s", "put ms", "get ms", "stored"], rows)
    print(f"put/s and get/s with {about['in_flight']} chunks under way; ms for one alone: median, slowest")
    for each in found:
        if each.problem:
            print(f"{each.tier}: {each.problem}")


def _speed(bytes_per_second: float) -> str:
    return human_bytes(bytes_per_second) if bytes_per_second else "-"


def _times(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return ", ".join(
        f"{each * 1e3:{'.3g' if each < 1 else ',.0f'}}" for each in (statistics.median(seconds), max(seconds))
    )
