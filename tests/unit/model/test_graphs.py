"""Steps that overlap and steps that are replayed give what one eager step after the other gives."""

import os
import random
import weakref
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import msgspec
import pytest
import torch
from llguidance import LLMatcher

from baton.model.executors.profiler import StepProfiler
from baton.model.executors.step_threads import StepCpus, StepThreads
from baton.model.runner.cuda_start import buckets_up_to, with_guesses
from baton.model.runner.device_state import DeviceTables
from baton.model.runner.packing import Bucket
from baton.model.runner.rank import LoadedRank
from baton.model.runner.runner import SPARE_WORDS, Runner
from baton.model.runner.step_queue import CudaQueue, GraphQueue, HostQueue, StepWork
from baton.model.sampling.token_masks import TokenMasks
from baton.node.executor import Progress
from baton.node.scheduling.plan import Slice, StepPlan, StepResult
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.config import ClusterConfig, EngineConfig
from baton.protocol.ids import Epoch, Key, RequestId
from baton.protocol.sampling import Penalties, Sampling
from tests.support.compute import no_progress
from tests.support.drive import key
from tests.support.graph_stand_in import (
    BLOCK_SIZE,
    SHAPE,
    RecordingQueue,
    TableBackend,
    stand_in,
)
from tests.support.graph_world import World, write_characters
from tests.support.waiting import until

