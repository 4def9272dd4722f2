"""Processes that write to one directory and are killed, as `make kill` has them, with what was seen written down.

No benchmark: the figure is how many cycles went by and that nothing was torn, lost or left. A long run may be made in
slices: with `--add` what is seen is added to the results that earlier slices left.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.harness import RESULTS, save

LOOP = pathlib.Path(__file__).parents[1] / "tests/backends/kill_loop.py"


def main(arguments: list[str] | None = None) -> None:
    """Run, print, and write `results/disk_kill.json`."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks.disk_kill", description=__doc__)
    flags.add_argument("--cycles", type=int, default=1000)
    flags.add_argument("--seed", type=int, default=11)
    flags.add_argument("--add", action="store_true", help="to the results there are")
    options = flags.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kvtier-kill-") as folder:
        command = [sys.executable, str(LOOP), folder, str(options.cycles), str(options.seed), "published"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seen = json.loads(ended.stdout)
    path = RESULTS / "disk_kill.json"  # read now: slices may run side by side
    slices: list[dict[str, Any]] = json.loads(path.read_text())["slices"] if options.add else []
    if any(each["seed"] == options.seed for each in slices):
        raise SystemExit(f"seed {options.seed} was run already")
    slices.append({"seed": options.seed, "cycles": options.cycles, "seen": seen})
    total: dict[str, int] = {}
    for each in slices:
        for what, count in each["seen"].items():
            total[what] = total.get(what, 0) + count
    print(total)
    extra = {"cycles": sum(each["cycles"] for each in slices), "seen": total, "slices": slices}
    save("disk_kill", [], flags={}, extra=extra)


if __name__ == "__main__":
    main()
