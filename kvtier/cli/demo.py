"""`kvtier demo`: a multi-turn chat on a real model, cold, warm and after restarts; needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.tiers import JsonOption
from kvtier.keys import user_cache_folder


def demo(
    home: Annotated[
        Path | None, typer.Option(help="where model, chunks and picture go; the user's cache folder, if not given")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Talk with a small model in three processes; show how long first tokens took, computed and loaded."""
    from kvtier.demo.__main__ import run

    raise typer.Exit(run(home if home is not None else user_cache_folder(), as_json=json))
