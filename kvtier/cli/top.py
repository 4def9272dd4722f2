"""`kvtier top`: a running store at a glance, tier by tier, from the metrics that it shows."""

from __future__ import annotations

import json as json_text
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.output import human_bytes
from kvtier.cli.scrape import Sample, parse, read_source, view
from kvtier.cli.tiers import JsonOption
from kvtier.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from kvtier.cli.scrape import TierView, View

ANSWER_SECONDS = 5.0


def top(
    source: Annotated[
        str, typer.Argument(envvar="KVTIER_METRICS", help="the metrics endpoint's address, or a file with a scrape")
    ] = "http://127.0.0.1:9400/metrics",
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="look once and end")] = False,
    json: JsonOption = False,
    deadline_seconds: Annotated[float, typer.Option(min=0.001, help="for one look")] = ANSWER_SECONDS,
) -> None:
    """Show tiers up and down, hit rates, bytes moved, damage, tokens saved and TTFT; Ctrl-C ends it."""
    if once:
        _print(view(parse(read_source(source, seconds=deadline_seconds), when=time.monotonic()), None), json=json)
        return
    with suppress(KeyboardInterrupt):
        _watch(source, _looks(source, interval, deadline_seconds), json=json)


def _watch(source: str, looks: Iterator[tuple[View | None, str]], *, json: bool) -> None:
    if json:
        for shown, away in looks:
            line = {"away": away} if shown is None else asdict(shown)
            print(json_text.dumps({"time": time.time(), **line}), flush=True)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        last: View | None = None
        for shown, away in looks:
            last = last if shown is None else shown
            live.update(_page(source, last, away), refresh=True)


def _looks(source: str, interval: float, seconds: float) -> Iterator[tuple[View | None, str]]:
    """Yield what each look shows, or None and why there is nothing to see; a server may go and come back."""
    before: Sample | None = None
    while True:
        began = time.monotonic()
        try:
            now = parse(read_source(source, seconds=seconds), when=began)
        except BackendUnavailableError as exc:
            before = None
            yield None, str(exc)
        else:
            yield view(now, before), ""
            before = now
        time.sleep(max(0.0, interval - (time.monotonic() - began)))


def _print(shown: View, *, json: bool) -> None:
    if json:
        print(json_text.dumps(asdict(shown), indent=2))
        return
    from rich.console import Console

    Console().print(_page("", shown, ""))


def _page(source: str, shown: View | None, away: str) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if source:
        parts.append(Text(f"kvtier top   {source}   {time.strftime('%H:%M:%S')}", overflow="ellipsis", no_wrap=True))
    if away:
        parts.append(Text(f"AWAY: {away}", style="bold red"))
    if shown is not None:
        parts += [Text(line) for line in _summary(shown)]
        parts.append(_table(shown.tiers))
        parts += [Text(line, style="yellow") for line in _remarks(shown)]
    return Group(*parts)


def _summary(shown: View) -> list[str]:
    parts = [f"memory {human_bytes(shown.memory_bytes)}", f"corrupt {shown.corrupt:,}"]
    if shown.tokens_loaded is not None and shown.tokens_computed is not None:
        whole = shown.tokens_loaded + shown.tokens_computed
        share = shown.tokens_loaded / whole if whole else 0.0
        parts.append(f"tokens saved {shown.tokens_loaded:,} of {whole:,} ({share:.0%})")
    lines = ["; ".join(parts)]
    if shown.requests is not None:
        times = [shown.first_token_p50_seconds, shown.first_token_p99_seconds]
        lines.append(f"TTFT p50 {_seconds(times[0])}, p99 {_seconds(times[1])}; {shown.requests:,} requests")
    wear = [(tier.name, tier.written_bytes_per_hit) for tier in shown.tiers if tier.written_bytes_per_hit is not None]
    if wear:
        lines.append("written per hit: " + ", ".join(f"{name} {_bytes(size)}" for name, size in wear))
    return lines


def _table(tiers: list[TierView]) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tier", no_wrap=True, overflow="ellipsis", max_width=14)
    table.add_column("state", no_wrap=True)
    for heading in ("used", "full", "hits", "rate", "read/s", "write/s", "p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for tier in tiers:
        state = "up" if tier.up else "DOWN"
        table.add_row(
            tier.name,
            f"[green]{state}[/green]" if tier.up and tier.breaker == "closed" else f"[bold red]{state}[/bold red]",
            _bytes(tier.bytes),
            f"{tier.bytes / tier.capacity:.0%}" if tier.capacity else "-",
            _count(tier.hits),
            "-" if tier.hit_rate is None else f"{tier.hit_rate:.0%}",
            _speed(tier.read_bytes_per_second),
            _speed(tier.written_bytes_per_second),
            _seconds(tier.read_p99_seconds),
        )
    return table


def _remarks(shown: View) -> list[str]:
    """Return a line for each tier that is not as it should be."""
    lines = []
    for tier in shown.tiers:
        marks = {
            "corrupt": tier.corrupt,
            "errors": tier.errors,
            "writes dropped": tier.dropped,
            "evicted": tier.evicted,
        }
        told = [f"{what} {count:,}" for what, count in marks.items() if count]
        if tier.breaker != "closed":
            told.insert(0, f"breaker {tier.breaker}")
        if told:
            lines.append(f"{tier.name}: {', '.join(told)}")
    return lines


def _speed(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else _bytes(bytes_per_second)


def _bytes(size: float) -> str:
    return human_bytes(float(f"{size:.3g}"))


def _count(number: int) -> str:
    """Return a count in at most six characters."""
    return f"{number:,}" if number < 100_000 else human_bytes(float(f"{number:.3g}")).removesuffix("B").strip()  # noqa: PLR2004


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
