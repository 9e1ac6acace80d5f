"""Compare split with aggregated serving on one GPU: equal greedy tokens, and a handoff's cost.

This is a section of the GPU benchmark. It serves a random model twice through `LLM`, which starts
real node processes: once with a prefill and a decode node, once with a decode node that computes
prompts itself. In the end it kills the decode node under streams.
"""

import statistics
import tempfile
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil
import torch

from baton.llm import LLM
from baton.node.records import ReadRecord, StepRecord, read_records
from baton.protocol.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    NodeConfig,
    RouterConfig,
)
from baton.protocol.errors import BatonError
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import RequestOutput
from baton.runtime.clock import monotonic
from baton.runtime.local_cluster import LocalCluster
from baton.runtime.process import RelayLine
from tools.gpu.cases import HANDOVER_PROMPTS, handover_key
from tools.gpu.floors import Shape, Work
from tools.gpu.rows import Check, Measured, Note
from tools.gpu.section import Desk
from tools.gpu.timing import timing_of
from tools.random_model import write_model

# With 36 layers as narrow as those of 0.6B, a token's KV has the 144 KiB of an 8B model.
THIN_8B = Shape("36 layers of 0.6B", 1024, 3072, 36, 16, 8, 128, 640, is_tied=True)
LOWEST_ID = 3
START_S = 60.0
ARM_S = 12.0  # for nodes to start with kernels that are compiled already, and to answer
RESTART_S = 15.0  # for streams, and for the same whose node is killed and starts again
KILLED = "streams of a killed decode node"
CLAIM = "With one GPU both roles share it, so isolation and throughput are measured only with two."


class SplitPlan(msgspec.Struct, frozen=True):
    shape: Shape = THIN_8B
    device: str = "cuda"
    prompts: tuple[int, ...] = HANDOVER_PROMPTS
    num_tokens: int = 32
    warm_ups: int = 2
    rounds: int = 6
    memory_mib: int = 0  # a real start measures what is free
    stream_tokens: int = 400  # of the stream beside which blocks of other prompts land


class Arm(msgspec.Struct, frozen=True):
    """One way of serving: its answers by prompt length, in the order of asking."""

    tokens: dict[int, list[list[int]]]
    first_token_s: dict[int, list[float]]
    paths: set[str]
    ready_s: float  # from the start of the nodes
    interrupted: "Interrupted | None" = None


class Interrupted(msgspec.Struct, frozen=True):
    """Streams whose decode node was killed half-way, beside the same ones undisturbed."""

    num_streams: int
    num_equal: int
    num_whole: int  # have as many tokens
    num_resumed: int
    lost_s: float  # how much longer they took


def run(desk: Desk, folder: Path, plan: SplitPlan | None = None) -> None:
    """Run the section; logs of the nodes go to `folder`."""
    plan = plan or SplitPlan()
    desk.emit(Note(CLAIM))
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as scratch:
        model = Path(scratch) / "model"
        records = Path(scratch) / "records"
        write_model(model, plan.shape, desk.device)
        aggregated = _arm(
            desk, plan, "aggregated", _settings(plan, model, "always"), folder
        )
        split = _arm(
            desk, plan, "split", _settings(plan, model, "never", records), folder
        )
        if aggregated is not None and split is not None:
            desk.emit(compare(plan, aggregated, split))
            _report_first_tokens(desk, plan, {"aggregated": aggregated, "split": split})
        if split is not None:
            report_interruption(desk, split)
            report_handovers(desk, plan, handovers(records))
            report_interference(desk, records)


def _arm(
    desk: Desk, plan: SplitPlan, name: str, config: ClusterConfig, folder: Path
) -> Arm | None:
    """Return the arm's answers; None if it was not served, for a reason in the report."""
    key = f"{name} serving on this GPU" if plan.device == "cuda" else f"{name} serving"
    if not desk.has_time(key, ARM_S):
        return None
    # The log is written line by line: a node's last lines matter most when this process is ended.
    with (folder / f"nodes-{name}.log").open("w") as log:
        try:
            arm = serve(
                plan,
                config,
                lambda node, line: print(node, line, file=log, flush=True),
                lambda: desk.has_time(KILLED, RESTART_S),
            )
        except BatonError as error:
            desk.emit(Check(key, False, f"not served: {error.message[-250:]}"))
            return None
    wanted = "disaggregated" if name == "split" else "local_prefill"
    desk.emit(
        Check(key, arm.paths == {wanted}, f"requests went the way {sorted(arm.paths)}")
    )
    desk.emit(Measured(f"ready for {name} serving", "s", value=arm.ready_s))
    return arm


