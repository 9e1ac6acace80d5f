"""Try two ranks on this machine: their sums, replayed too, what a sum costs, and their tokens.

This is a section of the GPU benchmark. Each rank is a process with a GPU of its own; on CPUs both
sum over gloo. `python -m tools.gpu.ranks RANK DESCRIPTOR DEVICE` is one of them.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from baton.llm import LLM
from baton.model.tensor_parallel import GroupRanks, join
from baton.protocol.config import CacheConfig
from baton.protocol.errors import NodeError
from baton.protocol.sampling import SamplingParams
from tools.gpu.folder import THIN, TINY
from tools.gpu.rows import Check, Measured, Timing
from tools.gpu.section import Desk
from tools.gpu.timing import Stopwatch
from tools.random_model import write_model

KEY = "two ranks sum alike, replayed too"
LARGEST_GAP = 1e-4  # between the log probabilities of an answer, in fp32
TOKENS = "two ranks give the tokens of one"
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
    desk.check(TOKENS, lambda: _tokens(desk.device), TIMEOUT_S / 2)


def _tokens(device: torch.device) -> Check:
    """Compare greedy tokens and their log probabilities, of a node with one rank and one with two.

    In bf16 the parts of a sum are rounded, so two ranks may choose another of two near tokens.
    """
    is_cpu = device.type == "cpu"
    found = []
    prompts = [
        [3 + (7 * i + 11 * salt) % 600 for i in range(9 + 40 * salt)]
        for salt in range(3)
    ]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, TINY if is_cpu else THIN, device)
        for size in (1, 2):
            with LLM(
                str(folder),
                dtype="float32",
                prefill=0,
                decode=1,
                local_prefill="always",
                device=device.type,
                tensor_parallel_size=size,
                cache=CacheConfig(memory_mib=64 if is_cpu else 1024),
            ) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0] for output in outputs])
    pairs = list(zip(*found, strict=True))
    num_equal = sum(one.token_ids == two.token_ids for one, two in pairs)
    apart = max(
        abs((one.cumulative_logprob or 0.0) - (two.cumulative_logprob or 0.0))
        for one, two in pairs
    )
    text = f"{num_equal} of {len(pairs)} answers, log probabilities within {apart:.1e}"
    return Check(TOKENS, num_equal == len(pairs) and apart <= LARGEST_GAP, text)


def _both(desk: Desk) -> Check:
    memory = os.memfd_create("ranks")
    command = [sys.executable, "-m", "tools.gpu.ranks"]
    try:
        children = [
            subprocess.Popen(
                [*command, str(rank), str(memory), desk.device.type],
                pass_fds=(memory,),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
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
    rank = int(sys.argv[1])
    memory = int(sys.argv[2])
    kind = sys.argv[3]
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    ranks = join(device, (rank, 2), memory, TIMEOUT_S, is_ordered=False)
    watch = Stopwatch(device)
    said = Said([], {})
    for name, num_bytes in SIZES.items():
        values = (
            torch.arange(num_bytes // 2, device=device).remainder(64).to(torch.bfloat16)
        )
        expected = 3 * values
        if not torch.equal(ranks.all_reduce(values * (rank + 1)), expected):
            said.wrong.append(f"{name}, eager")
        if kind == "cuda" and not torch.equal(
            _replayed(ranks, values * (rank + 1)), expected
        ):
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
    place = torch.zeros_like(values)
    graph = torch.cuda.CUDAGraph()
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
