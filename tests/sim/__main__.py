"""Run the schedules of these seeds: `python -m tests.sim FIRST [LAST] [-v]`."""

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter

from tests.sim.world import Result, simulate_once


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print every fault"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    given = parser.parse_args()
    seeds = range(given.first, (given.first if given.last is None else given.last) + 1)
    num_bad = 0
    gap_s = 0.0
    turn_s = 0.0
    began_s = time.monotonic()
    fates: Counter[str] = Counter()
    met: Counter[tuple[str, str]] = Counter()
    # A process for each schedule: it ends sooner than a collector would find what is left.
    gc.disable()
    logging.disable(logging.CRITICAL)
    with multiprocessing.Pool(given.workers, maxtasksperchild=1) as pool:
        for result in pool.imap(simulate_once, seeds):
            fates += result.fates
            met += result.met
            gap_s = max(gap_s, result.longest_gap_s)
            turn_s = max(turn_s, result.longest_turn_s)
            num_bad += bool(result.problems)
            _report(result, is_verbose=given.verbose)
    took_s = time.monotonic() - began_s
    print(
        f"{len(seeds)} schedules, {num_bad} with problems, {len(seeds) / took_s:.1f} a second"
    )
    print(
        f"longest gap of an attached stream {gap_s:.1f} s; {dict(fates.most_common())}"
    )
    print(f"longest wait of other work on a router's loop {turn_s:.3f} s")
    print(
        f"{len(met)} pairs of a message and the state of its request and session met:"
    )
    for (kind, state), number in sorted(met.items()):
        print(f"    {kind}, {state}: {number}" if state else f"    {kind}: {number}")
    return 1 if num_bad else 0


def _report(result: Result, *, is_verbose: bool) -> None:
    if is_verbose:
        print("\n".join(result.log))
    if result.problems:
        print(f"seed {result.seed}: {len(result.problems)} problems", flush=True)
        print(
            "\n".join(f"    {problem}" for problem in result.problems[:6]), flush=True
        )


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must not change
        fixed = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]], fixed
        )
    sys.exit(main())
