"""Measure the handoffs of prompts from the step and read records of a cluster (`log.records`).

It reads the JSON lines that prefill and decode nodes of one host wrote while they served one
request after another (concurrency 1), and prints how long no node computed and how much of the
transfer was hidden behind the next chunk.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.engine.records import ReadRecord, StepRecord, read_records


class Handover(msgspec.Struct, frozen=True):
    """One request, in milliseconds.

    `overhead_ms` is the time from the end of its last prompt step to the start of its first decode
    step, `exposed_ms` the reading after the last chunk, `last_share` the last read's share of the
    bytes.
    """

    num_chunks: int
    num_bytes: int
    overhead_ms: float
    reading_ms: float
    exposed_ms: float
    last_share: float


def handovers(folder: Path) -> list[Handover]:
    """Return the handoff of each request that was computed on one node and continued on another."""
    steps: dict[str, list[StepRecord]] = {}
    reads: list[ReadRecord] = []
    for path in sorted(folder.glob("*.jsonl")):
        for record in read_records(path):
            if isinstance(record, ReadRecord):
                reads.append(record)
                continue
            for part in record.slices:
                steps.setdefault(part.key.request_id, []).append(record)
    found = []
    for own in steps.values():
        chunks = [step for step in own if step.num_prompt_tokens]
        decoding = [step for step in own if not step.num_prompt_tokens]
        if chunks and decoding:
            found.append(_handover(chunks, decoding, reads))
    return found


def _handover(
    chunks: list[StepRecord], decoding: list[StepRecord], reads: list[ReadRecord]
) -> Handover:
    last_s = max(step.ended_s for step in chunks)
    first_s = min(step.started_s for step in decoding)
    begin_s = min(step.started_s for step in chunks)
    own = [read for read in reads if begin_s <= read.posted_s <= first_s]
    num_bytes = sum(read.num_bytes for read in own)
    exposed_s = max((read.ended_s for read in own), default=last_s) - last_s
    return Handover(
        len(chunks),
        num_bytes,
        1e3 * (first_s - last_s),
        1e3 * sum(read.ended_s - read.posted_s for read in own),
        1e3 * max(0.0, exposed_s),
        own[-1].num_bytes / num_bytes if num_bytes else 0.0,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.handover", description=__doc__)
    parser.add_argument("records", type=Path, help="the folder of log.records")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found = handovers(given.records)
    if not found:
        print("no request changed hands in these records", file=sys.stderr)
        return 1
    overheads = sorted(handover.overhead_ms for handover in found)
    print(
        f"requests={len(found)} chunks={statistics.median(h.num_chunks for h in found):g} "
        f"overhead_p50={statistics.median(overheads):.2f} ms "
        f"p99={overheads[int(0.99 * (len(overheads) - 1))]:.2f} ms "
        f"reading_p50={statistics.median(h.reading_ms for h in found):.2f} ms "
        f"exposed_p50={statistics.median(h.exposed_ms for h in found):.2f} ms "
        f"last_share_p50={statistics.median(h.last_share for h in found):.2f}"
    )
    if given.json:
        given.json.write_bytes(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
