"""The demo's results as a table, as bars in the terminal, and as a picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from kvtier.demo.chat import Turn

EQUAL = "equal: the answer has the tokens that are generated without a cache"
BAR_WIDTH = 46
COLD, WARM = "#c2504a", "#3d7ea6"


def source(turn: Turn) -> str:
    """Return the tiers that gave chunks, with their counts: "local-disk 26"."""
    return ", ".join(f"{tier} {chunks}" for tier, chunks in turn.tiers.items()) or "-"


def table(turns: Sequence[Turn]) -> Table:
    """Return one line per turn, with a rule where the process was restarted; fits into 80 columns."""
    result = Table(
        title="Time to the first token (TTFT): the prompt's KV computed, and loaded", box=SIMPLE_HEAD, caption=EQUAL
    )
    result.add_column("process\nturn", justify="right", no_wrap=True)
    for heading in ("prompt\ntokens", "tokens\nloaded"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("from tier\n(chunks)", no_wrap=True)
    for heading in ("TTFT s\ncold", "TTFT s\nwarm", "\nratio"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_column("\nequal", justify="center")
    for position, turn in enumerate(turns):
        following = turns[position + 1] if position + 1 < len(turns) else turn
        result.add_row(
            f"{turn.sitting} / {turn.number}",
            f"{turn.prompt_tokens:,}",
            f"{turn.loaded_tokens:,}",
            source(turn),
            f"{turn.cold_seconds:.2f}",
            f"{turn.warm_seconds:.2f}",
            f"{turn.cold_seconds / turn.warm_seconds:.1f} x",
            "[green]yes[/green]" if turn.equal else "[red]NO[/red]",
            end_section=following.sitting != turn.sitting,
        )
    return result


def bars(turns: Sequence[Turn], console: Console) -> None:
    """Print TTFT cold above TTFT warm for each turn, to one scale."""
    longest = max(max(turn.cold_seconds, turn.warm_seconds) for turn in turns)
    for turn in turns:
        for name, seconds, colour in (("cold", turn.cold_seconds, COLD), ("warm", turn.warm_seconds, WARM)):
            label = f"turn {turn.number} {name} " if name == "cold" else f"       {name} "
            bar = "█" * max(1, round(seconds / longest * BAR_WIDTH))
            console.print(Text(label) + Text(bar, style=colour) + Text(f" {seconds:.2f} s"))


def picture(turns: Sequence[Turn], path: Path) -> None:
    """Save the same bars as a PNG picture, 1,600 x 900 points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.67, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.38
    at = range(len(turns))
    cold = axes.bar([x - width / 2 for x in at], [turn.cold_seconds for turn in turns], width, color=COLD)
    warm = axes.bar([x + width / 2 for x in at], [turn.warm_seconds for turn in turns], width, color=WARM)
    axes.bar_label(cold, fmt="%.2f s", padding=3, fontsize=9)
    axes.bar_label(
        warm, [f"{t.warm_seconds:.2f} s\n{t.cold_seconds / t.warm_seconds:.0f} x" for t in turns], padding=3, fontsize=9
    )
    axes.set_xticks(list(at), [f"turn {t.number}\n{t.prompt_tokens:,} tokens\n{_origin(t)}" for t in turns])
    axes.set_ylabel("time to the first token (seconds)")
    axes.set_ylim(0, max(max(t.cold_seconds, t.warm_seconds) for t in turns) * 1.15)
    axes.set_title(
        f"A chat on SmolLM2-135M ({os.cpu_count()} CPU cores, float32): its prompts computed anew, and loaded"
    )
    axes.legend(
        [cold, warm], ["cold: the whole prompt is computed", "warm: its KV is loaded"], loc="upper left", frameon=False
    )
    for position in range(1, len(turns)):
        if turns[position].sitting != turns[position - 1].sitting:
            axes.axvline(position - 0.5, color="0.5", linestyle="--", linewidth=1)
            axes.annotate("process restarted", (position - 0.5, 0.80), xycoords=("data", "axes fraction"), rotation=90,
                          ha="right", va="top", fontsize=9, color="0.4")  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _origin(turn: Turn) -> str:
    return "from " + " + ".join(turn.tiers) if turn.tiers else "nothing stored yet"
