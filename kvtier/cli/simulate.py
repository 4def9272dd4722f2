"""`kvtier simulate`: a request trace through the store's policies, over one tier or the tiers of a config file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.output import human_bytes, print_json, print_table, progress
from kvtier.cli.sizes import size_in
from kvtier.errors import InvalidValueError
from kvtier.planner import Link
from kvtier.sim.study import Setting, SimulatedTier, Study
from kvtier.sim.timing import LINKS, OTHER_LINK
from kvtier.sim.traces import read_trace
from kvtier.sim.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.sim.trace import Trace

_KV_BYTES = "128KiB"  # of a token: 32 layers x 8 KV heads x 128 x 2 x 16 bit


def simulate(
    trace: Annotated[str, typer.Argument(help=f"a .jsonl or .jsonl.zst file, or one of: {', '.join(WORKLOADS)}")],
    policy: Annotated[str, typer.Option(help="policies, comma-separated")] = "lru",
    capacity_blocks: Annotated[str, typer.Option(help="capacities in blocks, comma-separated")] = "10000",
    config: Annotated[Path | None, typer.Option(help="take the tiers from this store config instead")] = None,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="tokens in a block, if not 512")] = None,
    bytes_per_token: Annotated[str, typer.Option(help="KV bytes of one token (see `kvtier size`)")] = _KV_BYTES,
    tokens_per_second: Annotated[
        float, typer.Option(min=0.001, help="speed of the prefill, for the modelled TTFT")
    ] = 10_000.0,
    link: Annotated[list[str] | None, typer.Option(help="a tier's speed, as NAME=BYTES_PER_SECOND")] = None,
    full_blocks: Annotated[
        bool, typer.Option("--full-blocks", help="store full blocks only, as the store does")
    ] = False,
    hints: Annotated[bool, typer.Option("--hints", help="end sessions where the trace says so")] = False,
    optimum: Annotated[bool, typer.Option(help="work out the exact optimum too")] = True,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    report: Annotated[Path | None, typer.Option(help="write a report with plots: .html or .png")] = None,
) -> None:
    """Replay a request trace and tell hit rates, bytes moved and modelled time to first token."""
    replayed = _trace(trace, block_tokens)
    block_bytes = size_in("--bytes-per-token", bytes_per_token) * replayed.block_tokens
    setting = Setting(
        block_bytes=block_bytes,
        tokens_per_second=tokens_per_second,
        full_blocks=full_blocks,
        hints=hints,
        optimum=optimum,
    )
    links = _links(link or [])
    if config is not None:
        runs = [_configured(config, links)]
    else:
        runs = [
            [SimulatedTier.of(name, capacity=blocks * block_bytes, link=links.get("tier", OTHER_LINK))]
            for name in _words(policy)
            for blocks in _counts(capacity_blocks)
        ]
    study = Study(replayed, setting)
    results = []
    total = len(replayed.requests)
    with progress("replaying", total * len(runs), shown=not json) as tell:
        for number, tiers in enumerate(runs):
            results.append(study.run(tiers, on_progress=partial(_tell, tell, number * total)))
    document = {"trace": study.describe(), "results": results}
    if report is not None:
        from kvtier.cli.plots import write_report

        write_report(report, document)
    if json:
        print_json(document | dict(results[0]) if len(results) == 1 else document)
    else:
        _show(document["trace"], results)


def _tell(tell: Callable[[int], None], before: int, done: int) -> None:
    tell(before + done)


def _trace(name: str, block_tokens: int | None) -> Trace:
    if name in WORKLOADS:
        return WORKLOADS[name]()
    path = Path(name)
    if not path.is_file():
        raise InvalidValueError(f"trace {name!r}: no such file; the workloads made here are {', '.join(WORKLOADS)}")
    return read_trace(path, block_tokens=block_tokens)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _counts(text: str) -> list[int]:
    counts = []
    for word in _words(text):
        if not word.isdecimal() or not int(word):
            raise InvalidValueError(f"--capacity-blocks {word!r}: write numbers of blocks, such as 1000,10000")
        counts.append(int(word))
    return counts


def _links(given: Sequence[str]) -> Mapping[str, Link]:
    links = dict(LINKS)
    for item in given:
        name, _, speed = item.partition("=")
        if not speed:
            raise InvalidValueError(f"--link {item!r}: write NAME=BYTES_PER_SECOND, such as local-disk=5GB")
        before = links.get(name, OTHER_LINK)
        links[name] = Link(latency_seconds=before.latency_seconds, bytes_per_second=float(size_in("--link", speed)))
    return links


def _configured(path: Path, links: Mapping[str, Link]) -> list[SimulatedTier]:
    from kvtier.config import load_config
    from kvtier.tier.settings import TierSettings

    return [
        SimulatedTier(
            settings=TierSettings(
                name=tier.name, capacity=tier.capacity, write=tier.write, promote=tier.promote, admit=tier.admit
            ),
            policy=tier.policy.name,
            make_policy=tier.policy.build,
            link=links.get(tier.name) or links.get(str(tier.backend), OTHER_LINK),
        )
        for tier in load_config(path).tiers
    ]


def _show(trace: object, results: Sequence[Mapping[str, object]]) -> None:
    about = trace if isinstance(trace, dict) else {}
    rows = []
    for result in results:
        times, tiers = result["ttft_seconds"], result["tiers"]
        assert isinstance(times, dict)  # noqa: S101  # made by Study.run
        assert isinstance(tiers, list)  # noqa: S101
        rows.append(
            [
                str(result["policy"]),
                f"{result['capacity_blocks']:,}",
                f"{result['hit_rate']:.4f}",
                f"{result['share_of_optimum']:.1%}" if "share_of_optimum" in result else "-",
                human_bytes(sum(tier["written_bytes"] for tier in tiers)),
                human_bytes(sum(tier["read_bytes"] for tier in tiers)),
                f"{times['mean']:.3f}",
                f"{times['p99']:.3f}",
            ]
        )
    columns = ["policy", "blocks", "hit\nrate", "of\noptimum", "written", "read", "TTFT s\nmean", "TTFT s\np99"]
    title = (
        f"{about.get('name')}: {about.get('requests'):,} requests, {about.get('blocks'):,} blocks, "
        f"{about.get('distinct_blocks'):,} distinct; endless cache {about.get('endless_hit_rate'):.4f}"
    )
    print_table(title, columns, rows)
    for result in results:
        tiers = result["tiers"]
        if isinstance(tiers, list) and len(tiers) > 1:
            print("hit rate by tier:", ", ".join(f"{tier['name']} {tier['hit_rate']:.4f}" for tier in tiers))
