"""How commands talk: tables for people, JSON for programs, a progress bar on the error stream."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_STEP = 1000
_UNITS = ("B", "kB", "MB", "GB", "TB")


def print_json(document: object) -> None:
    """Print a document as JSON, nothing else."""
    print(json.dumps(document, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their columns; the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if Console().is_terminal else 200).print(table)


@contextmanager
def progress(text: str, total: int, *, shown: bool) -> Iterator[Callable[..., None]]:
    """Show a bar on the error stream; call what this yields with how much is done, and a better total if known."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)  # in a log a bar would be an empty line
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done, total=None: bar.update(task, completed=done, total=total)


def human_bytes(size: float) -> str:
    """Return bytes in decimal units, as drives and links are sold."""
    unit = 0
    while size >= _STEP and unit < len(_UNITS) - 1:
        size, unit = size / _STEP, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
