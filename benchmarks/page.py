"""Writes the tables of the docs from the results that are committed: `python -m benchmarks.page`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.matrix import own_figures

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
TITLES = {
    "ttft": ("Time to first token", "SmolLM2-135M on the CPU: computing a prompt's KV against loading it."),
    "store": ("Host memory", "One `put` and `get` of a prompt, beside one memcpy of the same bytes."),
    "dram": ("Copies alone", "The copies in and out of the arena, without the store around them."),
    "disk": ("Disk", "Reads and writes of entries, beside fio and plain threads that move the same bytes."),
    "disk_cold": ("Disk, cold", "Reads of entries that no cache holds, beside plain threads on the same files."),
    "disk_warm": ("Disk, warm", "The same from the page cache; plain threads that take a checksum are the bound."),
    "disk_write": ("Disk, writes", "Entries published and synced; plain threads that sync as much are the bound."),
    "disk_lmcache": (
        "LMCache's disk backend",
        "Puts and gets of 32 MiB, unsynced and from the page cache; its get is held against a lease.",
    ),
    "io_uring": ("io_uring", "Direct reads by one thread with a ring, beside four threads."),
    "redis_lmcache": (
        "LMCache's Redis connectors",
        "Puts and gets of 32 MiB through both stores on one Valkey, beside a raw stream over the same loopback socket.",
    ),
    "redis": ("Redis and Valkey", "Beside a raw stream over the same loopback socket, and redis-py's asyncio client."),
    "s3_nginx": (
        "S3 on nginx in memory",
        "Beside one `curl --parallel` with keep-alive, and aioboto3 with its defaults.",
    ),
    "s3_seaweed": ("S3 on SeaweedFS", "The same on a real object store, which takes its share of the two processors."),
    "paged": ("Blocks of an engine", "Chunks gathered from and scattered to blocks, beside memcpy."),
    "layerwise": ("Layer by layer", "Loading and saving layers while the model computes others."),
    "serving": (
        "Conversations with too few blocks",
        "Time to the first token in four modes; see `benchmarks/serving.py`.",
    ),
    "policies": (
        "Policies at a million entries",
        "An operation over a whole turnover; 1 is the bound: 3 us, of `arc`, `gdsf` and `adaptive` 10 us.",
    ),
    "planner": (
        "Load or recompute",
        "A real model's prefill, and a link at a tenth of the speed that would break even.",
    ),
    "blocking": ("From threads", "What `open_blocking` adds to a call."),
    "threads": ("Thread hops", "The store's own threads beside asyncio's."),
    "arena": ("Slots", "Taking and returning a slot of the arena."),
}


def results(folder: Path = RESULTS) -> dict[str, Any]:
    """Return every result in a folder, by its file's name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}


def tables(folder: Path = RESULTS) -> str:
    """Return one section per benchmark that has results with figures."""
    parts = []
    found = results(folder)
    for name, result in sorted(found.items(), key=lambda item: _rank(item[0])):
        if result.get("figures"):
            parts.append(_section(name, result))
    rows = _limits(found)
    if rows:
        parts.append(
            "\n".join(
                ["### Times and sizes with a limit", "", "| | measured | at most | |", "|---|---|---|---|", *rows]
            )
        )
    return "\n\n".join(parts)


def _limits(found: dict[str, Any]) -> list[str]:
    """Return a row for each result that is no ratio: its limit is a time or a size."""
    figures = {figure["name"]: figure for figure in found.get("store", {}).get("figures", [])}
    named = ("exists of 512 chunks", "lease of 128 chunks")
    rows = [_limit(name, figures[name]["seconds"], 1e-3) for name in named if name in figures]
    for shape, p99 in found.get("store", {}).get("beside_background", {}).items():
        rows.append(_limit(f"p99 of a get beside background work ({shape})", p99["loaded p99 s"], p99["allowed s"]))
    restart = found.get("disk_restart", {})
    opens = restart.get("rounds", {}).get("open", [])
    if opens:
        for key, what, most in (
            ("first_get", "open to the first verified get", 2),
            ("list", "list", 15),
            ("lag", "lag", 0.1),
        ):
            name = f"100,000 entries on disk, caches {'dropped' if restart['caches_dropped'] else 'kept'}: {what}"
            rows.append(_limit(name, median(one[key] for one in opens), most))
    if "weight" in restart:
        each = restart["weight"]["bytes_per_entry"]
        rows.append(
            f"| index of a disk tier, per entry | {each:.0f} B | 500 B | {'met' if each <= 500 else 'missed'} |"
        )
    for name, what in (("loop_lag", "memory and disk with zstd"), ("loop_lag_disk", "a disk alone")):
        allowed = found.get(name, {}).get("allowed", {})
        for quantile, most in allowed.items():
            rows.append(
                _limit(f"the loop's lag, {quantile}, {what}", found[name]["lag_seconds"]["store"][quantile], most)
            )
    return rows


def _limit(what: str, seconds: float, most: float) -> str:
    return f"| {what} | {_time(seconds)} | {_time(most)} | {'met' if seconds <= most else 'missed'} |"