NUM_BLOCKS = 48
WAIT_S = 30.0
NUM_SCHEDULES = int(os.environ.get("BATON_SCHEDULES", "16"))  # of about five sequences
EOS = tuple(range(0, SHAPE.vocab_size, 16))
LIMITS = NodeLimits(16, 6, 40, EOS, SHAPE.vocab_size)
NUM_GUESSES = 3
GUESSING = msgspec.structs.replace(
    LIMITS,
    engine=EngineConfig(num_speculative_tokens=NUM_GUESSES, prompt_lookup_min=1),
)
PROMPTS = [
    [3 + (7 * salt + 5 * i) % 90 for i in range(1 + 3 * salt)] for salt in range(6)
]
SAMPLINGS = [
    Sampling(seed=5, max_tokens=9, temperature=0.0),
    Sampling(seed=6, max_tokens=12, temperature=0.5),
    Sampling(
        seed=7, max_tokens=7, min_tokens=4, temperature=0.9, stop_token_ids=(11, 40)
    ),
    # More ids are held back than a captured step can, so the first steps are eager.
    Sampling(
        seed=8, max_tokens=7, min_tokens=2, temperature=0.9, stop_token_ids=(11, 40, 50)
    ),
    Sampling(
        seed=9,
        max_tokens=12,
        bad_words=((20,), *((a, b) for a in range(96) for b in (5, 7))),
    ),
    Sampling(
        seed=11,
        max_tokens=15,
        penalties=Penalties(0.5, 0.7, 1.4, ((3, 2.0), (9, -4.0))),
    ),
    Sampling(
        seed=12, max_tokens=15, penalties=Penalties(2.0, -1.0, 1.0), bad_words=((7,),)
    ),
    Sampling(
        seed=10,
        max_tokens=14,
        grammar=LLMatcher.grammar_from_regex("[a-o]{2,9}-[1-9]+"),
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the tokenizer is."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_characters(folder)
    return folder


def masks(folder: Path) -> TokenMasks:
    return TokenMasks(folder, SHAPE.vocab_size, EOS)


def captured(
    queue: RecordingQueue,
    masks: TokenMasks | None = None,
    num_decoding: int = LIMITS.max_num_seqs,
    num_guesses: int = 0,
) -> Runner:
    runner = stand_in(NUM_BLOCKS, queue, EOS, masks=masks)
    buckets = buckets_up_to(num_decoding, 64)
    runner.capture(with_guesses(buckets, num_guesses), no_progress)
    return runner


def alone(runner: Runner, prompt: list[int], sampling: Sampling) -> list[int]:
    """One sequence by itself, each step collected before the next one is launched."""
    world = World(runner, random.Random(0), 1, LIMITS)
    world.ask(prompt, sampling)
    while world.turn():
        pass
    return world.said[key("r0")]


def test_random_schedules_say_what_one_eager_step_after_the_other_says(folder):
    """Two steps are launched at a time and decode steps are replayed, on a pool that fills up.

    Every other node guesses tokens.
    """
    eager = stand_in(
        NUM_BLOCKS, RecordingQueue(), EOS, masks=masks(folder), has_counts=False
    )
    expected = {
        (tuple(prompt), sampling): alone(eager, prompt, sampling)
        for prompt in PROMPTS
        for sampling in SAMPLINGS
    }
    assert len({tuple(tokens) for tokens in expected.values()}) > 12, (
        "the model says too little"
    )
    assert any(len(tokens) < 6 for tokens in expected.values()), "nothing ends early"
    queue = RecordingQueue()
    runner = captured(queue, masks(folder), num_guesses=NUM_GUESSES)
    num_cut = 0
    num_right = 0
    for seed in range(NUM_SCHEDULES):
        limits = GUESSING if seed % 2 else LIMITS
        world = World(runner, random.Random(seed), 2, limits, f"{seed}-")
        world.play(PROMPTS, SAMPLINGS)
        for of, (prompt, sampling) in world.asked.items():
            whole = expected[tuple(prompt), sampling]
            said = world.said[of]
            assert said == (whole[: len(said)] if of in world.cut else whole), (
                seed,
                of,
            )
        assert world.pool.num_owned == 0
        num_cut += len(world.cut)
        num_right += world.pool.counts.spec_decode_accepted_tokens
    assert queue.num_replays > 2 * NUM_SCHEDULES
    assert num_right > NUM_SCHEDULES / 10
    assert num_cut > NUM_SCHEDULES / 4


def test_prompts_are_replayed_with_their_tokens_and_those_that_follow():
    """Two at once, one behind a part of it that is computed already, and more than fit."""
    begun = msgspec.structs.replace(
        prompt_of(3), length=4, token_ids=prompt_of(3).token_ids[:4]
    )
    begun = msgspec.structs.replace(begun, samples=(), sampling=None)
    rest = msgspec.structs.replace(
        prompt_of(3), start=4, length=9, token_ids=prompt_of(3).token_ids[4:]
    )
    steps = (
        (prompt_of(0), prompt_of(1)),
        (begun,),
        (rest, prompt_of(2)),
        tuple(next_of(number, 0) for number in range(4)),
    )
    queue = RecordingQueue()
    found = []
    for runner in (captured(queue), stand_in(NUM_BLOCKS, RecordingQueue(), EOS)):
        found.append(
            [runner.execute(StepPlan(i, step)).tokens for i, step in enumerate(steps)]
        )
    assert found[0] == found[1]
    assert queue.num_replays == len(steps)
    many = tuple(
        msgspec.structs.replace(
            prompt_of(0), key=key(f"m{number}"), block_table=(number,)
        )
        for number in range(9)
    )
    assert len(set(captured(queue).execute(StepPlan(9, many)).tokens)) == 1
    assert queue.num_replays == len(steps)
    prefill = captured(queue, num_decoding=0)
    for i, step in enumerate(steps):
        prefill.execute(StepPlan(i, step))
    assert queue.num_replays == 2 * len(steps) - 1  # it has captured no decode step


def test_chunks_of_long_prompts_are_replayed_where_little_of_them_is_padding():
    """The first chunk has a bucket of its size, the second one its least, the third one less."""
    num_tokens = 600
    chunks = (num_tokens, 525, 524)
    tokens = tuple(3 + i * i % 90 for i in range(sum(chunks)))
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    table = tuple(random.Random(1).sample(range(num_blocks), num_blocks))
    queue = RecordingQueue()
    replaying = stand_in(num_blocks, queue, EOS, max_len=len(tokens))
    eager = stand_in(num_blocks, RecordingQueue(), EOS, max_len=len(tokens))
    replaying.capture(buckets_up_to(0, num_tokens)[-2:], no_progress)
    found = []
    for runner in (replaying, eager):
        start = 0
        said = []
        for step, length in enumerate(chunks):
            part = msgspec.structs.replace(
                prompt_of(1),
                start=start,
                length=length,
                token_ids=tokens[start : start + length],
                block_table=table,
                num_prompt_tokens=len(tokens),
            )
            said.append(runner.execute(StepPlan(step, (part,))).tokens)
            start += length
        found.append((said, runner.cache.pool[:num_blocks].clone()))
    assert queue.num_replays == 2
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_tokens", [0, 63, 64, 512, 1000, 2048, 8192])
def test_captured_chunks_are_as_long_as_those_of_the_node(num_tokens):
    prompts = buckets_up_to(0, num_tokens)
    sizes = [bucket.num_tokens for bucket in prompts]
    assert sizes == sorted(sizes)
    assert not any(bucket.num_decoding for bucket in prompts)
    if num_tokens < 64:
        assert sizes == []
        return
    longest = min(num_tokens, 2048)
    assert sizes[0] == 64
    assert sizes[-1] == longest
    assert prompts[-1].takes(longest, max(8, longest // 128))
    assert len(sizes) <= 12, "each takes time and memory"


def test_tokens_before_a_prompts_last_are_not_replayed_where_they_attend_to_expanded_keys(
    monkeypatch,
):
    monkeypatch.setattr(TableBackend, "expands_prompts", True)
    whole = prompt_of(3)
    queue = RecordingQueue()
    runner = captured(queue)
    last = len(whole.token_ids) - 1
    for step, (first, end, num_replays) in enumerate(
        ((0, last - 1, 0), (last - 1, last, 0), (last, last + 1, 1))
    ):
        part = msgspec.structs.replace(
            whole,
            start=first,
            length=end - first,
            token_ids=whole.token_ids[first:end],
            samples=whole.samples if end > last else (),
        )
        runner.execute(StepPlan(step, (part,)))
        assert queue.num_replays == num_replays
    runner.execute(StepPlan(3, (next_of(3, 0),)))
    assert queue.num_replays == 2


def test_steps_with_penalties_are_replayed_and_wait_for_no_token():
    queue = RecordingQueue()
    runner = captured(queue)
    while runner.has_uncaptured:
        runner.capture_next()
    queue.num_waits = 0
    limits = msgspec.structs.replace(LIMITS, eos_token_ids=())
    world = World(runner, random.Random(0), 2, limits)
    for prompt in PROMPTS[:4]:
        world.ask(prompt, Sampling(seed=1, max_tokens=12, penalties=Penalties(99.0)))
    while world.turn():
        pass
    assert [len(set(said)) for said in world.said.values()] == [12] * 4, (
        "no token comes twice"
    )
    assert queue.num_replays >= 10
    assert not queue.num_waits, "a step waits for the one before it"


@pytest.mark.parametrize("num_guessing", [1, 4])
def test_steps_with_guesses_are_replayed_beside_sequences_without_any(num_guessing):
    """Of four sequences; those with penalties guess nothing."""
    limits = msgspec.structs.replace(GUESSING, eos_token_ids=())
    guessing = Sampling(seed=1, max_tokens=24, temperature=0.0, logprobs=2)
    others = Sampling(seed=1, max_tokens=24, penalties=Penalties(presence=0.5))
    found = []
    for runner in (
        captured(RecordingQueue(), num_guesses=NUM_GUESSES),
        stand_in(NUM_BLOCKS, RecordingQueue(), EOS),
    ):
        world = World(runner, random.Random(0), 1, limits)
        for number in range(4):
            sampling = guessing if number < num_guessing else others
            world.ask(PROMPTS[1], sampling)
        while world.turn():
            pass
        with_guesses = [
            (result, is_replayed)
            for plan, result, is_replayed in world.done
            if any(part.num_guesses for part in plan.slices)
        ]
        assert len(with_guesses) > 3
        found.append(with_guesses)
    assert [is_replayed for _, is_replayed in found[0]] == [True] * len(found[0])
    for (ours, _), (theirs, is_replayed) in zip(*found, strict=True):
        assert not is_replayed
        assert ours.tokens == theirs.tokens
        for (_, own), (_, other) in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [one.rank for one in own] == [one.rank for one in other]
            assert [one.logprob for one in own] == pytest.approx(
                [one.logprob for one in other], rel=1e-6
            )


@pytest.mark.parametrize(("spare_words", "num_eager"), [(SPARE_WORDS, 0), (1, 1)])
def test_masks_and_log_probabilities_come_after_a_replay(
    spare_words, num_eager, folder, monkeypatch
):
    """But for log probabilities where ids are held back, as their logits are overwritten.

    A step that finds no room, such as the first one, is padded all the same.
    """
    monkeypatch.setattr("baton.model.runner.runner.SPARE_WORDS", spare_words)
    allowed = range(65, 80)
    others = set(range(SHAPE.vocab_size)) - {*allowed}
    masked = Sampling(
        seed=10, max_tokens=14, bad_words=tuple((token,) for token in sorted(others))
    )
    shown = Sampling(seed=11, max_tokens=14, logprobs=3)
    samplings = (
        masked,
        shown,
        msgspec.structs.replace(masked, logprobs=0),
        msgspec.structs.replace(SAMPLINGS[1], logprobs=5),
        SAMPLINGS[0],
    )
    queue = RecordingQueue()
    runners = (
        captured(queue, masks(folder)),
        stand_in(NUM_BLOCKS, RecordingQueue(), EOS, masks=masks(folder)),
    )
    found: list[list[StepResult]] = [[], []]
    for results, one in zip(found, runners, strict=True):
        for step in range(6):
            parts = (
                msgspec.structs.replace(
                    next_of(number, step - 1) if step else prompt_of(number),
                    sampling=sampling,
                    past=None if step else (),
                )
                for number, sampling in enumerate(samplings)
            )
            results.append(one.execute(StepPlan(step, tuple(parts))))
    num_replays = len(found[0]) - num_eager
    assert queue.num_replays == num_replays
    for replayed, eager in zip(*found, strict=True):
        assert replayed.tokens == eager.tokens
        assert [index for index, _ in replayed.logprobs] == [1, 2, 3]
        for (_, ours), (_, theirs) in zip(
            replayed.logprobs, eager.logprobs, strict=True
        ):
            (one,) = ours
            (other,) = theirs
            assert one.rank == other.rank
            assert one.logprob == pytest.approx(other.logprob, rel=1e-6)
            assert dict(one.top) == pytest.approx(dict(other.top), rel=1e-6)
    assert {result.tokens[0][0] for result in found[0]} <= {*allowed}
    held_back = msgspec.structs.replace(shown, min_tokens=99)
    part = msgspec.structs.replace(next_of(5, 0), sampling=held_back, token_ids=(9,))
    runners[0].execute(StepPlan(9, (part,)))
    assert queue.num_replays == num_replays


def prompt_of(number: int) -> Slice:
    tokens = tuple(PROMPTS[1 + number % 5])
    return Slice(
        Key(RequestId(f"s{number}")),
        0,
        len(tokens),
        tokens,
        blocks_of(number),
        (0,),
        SAMPLINGS[number % 3],
        len(tokens),
    )


def next_of(number: int, step: int) -> Slice:
    length = len(PROMPTS[1 + number % 5])
    return Slice(
        Key(RequestId(f"s{number}")),
        length + step,
        1,
        (),
        blocks_of(number),
        (0,),
        SAMPLINGS[number % 3],
        length,
    )


def blocks_of(number: int) -> tuple[int, ...]:
    return tuple(range(number * 6, number * 6 + 6))


def test_captured_steps_are_gone_as_soon_as_their_runner_drops_them():
    """NCCL would wait for a graph that something still holds before it ends a group."""
    kept: list[weakref.ref[StepWork]] = []

    class Noting(RecordingQueue):
        def capture(self, work: StepWork) -> StepWork:
            replay = super().capture(work)
            kept.append(weakref.ref(replay))
            return replay

    runner = captured(Noting())
    runner.execute(StepPlan(1, (prompt_of(4),)))
    runner.execute(StepPlan(2, (next_of(4, 0),)))
    assert all(replay() is not None for replay in kept)
    runner.drop_graphs()
    assert [replay for replay in kept if replay() is not None] == []


SIZES = (Bucket(1, 1), Bucket(2, 2), Bucket(4, 4), Bucket(64, 8), Bucket(96, 8))


class Counting(RecordingQueue):
    """Counts captures, each of which has to wait for the step before it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_captures = 0

    def capture(self, work: StepWork) -> StepWork:
        self.num_captures += 1
        assert self.num_waits >= self.num_captures, "a replay may read its inputs"
        return super().capture(work)


def test_the_largest_steps_are_captured_at_the_start_and_others_when_they_come():
    """On demand as well as while a node is idle, but not beside a step that is launched."""
    queue = Counting()
    runner = stand_in(NUM_BLOCKS, queue, EOS)
    runner.capture(SIZES, no_progress)
    assert queue.num_captures == 2
    runner.launch(StepPlan(0, (prompt_of(0),)))
    assert queue.num_captures == 3, "64 tokens"
    runner.capture_next()
    assert queue.num_captures == 3, "a step is launched"
    said = [runner.collect().tokens]
    runner.capture_next()
    assert queue.num_captures == 4, "the smallest"
    two = (next_of(0, 0), prompt_of(1))
    said += [runner.execute(StepPlan(1, (one,))).tokens for one in two]
    assert queue.num_captures == 4
    pair = (next_of(0, 1), next_of(1, 0))
    said += [runner.execute(StepPlan(2, pair)).tokens for _ in range(2)]
    assert queue.num_captures == len(SIZES)
    assert queue.num_replays == 5
    assert not runner.has_uncaptured
    eager = stand_in(NUM_BLOCKS, RecordingQueue(), EOS)
    steps = ((prompt_of(0),), *((one,) for one in two), pair, pair)
    expected = [eager.execute(StepPlan(0, step)).tokens for step in steps]
    assert said == expected


def test_a_node_captures_while_nothing_is_submitted():
    """On the thread that launches; what is submitted meanwhile comes after one capture."""
    queue = Counting()
    results: SimpleQueue[object] = SimpleQueue()

    def load(progress: Progress) -> LoadedRank:
        runner = stand_in(NUM_BLOCKS, queue, EOS)
        runner.capture(SIZES, progress)
        return LoadedRank(runner, *[None] * 4)

    config = ClusterConfig()
    profiler = StepProfiler(config, Epoch("e"))
    threads = StepThreads(StepCpus(config.engine), results.put, profiler)
    runner = threads.start(load, no_progress).runner
    until(lambda: queue.num_captures > 2)
    threads.submit(StepPlan(0, (prompt_of(0),)))
    eager = stand_in(NUM_BLOCKS, RecordingQueue(), EOS)
    result = results.get(timeout=WAIT_S)
    assert isinstance(result, StepResult)
    assert result.tokens == eager.execute(StepPlan(0, (prompt_of(0),))).tokens
    until(lambda: not runner.has_uncaptured)
    assert queue.num_captures == len(SIZES)
    assert threads.close(WAIT_S)


def test_several_ranks_capture_all_steps_before_they_serve(monkeypatch):
    """Ranks may be idle at different times, and a captured step may have collectives."""
    queue = Counting()
    runner = stand_in(NUM_BLOCKS, queue, EOS)
    monkeypatch.setattr(type(runner.decoder.ranks), "size", 2, raising=False)
    runner.capture(SIZES[:3], no_progress)
    assert queue.num_captures == 3
    assert not runner.has_uncaptured


def test_the_time_of_a_step_is_not_that_of_its_capture(monkeypatch):
    now_s = 1.0

    class Slow(Counting):
        def capture(self, work: StepWork) -> StepWork:
            nonlocal now_s
            now_s += 5.0
            return super().capture(work)

    queue = Slow()
    runner = stand_in(NUM_BLOCKS, queue, EOS)
    monkeypatch.setattr(runner, "_clock", lambda: now_s)
    runner.capture(SIZES, no_progress)
    captured_s = now_s
    result = runner.execute(StepPlan(0, (prompt_of(0),)))
    assert now_s == captured_s + 5.0
    assert result.started_s == result.ended_s == now_s


def test_nothing_is_captured_while_a_result_is_collected():
    """The thread that launches is free then, but the device is not."""

    class Collecting(Counting):
        def collect(self) -> list[int]:
            runner.capture_next()
            return super().collect()

    queue = Collecting()
    runner = stand_in(NUM_BLOCKS, queue, EOS)
    runner.capture(SIZES, no_progress)
    runner.launch(StepPlan(0, (prompt_of(0),)))
    num_captures = queue.num_captures
    runner.collect()
    assert queue.num_captures == num_captures
    runner.capture_next()
    assert queue.num_captures == num_captures + 1


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory"),
        (OSError(28, "No space left on device"), "No space left"),  # of Triton's cache
    ],
)
def test_a_step_that_cannot_be_captured_runs_eagerly(error, problem, caplog):
    """A node that serves goes on when one more step cannot be captured."""

    class Full(Counting):
        def capture(self, work: StepWork) -> StepWork:
            if self.num_captures == 2:
                raise error
            return super().capture(work)

    queue = Full()
    runner = stand_in(NUM_BLOCKS, queue, EOS)
    runner.capture(SIZES, no_progress)
    eager = stand_in(NUM_BLOCKS, RecordingQueue(), EOS)
    for step in ((prompt_of(0),), (next_of(0, 0),)):
        plan = StepPlan(0, step)
        assert runner.execute(plan).tokens == eager.execute(plan).tokens
    assert not runner.has_uncaptured
    assert not queue.num_replays
    (said,) = caplog.records
    assert problem in said.fields["problem"]


def test_a_table_is_extended_and_sent_whole_only_when_it_is_another():
    tables = DeviceTables(2, 8, torch.device("cpu"))
    width = 8

    def changed(name: str, *blocks: int) -> list[tuple[int, int]]:
        changes: tuple[list[int], list[int]] = ([], [])
        row = tables.follow(key(name), blocks, changes)
        return [
            (place - row * width, block) for place, block in zip(*changes, strict=True)
        ]

    assert changed("one", 5, 6) == [(0, 5), (1, 6)]
    assert changed("one", 5, 6) == []
    assert changed("one", 5, 6, 9) == [(2, 9)]
    assert changed("one", 5, 7, 9) == [(0, 5), (1, 7), (2, 9)], (
        "a key that was used again"
    )
    assert changed("two", 1) == [(0, 1)]
    assert changed("one", 5, 7, 9, 2) == [(3, 2)]
    assert changed("three", 4) == [(0, 4)], "in the row that was named least recently"
    assert changed("one", 5, 7, 9, 2) == []
    assert changed("two", 1) == [(0, 1)]


def test_a_capture_waits_for_what_other_streams_have_written(monkeypatch):
    """Weights come by the default stream, a graph's inputs by the one of the calling thread."""
    done: list[str] = []

    class Stream:
        def __init__(self, _device: torch.device, priority: int) -> None:
            assert priority < 0, "a copy of blocks would come first"

        def wait_stream(self, other: str) -> None:
            done.append(f"wait for {other}")

        def synchronize(self) -> None:
            done.append("synchronize")

    for name, replacement in {
        "Stream": Stream,
        "CUDAGraph": SimpleNamespace,
        "graph_pool_handle": lambda: None,
        "set_device": lambda _device: None,
        "default_stream": lambda _device: "default",
        "current_stream": lambda _device: "current",
        "stream": lambda _stream: nullcontext(),
        "graph": lambda *_, **__: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)

    def work() -> torch.Tensor:
        done.append("work")
        return torch.zeros(1)

    queue = CudaQueue(torch.device("cuda", 0))
    assert isinstance(queue, GraphQueue)
    assert not isinstance(HostQueue(), GraphQueue)
    assert done == [], "tables and rings are made after the queue"
    queue.capture(work)
    assert done == [
        "wait for default",
        "wait for current",
        "work",
        "synchronize",
        "work",
    ]
