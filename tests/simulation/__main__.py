"""Run scenarios by their seeds: `python -m simulation --seeds 0:2000`, or replay one: `--seed 7 --trace`."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time

import torch

torch.set_num_threads(1)

from simulation.world import simulate  # noqa: E402


def command(seed: int) -> str:
    return f"PYTHONPATH=tests python -m simulation --seed {seed} --trace"


def _begin() -> None:
    """Keep the modules out of the collector's sight: it runs after every scenario."""
    gc.collect()
    gc.freeze()


def _one(seed: int):
    outcome = simulate(seed)
    return seed, outcome.problems, outcome.calls


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="one scenario")
    parser.add_argument("--seeds", default="0:2000", help="first:stop")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--failures", type=int, default=10, help="stop after so many failing seeds")
    options = parser.parse_args(arguments)
    for name in ("kvtier", "asyncio"):  # not at import: the test suite imports this too
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if options.seed is not None:
        outcome = simulate(options.seed, keep_trace=options.trace)
        print("\n".join(outcome.trace))
        print(f"seed {options.seed}: {outcome.calls} calls, hash {outcome.digest}, {len(outcome.problems)} problems")
        for problem in outcome.problems:
            print("  " + problem)
        return bool(outcome.problems)
    first, stop = (int(part) for part in options.seeds.split(":"))
    began, failed, calls, done = time.monotonic(), 0, 0, 0
    with multiprocessing.Pool(options.jobs, initializer=_begin) as pool:
        for seed, problems, made in pool.imap_unordered(_one, range(first, stop), chunksize=4):
            done += 1
            calls += made
            if problems:
                failed += 1
                print(f"seed {seed}: {problems[0]}\n  replay: {command(seed)}", flush=True)
                if failed >= options.failures:
                    break
    took = time.monotonic() - began
    print(f"{done} seeds, {calls} calls, {failed} failed; {took:.1f} s, {60 * done / took:.0f} seeds per minute")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
