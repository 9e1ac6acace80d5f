"""Every executor keeps the contract on which a node's loop relies."""

import json
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import msgspec
import pytest

from baton.kv_transfer.interfaces import (
    AddPeer,
    AgentEvent,
    BlockSlice,
    PeerRank,
    PeerUp,
    Read,
    ReadEnded,
    TransferPort,
)
from baton.model.executors import worker_executor
from baton.model.executors.local_executor import InProcessExecutor
from baton.model.executors.worker_executor import WorkerExecutor
from baton.model.executors.worker_messages import (
    FromWorker,
    Loading,
    MessageSocket,
    ToWorker,
)
from baton.model.loading.adapters import PreparedAdapter
from baton.model.runner.rank import LoadedRank
from baton.model.runner.runner import Runner
from baton.node.executor import (
    RANK_KILLED,
    AdapterLoad,
    AdapterOutcome,
    Executor,
    ExecutorInfo,
)
from baton.node.scheduling.plan import Slice, StepPlan, StepResult
from baton.protocol.adapters import lora_version
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.protocol.ids import Epoch, Key, RequestId
from baton.protocol.sampling import Sampling
from tests.support import gloo_worker
from tests.support.adapters import write_adapter
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.compute import model_fingerprint, no_progress
from tests.support.node_threads import block_bytes
from tests.support.oracle import Oracle, count_ties

BLOCK = 16
NUM_BLOCKS = 64
WAIT_S = 30.0
GREEDY = Sampling(seed=1, max_tokens=100, temperature=0.0)
PROMPT = tuple(10 + (i * i + 7 * i) % 241 for i in range(37))
KINDS = ("in process", "one worker", "two ranks")
SLOW_KINDS = (
    "in process",
    pytest.param("one worker", marks=pytest.mark.release),
    "two ranks",
)
SOURCE = Epoch("source")
READER = Epoch("reader")

names = count()


def config_of(kind: str, folder: Path | None = None, **more: object) -> ClusterConfig:
    ranks = 2 if kind == "two ranks" else 1
    return tiny_cluster(
        folder or "qwen3",
        cache={"num_blocks": NUM_BLOCKS, "block_size": BLOCK},
        engine={"device": "cpu", "tensor_parallel_size": ranks},
        transfer={"transport": "shm"},
        **more,
    )


def executor_of(
    kind: str, config: ClusterConfig | None = None, epoch: Epoch = SOURCE
) -> Executor:
    make: Callable[[ClusterConfig, Epoch], Executor]
    make = InProcessExecutor if kind == "in process" else WorkerExecutor
    return make(config or config_of(kind), epoch)


@contextmanager
def started(
    kind: str, epoch: Epoch = SOURCE
) -> Iterator[tuple[Executor, ExecutorInfo]]:
    with closing(executor_of(kind, epoch=epoch)) as executor:
        yield executor, executor.start(no_progress)


@pytest.fixture(scope="module", params=KINDS)
def executor(request):
    with started(request.param) as (executor, _):
        yield executor


@pytest.fixture(scope="module")
def expected():
    return Oracle(model_folder("qwen3")).greedy(list(PROMPT), 24)