def _time(seconds: float) -> str:
    if seconds < 1e-4:
        return f"{seconds * 1e6:.2f} us"
    return f"{seconds:.2f} s" if seconds >= 0.5 else f"{seconds * 1e3:.3g} ms"


def _rank(name: str) -> tuple[int, str]:
    order = list(TITLES)
    return (order.index(name) if name in order else len(order), name)


def _section(name: str, result: dict[str, object]) -> str:
    title, what = TITLES.get(name, (name.replace("_", " ").capitalize(), ""))
    figures = result["figures"]
    assert isinstance(figures, list)  # noqa: S101  # a result file that this harness wrote
    rows = ["| | GB/s or time | ratio | lower quartile | goal | |", "|---|---|---|---|---|---|"]
    rows += [_row(figure) for figure in figures]
    modes = result.get("modes")
    more = _modes(modes) if isinstance(modes, dict) else []
    if "right" in result:
        more = _choices(result)
    if "a flipped bit" in result:
        more = _flipped(result)
    if "bytes_per_entry" in result:
        more = _entries(result)
    return "\n".join([f"### {title}", "", *([what, ""] if what else []), *rows, "", *more, _made(result)])


def _modes(modes: dict[str, dict[str, float]]) -> list[str]:
    """Return what serving came to, mode by mode."""
    rows = [
        "| | first token, p50 | p99 | p50 of later turns | tokens/s | prefill saved |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in modes.items():
        if "later_turns_ttft_p50_seconds" not in row:
            return []
        firsts = [row[f"{key}_seconds"] for key in ("ttft_p50", "ttft_p99", "later_turns_ttft_p50")]
        cells = [f"{seconds:.2f} s" for seconds in firsts]
        cells += [f"{row['tokens_per_second']:.1f}", f"{row['prefill_tokens_saved']:.0%}"]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*rows, ""]


def _flipped(result: dict[str, Any]) -> list[str]:
    """Return how the peers compare, and what each gave for a value of which a bit was flipped where it is stored."""
    times = ", ".join(f"{name} {ratio:.2f}" for name, ratio in result["times as fast"].items())
    given = ", ".join(f"{name}: {what}" for name, what in result["a flipped bit"].items())
    return [
        f"kvtier is as many times as fast as: {times}.",
        "",
        f"With one stored bit flipped, a get gives: {given}.",
        "",
    ]


def _entries(result: dict[str, Any]) -> list[str]:
    """Return what an entry of each policy takes."""
    each = ", ".join(f"{name} {size}" for name, size in result["bytes_per_entry"].items())
    return [f"Bytes per entry, its key of 67 characters included: {each}.", ""]


def _choices(result: dict[str, Any]) -> list[str]:
    """Return how often the planner was right, and what asking it cost."""
    rows = ["| speed of the link, 1 breaks even | asked / always computed, TTFT |", "|---|---|"]
    rows += [f"| {speed} | {ratio:.2f} |" for speed, ratio in result["asked_to_recompute"].items()]
    told = (
        f"Right in {result['right']:.1%} of the {result['outside_the_band']} trials outside the 10 % around break-even"
    )
    return [*rows, "", f"{told} (goal: 95 %).", ""]


def _row(figure: dict[str, float | str | None]) -> str:
    speed, goal = figure["gigabytes_per_second"], figure["goal"]
    ratio, lower = float(figure["ratio"] or 0), float(figure["ratio_lower_quartile"] or 0)
    met = "" if goal is None else "met" if ratio >= float(goal) and lower >= 0.9 * float(goal) else "missed"
    cells = [
        figure["name"],
        _time(float(figure.get("seconds") or 0)) if speed is None else f"{float(speed):.2f}",
        f"{ratio:.2f}",
        f"{lower:.2f}",
    ]
    return "| " + " | ".join(map(str, [*cells, "-" if goal is None else f"{float(goal):.2f}", met])) + " |"


def _made(result: dict[str, object]) -> str:
    machine = result["machine"]
    assert isinstance(machine, dict)  # noqa: S101
    flags = result.get("flags")
    said = (
        [_flag(key, value) for key, value in flags.items() if value and key != "folder"]
        if isinstance(flags, dict)
        else []
    )
    module = re.sub("^s3_.*", "s3", re.sub("^disk_(cold|warm|write)$", "disk", str(result["benchmark"])))
    command = " ".join([f"python -m benchmarks.{module}", *said])
    return (
        f"{str(result.get('made', ''))[:10]}, commit {result.get('commit', 'unknown')}, {machine['cpu']}, "
        f"{machine['cores']} cores, load {machine['load_1min']} before; `{command}`"
    )


def _flag(key: str, value: object) -> str:
    name = f"--{key.replace('_', '-')}"
    return name if value is True else f"{name} {value}"


def write(page: Path, content: str) -> None:
    """Put the content between a page's marks."""
    text = page.read_text(encoding="utf-8")
    between = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    new = between.sub(lambda _: f"{BEGIN}\n\n{content}\n\n{END}", text)
    if new != text:
        page.write_text(new, encoding="utf-8")


def main() -> None:
    """Write both pages."""
    write(DOCS / "benchmarks.md", tables())
    write(DOCS / "alternatives.md", own_figures(results()))


if __name__ == "__main__":
    main()
