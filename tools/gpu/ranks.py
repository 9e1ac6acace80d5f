"""Try two ranks on this machine: their sums, the same sums replayed, and what a sum costs.

This is a section of the GPU benchmark. Each rank is a process with a GPU of its own; on CPUs both
sum over gloo. `python -m tools.gpu.ranks RANK DESCRIPTOR DEVICE` is one of them.
"""

import os
import subprocess
import sys
from functools import partial

import msgspec
import torch
from torch import Tensor

from baton.engine.compute.tensor_parallel import GroupRanks, join
from baton.protocol.errors import NodeError
from tools.gpu.rows import Check, Measured, Timing
from tools.gpu.section import Desk
from tools.gpu.timing import Stopwatch

KEY = "two ranks sum alike, replayed too"
SIZES = {"8 KB": 1 << 13, "1 MB": 1 << 20}
TIMEOUT_S = 60.0


class Said(msgspec.Struct):
    """What the first rank found."""

    wrong: list[str]
    timings: dict[str, Timing]


def run(desk: Desk) -> None:
    """Run the section."""
    if desk.device.type == "cuda" and torch.cuda.device_count() < 2:
        desk.emit(Check(KEY, None, "there is one GPU"))
        return
    desk.check(KEY, lambda: _both(desk), TIMEOUT_S / 2)


def _both(desk: Desk) -> Check:
    memory = os.memfd_create("ranks")
    command = [sys.executable, "-m", "tools.gpu.ranks"]
    try:
        children = [
            subprocess.Popen(
                [*command, str(rank), str(memory), desk.device.type],
                pass_fds=(memory,), stdout=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
    finally:
        os.close(memory)
    try:
        texts = [child.communicate(timeout=2 * TIMEOUT_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise NodeError(f"ranks ended with {[child.returncode for child in children]}")
    said = msgspec.json.decode(texts[0].splitlines()[-1], type=Said)
    for name, timing in said.timings.items():
        desk.emit(Measured(f"all-reduce {name}", "\N{MICRO SIGN}s", timing=timing))
    return Check(KEY, not said.wrong, ", ".join(said.wrong) or "eager and replayed")


def main() -> None:
    """Run one rank."""
    rank, memory, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    ranks = join(device, (rank, 2), memory, TIMEOUT_S, is_ordered=False)
    watch, said = Stopwatch(device), Said([], {})
    for name, num_bytes in SIZES.items():
        values = torch.arange(num_bytes // 2, device=device).remainder(64).to(torch.bfloat16)
        expected = 3 * values
        if not torch.equal(ranks.all_reduce(values * (rank + 1)), expected):
            said.wrong.append(f"{name}, eager")
        if kind == "cuda" and not torch.equal(_replayed(ranks, values * (rank + 1)), expected):
            said.wrong.append(f"{name}, replayed")
        zeros = torch.zeros(20, len(values), dtype=values.dtype, device=device)
        said.timings[name] = watch.wall(partial(_sums, ranks, zeros), calls=len(zeros))
    print(msgspec.json.encode(said).decode(), flush=True)
    ranks.leave()


def _sums(ranks: GroupRanks, rows: Tensor) -> None:
    for row in rows:
        ranks.all_reduce(row)


def _replayed(ranks: GroupRanks, values: Tensor) -> Tensor:
    """Return the sum as a captured step makes it; `values` were summed once before."""
    place, graph = torch.zeros_like(values), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        ranks.all_reduce(place)
    place.copy_(values)
    graph.replay()
    torch.cuda.synchronize()
    del graph  # NCCL waits for graphs that contain its collectives
    return place


if __name__ == "__main__":
    main()