class Steps:
    """Plans with ids of their own, one sequence per name."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._ids = count()

    def submit(self, *slices: Slice, copies: tuple[tuple[int, int], ...] = ()) -> int:
        step_id = next(self._ids)
        self.executor.submit(StepPlan(step_id, slices, copies))
        return step_id

    def result(self) -> StepResult:
        """The next one; its coming must make the descriptor readable."""
        while (result := self.executor.poll()) is None:
            assert readable(self.executor.fileno()), "no step ended"
        return result

    def tokens(
        self, *slices: Slice, copies: tuple[tuple[int, int], ...] = ()
    ) -> list[int]:
        step_id = self.submit(*slices, copies=copies)
        result = self.result()
        assert result.step_id == step_id
        return [token for drawn in result.tokens for token in drawn]


def readable(descriptor: int, wait_s: float = WAIT_S) -> bool:
    return bool(select.select([descriptor], [], [], wait_s)[0])


def new_key() -> Key:
    return Key(RequestId(f"sequence-{next(names)}"))


def prompt_slice(
    key: Key, blocks: Sequence[int], start: int = 0, end: int = len(PROMPT)
) -> Slice:
    samples = (0,) if end == len(PROMPT) else ()
    sampling = GREEDY if samples else None
    given = PROMPT[start:end]
    return Slice(
        key, start, end - start, given, tuple(blocks), samples, sampling, len(PROMPT)
    )


def decode_slice(
    key: Key, blocks: Sequence[int], position: int, token: int | None = None
) -> Slice:
    given = () if token is None else (token,)
    return Slice(key, position, 1, given, tuple(blocks), (0,), GREEDY, len(PROMPT))


def test_chunks_and_chained_tokens_say_what_transformers_says(executor, expected):
    steps = Steps(executor)
    key = new_key()
    blocks = (5, 3, 9, 2)
    assert steps.tokens(prompt_slice(key, blocks, 0, 20)) == []
    got = steps.tokens(prompt_slice(key, blocks, 20))
    for position in range(len(PROMPT), len(PROMPT) + 23):
        got += steps.tokens(decode_slice(key, blocks, position))
    assert count_ties(expected, got) == 0


def test_a_profile_that_cannot_be_written_costs_no_step(executor, expected):
    steps = Steps(executor)
    key = new_key()
    blocks = (5, 3, 9, 2)
    executor.profile("a")
    got = steps.tokens(prompt_slice(key, blocks))
    executor.profile("b/is-in-no-folder")  # writes the first and begins another
    got += steps.tokens(decode_slice(key, blocks, len(PROMPT)))
    executor.profile("")
    executor.profile("")
    for position in range(len(PROMPT) + 1, len(PROMPT) + 23):
        got += steps.tokens(decode_slice(key, blocks, position))
    assert count_ties(expected, got) == 0


@pytest.mark.release
def test_a_trace_is_whole_once_its_worker_has_ended(tmp_path):
    config = config_of("one worker", log={"records": str(tmp_path)}, node={"id": "d0"})
    with closing(executor_of("one worker", config)) as executor:
        executor.start(no_progress)
        executor.profile("a")
        Steps(executor).tokens(prompt_slice(new_key(), (5, 3, 9)))
        executor.profile("")
    assert json.loads((tmp_path / "a-d0-rank0.json").read_text())["traceEvents"]


def test_two_steps_may_be_unsettled_and_settle_in_order(executor, expected):
    steps = Steps(executor)
    key = new_key()
    blocks = (11, 12, 13, 14)
    steps.submit(prompt_slice(key, blocks))
    steps.submit(decode_slice(key, blocks, len(PROMPT)))
    results = [steps.result(), steps.result()]
    assert [result.step_id for result in results] == [0, 1]
    assert [result.tokens[0][0] for result in results] == expected.token_ids[:2]
    assert all(result.started_s <= result.ended_s for result in results)
    assert results[0].ended_s <= results[1].ended_s
    assert executor.poll() is None


def test_choices_of_one_prompt_draw_apart_and_chain_apart(executor):
    steps = Steps(executor)
    key = new_key()
    blocks = (40, 41, 42)
    hot = Sampling(seed=3, max_tokens=9, temperature=3.0)
    given = Slice(key, 0, len(PROMPT), PROMPT, blocks, (0, 1, 2), hot, len(PROMPT))
    drawn = steps.tokens(given)
    assert len(set(drawn)) == 3
    second = Slice(key.of_choice(2), len(PROMPT), 1, (), blocks, (2,), hot, len(PROMPT))
    named = Slice(
        new_key().of_choice(2),
        len(PROMPT),
        1,
        (drawn[2],),
        blocks,
        (2,),
        hot,
        len(PROMPT),
    )
    assert steps.tokens(second) == steps.tokens(named)


@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_start_reports_progress_and_what_was_loaded(kind):
    phases: list[str] = []
    with closing(executor_of(kind)) as executor:
        info = executor.start(lambda *report: phases.append(report[0]))
        ranks = 2 if kind == "two ranks" else 1
        assert phases
        assert info.model == model_fingerprint(model_folder("qwen3"))
        assert (info.num_blocks, info.layout.block_size) == (NUM_BLOCKS, BLOCK)
        assert (info.vocab_size, info.max_model_len) == (1024, 8192)
        assert info.layout.block_bytes * ranks == block_bytes(
            model_folder("qwen3"), BLOCK
        )
        assert len(info.ranks) == len(executor.ports) == ranks


@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_a_folder_that_is_no_model_is_a_config_error(kind, tmp_path):
    executor = executor_of(kind, config_of(kind, tmp_path))
    with closing(executor), pytest.raises(ConfigError, match=r"config\.json"):
        executor.start(no_progress)


@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_close_ends_all_workers_and_may_come_twice_with_a_step_in_flight_or_before_start(
    kind,
):
    unstarted = executor_of(kind)
    unstarted.close()
    with started(kind) as (executor, _):
        pids = executor.pids if isinstance(executor, WorkerExecutor) else ()
        Steps(executor).submit(prompt_slice(new_key(), (1, 2, 3)))
        executor.close()
        executor.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_a_step_that_cannot_be_computed_ends_the_node(kind):
    with started(kind) as (executor, _):
        steps = Steps(executor)
        assert steps.tokens(prompt_slice(new_key(), (4, 5, 6), 0, 20)) == []
        # Nothing was sampled.
        steps.submit(decode_slice(new_key(), (1, 2, 3), len(PROMPT)))
        for _ in range(2):
            with pytest.raises(
                NodeError, match=r"(step 1|rank [01]) failed.*no token was sampled"
            ):
                steps.result()


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("one worker", 0),
        pytest.param("two ranks", 0, marks=pytest.mark.release),
        pytest.param("two ranks", 1, marks=pytest.mark.release),
    ],
)
def test_a_killed_worker_wakes_the_loop_with_a_node_error(kind, victim):
    with started(kind) as (executor, _):
        assert isinstance(executor, WorkerExecutor)
        steps = Steps(executor)
        steps.tokens(prompt_slice(new_key(), (1, 2, 3)))
        os.kill(executor.pids[victim], signal.SIGKILL)
        with pytest.raises(NodeError, match="exit code -9") as raised:
            steps.result()
        assert raised.value.code == RANK_KILLED


@pytest.mark.parametrize(
    "module",
    [
        worker_executor.WORKER,
        pytest.param(gloo_worker.__name__, marks=pytest.mark.release),
    ],
)
def test_a_rank_that_dies_inside_a_step_ends_the_others_wait(module, monkeypatch):
    monkeypatch.setattr(worker_executor, "WORKER", module)
    with started("two ranks") as (executor, _):
        assert isinstance(executor, WorkerExecutor)
        steps = Steps(executor)
        os.kill(executor.pids[1], signal.SIGSTOP)
        steps.submit(prompt_slice(new_key(), (1, 2, 3)))
        os.kill(executor.pids[1], signal.SIGKILL)
        with pytest.raises(NodeError):
            steps.result()


@pytest.mark.release
def test_a_rank_that_waits_for_a_dead_one_for_ever_is_ended_without_the_grace_of_the_others(
    monkeypatch,
):
    """As a collective of NCCL does; a rank that is stopped does not end by itself either."""
    monkeypatch.setattr(worker_executor, "GRACE_S", 3600.0)
    with started("two ranks") as (executor, _):
        assert isinstance(executor, WorkerExecutor)
        steps, (waiting, victim) = Steps(executor), executor.pids
        os.kill(waiting, signal.SIGSTOP)
        steps.submit(prompt_slice(new_key(), (1, 2, 3)))
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(NodeError) as raised:
            steps.result()
        assert raised.value.code == RANK_KILLED
    with pytest.raises(ProcessLookupError):
        os.kill(waiting, 0)


def test_ranks_of_a_process_group_compute_alike_and_leave_it_when_they_end(
    expected, monkeypatch
):
    """Over gloo; a group that is not left keeps NCCL waiting at the exit."""
    monkeypatch.setattr(worker_executor, "WORKER", gloo_worker.__name__)
    # A busy machine takes more than 3 s.
    monkeypatch.setattr(worker_executor, "GRACE_S", 60.0)
    with started("two ranks") as (executor, info):
        assert isinstance(executor, WorkerExecutor)
        steps = Steps(executor)
        key = new_key()
        blocks = (5, 3, 9)
        got = steps.tokens(prompt_slice(key, blocks))
        got += steps.tokens(decode_slice(key, blocks, len(PROMPT)))
        children = [worker.child for worker in executor._workers]
    assert got == expected.token_ids[:2]
    assert info.batch_invariant
    assert [child.exit_code for child in children] == [0, 0]


def test_a_rank_that_never_loads_is_given_up():
    slow = config_of("one worker", node={"start_timeout_s": 0.001})
    executor = executor_of("one worker", slow)
    with closing(executor), pytest.raises(NodeError, match="start_timeout_s"):
        executor.start(no_progress)


def test_a_plan_larger_than_a_socket_buffer_arrives(executor, expected):
    steps = Steps(executor)
    key = new_key()
    table = (1, 2, 3) + (0,) * 300_000
    steps.submit(prompt_slice(key, table))
    steps.submit(decode_slice(key, table, len(PROMPT)))
    drawn = [steps.result().tokens[0][0] for _ in range(2)]
    assert drawn == expected.token_ids[:2]


# --- ports --------------------------------------------------------------------------------------


def event_of(port: TransferPort) -> AgentEvent:
    while not (events := port.poll()):
        assert readable(port.fileno()), "the port said nothing"
    assert len(events) == 1
    return events[0]


@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_blocks_read_through_the_ports_continue_a_prompt_elsewhere(kind, expected):
    """The reader never computes the prompt; it decodes from what its ports have read."""
    remote = (7, 1, 4)
    local = (3, 8, 5)
    generations = (2, 9, 6)
    with started(kind) as (source, info), started(kind, READER) as (reader, _):
        source.submit(
            StepPlan(
                0,
                (prompt_slice(new_key(), remote),),
                generations=tuple(zip(remote, generations, strict=True)),
            )
        )
        assert Steps(source).result().tokens[0] == (expected.token_ids[0],)
        # A step that computes nothing publishes a generation, too.
        generations = (3, *generations[1:])
        source.submit(StepPlan(1, (), generations=((remote[0], generations[0]),)))
        published = Steps(source).result()
        assert (published.step_id, published.tokens) == (1, ())
        for rank, port in enumerate(reader.ports):
            owner = PeerRank(SOURCE, rank)
            block_bytes = info.layout.block_bytes
            whole = BlockSlice(0, 0, block_bytes)
            port.send(
                AddPeer(
                    owner, "shm", info.ranks[rank], info.num_blocks, block_bytes, whole
                )
            )
            assert isinstance(event_of(port), PeerUp)
            port.send(Read(1, owner, remote, local, generations))
            ended = event_of(port)
            assert isinstance(ended, ReadEnded)
            assert (ended.failure, ended.quiesced) == (None, True)
            assert ended.num_bytes == len(remote) * block_bytes
        steps = Steps(reader)
        key = new_key()
        got = steps.tokens(decode_slice(key, local, len(PROMPT), expected.token_ids[0]))
        got += steps.tokens(decode_slice(key, local, len(PROMPT) + 1))
        assert got == expected.token_ids[1:3]


class ScriptedRank:
    """A rank's process that only says how far it has loaded."""

    def __init__(self, rank: int, *_: object) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.rank = rank
        self.info = None
        self.progress = ("start", 0, 1)
        self.steps = MessageSocket[FromWorker](ours, FromWorker)
        self.far_end = MessageSocket[ToWorker](theirs, ToWorker)
        if rank:
            self.far_end.send(Loading("weights", 3, 9))


