"""Prepares the model, lets one process after the other go on with a conversation, and shows what was gained."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch and transformers are imported, here and in the processes started below.
for _name, _value in (("OMP_WAIT_POLICY", "PASSIVE"), ("HF_HUB_OFFLINE", "1"), ("TQDM_DISABLE", "1")):
    os.environ.setdefault(_name, _value)

from kvtier.demo.conversation import QUESTIONS, SITTINGS  # noqa: E402
from kvtier.demo.model import INSTALL, DemoUnavailableError, prepare  # noqa: E402
from kvtier.keys import user_cache_folder  # noqa: E402

try:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
except ImportError:
    sys.exit(f"rich is not installed; run: {INSTALL}")

if TYPE_CHECKING:
    from kvtier.demo.chat import Turn

NEEDED_BYTES = 2 << 30  # model folder, its making, and the stored chunks


def main() -> int:
    """Run the demo; return 0 if every answer was the same as without a cache."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.demo", description=__doc__)
    parser.add_argument(
        "--home", type=Path, default=user_cache_folder(), help="where model, chunks and picture go (%(default)s)"
    )
    return run(parser.parse_args().home)


def run(home: Path, *, as_json: bool = False) -> int:
    """Prepare the model under `home`, talk, and show the results, or print them as JSON with the rest on stderr."""
    console, began = Console(stderr=as_json), time.monotonic()
    try:
        model = _prepare(home, console)
        turns = _talk(model, home / "demo", console)
    except DemoUnavailableError as exc:
        console.print(f"[red]{exc}[/red]")
        return 2
    except subprocess.CalledProcessError as exc:
        console.print(f"[red]the chat process ended with status {exc.returncode}; its message stands above[/red]")
        return 1
    if as_json:
        equal = _equal(turns)
        print(json.dumps({"turns": [asdict(turn) for turn in turns], "equal": equal}, indent=2))
        return 0 if equal else 1
    return _show(turns, home / "demo" / "ttft.png", console, began)


def _prepare(home: Path, console: Console) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(home).free < NEEDED_BYTES:
        raise DemoUnavailableError(
            f"{home} has less than {NEEDED_BYTES >> 30} GiB free; choose another place with --home"
        )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("preparing the model")
        folder = prepare(home, lambda step: progress.update(task, description=f"preparing the model (once): {step}"))
    console.print(f"model: SmolLM2-135M-Instruct in {folder}")
    return folder


def _talk(model: Path, folder: Path, console: Console) -> list[Turn]:
    """Let each sitting run in a process of its own; return what they measured."""
    from kvtier.demo.chat import Turn

    shutil.rmtree(folder, ignore_errors=True)  # so that the first turn is a first turn, every time
    folder.mkdir(parents=True)
    results, chunks = folder / "turns.jsonl", folder / "chunks"
    first = 0
    for sitting, count in enumerate(SITTINGS, start=1):
        if sitting > 1:
            forgotten = _drop_page_cache(chunks)
            console.rule(f"process {sitting - 1} has ended; a new one goes on ({forgotten})")
        command: list[str | Path] = [sys.executable, "-m", "kvtier.demo.chat", "--model", model, "--store", chunks]
        command += ["--transcript", folder / "transcript.json", "--results", results]
        command += ["--sitting", str(sitting), "--first", str(first), "--count", str(count)]
        said = sys.stderr if console.stderr else None
        subprocess.run(command, check=True, stdout=said)  # noqa: S603  # our own module, in a process of its own
        first += count
    return [Turn(**json.loads(line)) for line in results.read_text().splitlines()]


def _drop_page_cache(folder: Path) -> str:
    """Make the next reads come from the device, where the system allows that; say what was done."""
    if not hasattr(os, "posix_fadvise"):
        return "its files may still be in the page cache"
    size = 0
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            size += os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    return f"{size / 2**20:.0f} MiB on disk, dropped from the page cache"


def _show(turns: list[Turn], path: Path, console: Console, began: float) -> int:
    from kvtier.demo import report

    console.rule("results")
    report.bars(turns, console)
    console.print(report.table(turns))
    report.picture(turns, path)
    console.print(f"picture: {path}")
    equal = _equal(turns)
    same = (
        "the same tokens as without a cache, in every turn"
        if equal
        else "[red]NOT the tokens generated without a cache[/red]"
    )
    console.print(f"{same}; {time.monotonic() - began:.0f} s in all")
    return 0 if equal else 1


def _equal(turns: list[Turn]) -> bool:
    return all(turn.equal for turn in turns) and len(turns) == len(QUESTIONS)


if __name__ == "__main__":
    sys.exit(main())
