"""Run the attacks of a seed: `python -m tests.fuzz SEED [--minutes M] [--only NUMBER...]`."""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from tests.fuzz.fuzzer import fuzz
from tests.fuzz.test_hostile_clients import besieged


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of volleys")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as folder:
        config = besieged(Path(folder))
        numbers = given.only or itertools.count()
        findings = fuzz(config, given.seed, numbers, given.minutes * 60.0, _tell)
    print(findings)
    return 1 if findings.problems else 0


def _tell(problem: str) -> None:
    print(problem, flush=True)


if __name__ == "__main__":
    sys.exit(main())