def test_the_progress_of_every_rank_is_the_progress_of_the_start(monkeypatch):
    """A node ended whose first rank had loaded, while another one still did."""
    monkeypatch.setattr(worker_executor, "_RankProcess", ScriptedRank)
    executor = WorkerExecutor(
        config_of("two ranks", node={"start_timeout_s": 2.0}), SOURCE
    )

    def progress(phase: str, done: int, total: int) -> None:
        if (phase, done, total) == ("start", 3, 10):
            raise StopIteration

    with pytest.raises(StopIteration):
        executor.start(progress)
    for rank in executor._workers:
        rank.steps.close()
        rank.far_end.close()


def test_an_adapter_that_cannot_take_effect_ends_no_step(monkeypatch):
    def broken(_runner: Runner, _prepared: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Runner, "put_adapter", broken)
    folder = model_folder("qwen3")
    room = {"path": str(folder), "allow_runtime_lora_updating": True, "max_loras": 1}
    with closing(
        executor_of("in process", config_of("in process", folder, model=room))
    ) as executor:
        executor.start(no_progress)
        executor.load_adapter(
            AdapterLoad("mine", str(write_adapter(folder, rank=4)), 0)
        )
        while (outcome := executor.poll_adapter()) is None:
            assert readable(executor.fileno()), "the load has no outcome"
            assert executor.poll() is None
        assert "no memory" in outcome.problem
        assert Steps(executor).tokens(prompt_slice(new_key(), range(3)))