def serve(
    plan: SplitPlan,
    config: ClusterConfig,
    relay: RelayLine,
    may_kill: Callable[[], bool] = lambda: False,
) -> Arm:
    """Serve the prompts one after the other; `relay` gets the lines that the nodes print.

    The decode node of a split is killed in the end, if it `may_kill`.
    """

    def launch(config: ClusterConfig, control: str) -> LocalCluster:
        return LocalCluster(config, control, relay)

    params = SamplingParams(temperature=0, max_tokens=plan.num_tokens, ignore_eos=True)
    names = [name for name in config.__struct_fields__ if name != "model"]
    settings = {name: getattr(config, name) for name in names}
    found: dict[int, list[RequestOutput]] = {}
    interrupted = None
    began_s = monotonic()
    with LLM(config.model.path, launcher=launch, **settings) as llm:
        ready_s = monotonic() - began_s
        for length in plan.prompts:
            found[length] = [
                llm.generate(prompt, params, use_tqdm=False)[0]
                for prompt in prompts(plan, length)
            ]
        beside = prompts(plan, plan.prompts[0] + 1)
        limits = [plan.stream_tokens, *[1 + plan.num_tokens] * (len(beside) - 1)]
        many = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in limits
        ]
        llm.generate(beside, many, use_tqdm=False)
        if config.prefill and may_kill():
            interrupted = interrupt(llm, plan)
    return Arm(
        {n: [output.outputs[0].token_ids for output in found[n]] for n in found},
        {
            n: [output.metrics.time_to_first_token_s or 0.0 for output in found[n]]
            for n in found
        },
        {str(output.metrics.path) for outputs in found.values() for output in outputs},
        ready_s,
        interrupted,
    )


def interrupt(llm: LLM, plan: SplitPlan) -> Interrupted:
    """Let all prompts stream at once, then again, and kill the decode node half-way."""
    asked = prompts(plan, plan.prompts[0] + 2)
    # Fewer than the stream has whose gaps are reported.
    num_tokens = plan.stream_tokens * 3 // 4
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def generate() -> tuple[list[RequestOutput], float]:
        began_s = monotonic()
        outputs = llm.generate(asked, params, use_tqdm=False)
        return outputs, monotonic() - began_s

    undisturbed, expected_s = generate()
    killing = threading.Timer(expected_s / 2, _kill_decode)
    killing.start()
    outputs, took_s = generate()
    killing.join()
    pairs = [
        (one.outputs[0].token_ids, other.outputs[0].token_ids)
        for one, other in zip(outputs, undisturbed, strict=True)
    ]
    return Interrupted(
        len(pairs),
        sum(ours == theirs for ours, theirs in pairs),
        sum(len(ours) == num_tokens for ours, _ in pairs),
        sum(output.metrics.num_resumes > 0 for output in outputs),
        took_s - expected_s,
    )


def _kill_decode() -> None:
    for process in psutil.Process().children(recursive=True):
        if "decode" in process.cmdline():
            process.kill()


def report_interruption(desk: Desk, arm: Arm) -> None:
    """Report it if it was tried. Tokens have to be equal where the node promises equal bits."""
    one = arm.interrupted
    if one is None:
        return
    is_whole = one.num_whole == one.num_streams and one.num_resumed > 0
    text = f"{one.num_whole} of {one.num_streams} whole, {one.num_resumed} resumed"
    desk.emit(Check(KILLED, is_whole, text))
    is_equal = one.num_equal == one.num_streams
    text = f"{one.num_equal} of {one.num_streams} equal the undisturbed ones"
    desk.emit(Check(f"{KILLED}, tokens", is_equal, text, required=False))
    desk.emit(Measured(f"{KILLED}, time lost", "s", value=one.lost_s))


def prompts(plan: SplitPlan, length: int) -> list[list[int]]:
    """Return the prompts, warm-ups first; no two begin alike, so no prefix cache has a block."""
    generator = torch.Generator().manual_seed(length)
    shape = (plan.warm_ups + plan.rounds, length)
    ids: list[list[int]] = torch.randint(
        LOWEST_ID, plan.shape.vocab_size, shape, generator=generator
    ).tolist()
    return ids


