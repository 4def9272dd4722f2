"""The rows of docs/alternatives.md that this project measured itself, from the results that are committed."""

from __future__ import annotations

from typing import Any

MODES = {
    "recompute": "computes every prompt",
    "blocks only": "has the engine's own blocks alone",
    "tiered": "has host memory and a disk below them",
    "disaggregated": "gets prompts that another worker computed",
}
PEERS = {  # result file and what is compared in it: our columns, then LMCache's
    "disk, direct": ("disk_lmcache", "kvtier", "LMCache, O_DIRECT"),
    "disk, page cache": ("disk_lmcache", "kvtier, buffered", "LMCache"),
    "Valkey, its client in C++": ("redis_lmcache", "kvtier", "LMCache resp"),
    "Valkey, its redis-py connector": ("redis_lmcache", "kvtier", "LMCache redis"),
}
COLUMNS = {"put": " put", "get in place": (" lease", " get"), "get and copy": (" get", " get, copied")}


def own_figures(found: dict[str, Any]) -> str:
    """Return the tables for the results that are there."""
    return "\n\n".join("\n".join(rows) for rows in (_serving(found), _peers(found)) if rows)


def _serving(found: dict[str, Any]) -> list[str]:
    result = found.get("serving", {})
    modes = result.get("modes", {})
    if not set(MODES) <= set(modes):
        return []
    rows = [
        f"Conversations on {result['model']} with too few blocks:",
        "",
        "| the engine | first token, p50 | p99 | tokens/s | prefill saved |",
        "|---|---|---|---|---|",
    ]
    for name, what in MODES.items():
        mode = modes[name]
        rows.append(
            f"| {what} | {mode['ttft_p50_seconds']:.2f} s | {mode['ttft_p99_seconds']:.2f} s "
            f"| {mode['tokens_per_second']:.1f} | {mode['prefill_tokens_saved']:.0%} |"
        )
    return rows


def _peers(found: dict[str, Any]) -> list[str]:
    rows = []
    for where, (name, ours, theirs) in PEERS.items():
        result = found.get(name)
        if result is None:
            continue
        seconds = {figure["name"]: figure["seconds"] for figure in result["figures"]}
        cells = []
        for column in COLUMNS.values():
            mine, other = (column, column) if isinstance(column, str) else column
            cells.append(f"{seconds[ours + mine] * 1e3:.0f} / {seconds[theirs + other] * 1e3:.0f} ms")
        given = result["a flipped bit"]
        cells.append(f"{given[ours]} / {given[theirs]}")
        rows.append(f"| {where} | " + " | ".join(cells) + " |")
    if not rows:
        return []
    return [
        "kvtier / LMCache 0.5.6 in the same rounds, chunks of 32 MiB, all of a round in one call:",
        "",
        f"| | {' | '.join(COLUMNS)} | one stored bit flipped |",
        "|---|---|---|---|---|",
        *rows,
    ]