@pytest.mark.parametrize("kind", ["in process", "two ranks"])
def test_an_adapter_is_loaded_while_steps_run(kind):
    folder = model_folder("qwen3")
    adapter = write_adapter(folder, ("q_proj", "up_proj"), rank=4)
    room = {"path": str(folder), "allow_runtime_lora_updating": True, "max_loras": 1}
    config = config_of(kind, folder, model=room)
    with closing(executor_of(kind, config)) as executor:
        executor.start(no_progress)
        steps = Steps(executor)

        def outcome_of(load: AdapterLoad) -> AdapterOutcome:
            executor.load_adapter(load)
            plain = steps.tokens(prompt_slice(new_key(), range(3)))
            while (outcome := executor.poll_adapter()) is None:
                assert readable(executor.fileno()), "no adapter was loaded"
                assert executor.poll() is None
            assert steps.tokens(prompt_slice(new_key(), range(3))) == plain
            return outcome

        gone = outcome_of(AdapterLoad("gone", "/nowhere", 0))
        assert "No such file" in gone.problem
        first = outcome_of(AdapterLoad("mine", str(adapter), 0))
        assert not first.problem
        again = outcome_of(AdapterLoad("mine", str(adapter), 1))
        assert again.digest == first.digest
        part = prompt_slice(new_key(), range(3, 6))
        lora = lora_version("mine", first.digest)
        assert steps.tokens(msgspec.structs.replace(part, lora=lora))
    with closing(executor_of(kind)) as executor:
        executor.start(no_progress)
        steps = Steps(executor)
        assert (
            "allow_runtime_lora_updating"
            in outcome_of(AdapterLoad("a", str(adapter), 0)).problem
        )


def test_an_adapter_that_is_read_after_the_end_wakes_nobody(monkeypatch):
    may_read = threading.Event()
    prepare = LoadedRank.prepare_adapter

    def late(rank: LoadedRank, load: AdapterLoad) -> tuple[PreparedAdapter, str]:
        assert may_read.wait(WAIT_S)
        return prepare(rank, load)

    monkeypatch.setattr(LoadedRank, "prepare_adapter", late)
    with closing(executor_of("in process")) as executor:
        executor.start(no_progress)
        descriptor = executor.fileno()
        executor.load_adapter(AdapterLoad("slow", "/nowhere", 0))
        (reading,) = (t for t in threading.enumerate() if t.name == "adapter")
    other = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        assert other == descriptor, "the number was not given again"
        may_read.set()
        reading.join(WAIT_S)
        assert not reading.is_alive()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)