def compare(plan: SplitPlan, aggregated: Arm, split: Arm) -> Check:
    """Compare the answers token by token."""
    key = "greedy tokens, split against aggregated"
    different = [
        f"{length} tokens, request {number}: first at {_first_difference(ours, theirs)}"
        for length in plan.prompts
        for number, (ours, theirs) in enumerate(
            zip(split.tokens[length], aggregated.tokens[length], strict=True)
        )
        if ours != theirs
    ]
    total = sum(len(answers) for answers in split.tokens.values())
    if different:
        return Check(
            key, False, f"{len(different)} of {total} answers differ: {different[0]}"
        )
    return Check(key, True, f"{total} answers of {plan.num_tokens} tokens are equal")


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs))
    )


def _report_first_tokens(desk: Desk, plan: SplitPlan, arms: dict[str, Arm]) -> None:
    for length in plan.prompts:
        for name, arm in arms.items():
            timing = timing_of(arm.first_token_s[length][plan.warm_ups :])
            key = f"first token after {length} tokens, {name}"
            desk.emit(Measured(key, "ms", timing=timing, note="one request at a time"))


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


def report_handovers(desk: Desk, plan: SplitPlan, found: Sequence[Handover]) -> None:
    """Report the handoffs of each prompt length, known by its bytes; warm-ups do not count."""
    per_token = plan.shape.kv_bytes_per_token
    for length in plan.prompts:
        own = [one for one in found if _is_of(one, length * per_token, 16 * per_token)]
        counted = own[plan.warm_ups :][: plan.rounds]
        if not counted:
            desk.emit(
                Measured(handover_key(length), "ms", error="no record of a hand-over")
            )
            continue
        num_bytes = counted[0].num_bytes
        exposed = statistics.median(one.exposed_ms for one in counted)
        timing = timing_of([1e-3 * one.overhead_ms for one in counted])
        note = f"{counted[0].num_chunks} chunks, {exposed:.2f} ms of reading after the last"
        # All bytes are read once and written once.
        work = Work(2 * num_bytes)
        desk.emit(Measured(handover_key(length), "ms", work, timing, note=note))
        reading = timing_of([1e-3 * one.reading_ms for one in counted])
        desk.emit(
            Measured(
                f"KV reads, {length} tokens",
                "TB/s",
                work,
                reading,
                num_bytes,
                f"{num_bytes / 2**20:.0f} MiB a prompt, by the reader's clock",
            )
        )


def report_interference(desk: Desk, folder: Path) -> None:
    """Report the gaps between tokens of the longest stream, with and without reads in between."""
    records = [one for path in folder.glob("*.jsonl") for one in read_records(path)]
    reads = [one for one in records if isinstance(one, ReadRecord)]
    ends: dict[str, list[float]] = {}
    for step in records:
        if isinstance(step, StepRecord) and not step.num_prompt_tokens:
            for part in step.slices:
                ends.setdefault(part.key.request_id, []).append(step.ended_s)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    _, stream = max(((len(own), own) for own in ends.values()), default=(0, []))
    for start_s, end_s in pairwise(sorted(stream)):
        is_beside = any(
            read.posted_s < end_s and read.ended_s > start_s for read in reads
        )
        gaps[is_beside].append(1e3 * (end_s - start_s))
    for is_beside, own in gaps.items():
        key = "ITL p50, while blocks land" if is_beside else "ITL p50, no block lands"
        if len(own) < 2:
            desk.emit(Measured(key, "ms", note=f"{len(own)} gaps"))
            continue
        p99 = statistics.quantiles(own, n=100)[-1]
        text = f"p99 {p99:.2f} ms of {len(own)} gaps"
        desk.emit(Measured(key, "ms", note=text, value=statistics.median(own)))


def _is_of(one: Handover, num_bytes: int, tolerance: int) -> bool:
    return abs(one.num_bytes - num_bytes) <= tolerance


def _settings(
    plan: SplitPlan, model: Path, local_prefill: str, records: Path | None = None
) -> ClusterConfig:
    is_split = local_prefill == "never"
    return ClusterConfig(
        prefill=1 if is_split else 0,
        decode=1,
        model=ModelConfig(path=str(model)),
        cache=CacheConfig(memory_mib=plan.memory_mib, enable_prefix_caching=False),
        engine=EngineConfig(device=plan.device),  # type: ignore[arg-type]
        router=RouterConfig(local_prefill=local_prefill),  # type: ignore[arg-type]
        node=NodeConfig(start_timeout_s=START_S),
        log=LogConfig(level="warning", records=str(records) if records else ""),
    )
