"""`python -m tools.trace_part TRACE PART --one-of N`: write one of N conversations of a trace.

A trace of Mooncake's (JSON lines) is too much for a small machine. Its first rows hold few later
turns of conversations, so a prefix cache finds little in them. Some conversations as a whole, at
the times at which they arrived, have as large a share of known prefixes as the trace.
"""

import argparse
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Row(msgspec.Struct):
    hash_ids: list[int]


def is_in_part(row: Row, one_of: int) -> bool:
    """Return whether a row is of the part. All prompts of a trace begin with the same block."""
    first_of_its_own = row.hash_ids[:2][-1]
    return zlib.crc32(str(first_of_its_own).encode()) % one_of == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.trace_part", description=__doc__
    )
    parser.add_argument("trace", type=Path, help="a file of JSON lines with hash_ids")
    parser.add_argument("part", type=Path, help="the file to write")
    parser.add_argument("--one-of", type=int, default=16, help="N conversations")
    given = parser.parse_args(arguments)
    lines = given.trace.read_bytes().splitlines(keepends=True)
    decoder = msgspec.json.Decoder(Row)
    part = [line for line in lines if is_in_part(decoder.decode(line), given.one_of)]
    given.part.write_bytes(b"".join(part))
    print(f"{len(part)} of {len(lines)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
