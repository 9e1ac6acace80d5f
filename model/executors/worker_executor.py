"""An `Executor` with one process per rank: it spawns workers, sends plans and gathers results.

Every plan goes to every rank; `poll` returns a result when all ranks have finished the step and
agree on its tokens. A rank that dies or fails ends the node. Only `start` and `close` block.
"""

import os
import select
import signal
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import assert_never

import msgspec

from baton.kv_transfer.interfaces import AgentCommand, AgentEvent, TransferPort
from baton.model.executors.worker_messages import (
    AdapterRead,
    FromWorker,
    Loaded,
    Loading,
    LoadRank,
    MessageSocket,
    ProfileRank,
    ReadAdapter,
    RunStep,
    StepDone,
    ToWorker,
    WorkerFailed,
)
from baton.model.runner.rank_plan import plan_rank
from baton.node.executor import (
    RANK_KILLED,
    AdapterLoad,
    AdapterOutcome,
    ExecutorInfo,
    Progress,
)
from baton.node.scheduling.plan import StepPlan, StepResult
from baton.protocol.config import ClusterConfig, EngineConfig
from baton.protocol.errors import ConfigError, Failure, InvariantBroken, NodeError
from baton.protocol.ids import Epoch
from baton.runtime.clock import Standstill, monotonic
from baton.runtime.host import VISIBLE_GPUS, gpus_of, threads_per_rank
from baton.runtime.process import Child, Command

PROGRESS_EVERY_S = 0.5
EXIT_S = 0.5  # from the end of a worker's stream until its exit code is known
GRACE_S = 3.0  # out of the five seconds that a close may take
# The time to end after an error. A rank that waits for a dead one, as in a collective of NCCL,
# never ends by itself, and the routers should learn of the loss within half a second.
LOSS_GRACE_S = 0.3
WORKER = "baton.model.executors.worker"


class WorkerExecutor:
    def __init__(self, config: ClusterConfig, epoch: Epoch) -> None:
        self._config = config
        self._epoch = epoch
        self._workers: list[_RankProcess] = []
        self._epoll = select.epoll()
        self._error: NodeError | ConfigError | None = None

    def start(self, progress: Progress) -> ExecutorInfo:
        """Spawn the workers and load. Raises the error of the first rank that fails."""
        size = self._config.engine.tensor_parallel_size
        config, is_on_gpus = _settled(self._config)
        with _meeting(size) as (memory, peers):
            for rank in range(size):
                env = environment_of(rank, config.engine, is_on_gpus=is_on_gpus)
                worker = _RankProcess(rank, env, (memory, *peers[rank]))
                self._workers.append(worker)
                self._epoll.register(worker.steps, select.EPOLLIN)
                load = LoadRank(config, self._epoch, rank, memory, peers[rank])
                self._send(worker, load)
        standstill = Standstill(self._config.node.start_timeout_s)
        while waiting := [worker for worker in self._workers if worker.info is None]:
            self._receive(PROGRESS_EVERY_S)
            if self._error is not None:
                raise self._error
            if standstill.lasts([worker.progress for worker in self._workers]):
                raise NodeError(
                    "the ranks make no progress in loading (node.start_timeout_s)"
                )
            # The node watches as well, and the progress of any rank is that of its start.
            _, done, total = zip(
                *(worker.progress for worker in self._workers), strict=True
            )
            progress(waiting[0].progress[0], sum(done), sum(total))
        return _combined([worker.info for worker in self._workers if worker.info])

    def submit(self, plan: StepPlan) -> None:
        for worker in self._workers:
            self._send(worker, RunStep(plan))

    def profile(self, name: str) -> None:
        for worker in self._workers:
            self._send(worker, ProfileRank(name))

    def load_adapter(self, load: AdapterLoad) -> None:
        for worker in self._workers:
            self._send(worker, ReadAdapter(load))

    def poll_adapter(self) -> AdapterOutcome | None:
        if not self._workers or not all(worker.adapters for worker in self._workers):
            return None
        outcomes = [worker.adapters.popleft() for worker in self._workers]
        failed = [outcome for outcome in outcomes if outcome.problem]
        if not failed and len({outcome.digest for outcome in outcomes}) > 1:
            problem = "its files were changed while they were read"
            return msgspec.structs.replace(outcomes[0], problem=problem)
        return (failed or outcomes)[0]

    def poll(self) -> StepResult | None:
        self._receive(0.0)
        if self._workers and all(worker.results for worker in self._workers):
            return _agreed([worker.results.popleft() for worker in self._workers])
        if self._error is not None:
            raise self._error
        return None

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def ports(self) -> Sequence[TransferPort]:
        return [worker.port for worker in self._workers]

    @property
    def pids(self) -> Sequence[int]:
        """Return the workers' process ids, in rank order."""
        return [worker.child.pid for worker in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            worker.steps.close()
            worker.port.close()
        deadline_s = monotonic() + (GRACE_S if self._error is None else LOSS_GRACE_S)
        for worker in self._workers:
            if not worker.child.wait(deadline_s):
                worker.child.kill()
                worker.child.wait(monotonic() + 1.0)
        self._workers = []
        self._epoll.close()

    def _send(self, worker: "_RankProcess", message: ToWorker) -> None:
        worker.steps.send(message)
        self._watch(worker)

    def _watch(self, worker: "_RankProcess") -> None:
        """Watch for room, too, while a plan larger than the socket's buffer is being sent."""
        unsent = select.EPOLLOUT if worker.steps.has_unsent else 0
        if not worker.steps.is_closed:
            self._epoll.modify(worker.steps, select.EPOLLIN | unsent)

    def _receive(self, timeout_s: float) -> None:
        """Handle all messages of the workers, after waiting up to `timeout_s` for the first."""
        if self._epoll.closed:
            return
        by_fd = {worker.steps.fileno(): worker for worker in self._workers}
        for descriptor, _ in self._epoll.poll(timeout_s):
            worker = by_fd[descriptor]
            worker.steps.flush()
            for message in worker.steps.receive():
                self._take(worker, message)
            self._watch(worker)
            if worker.steps.is_closed:
                self._epoll.unregister(descriptor)
                loss = worker.loss()
                # The other ranks fail because of it, and may report that first.
                if self._error is None or loss.code == RANK_KILLED:
                    self._error = loss

    def _take(self, worker: "_RankProcess", message: FromWorker) -> None:
        match message:
            case Loading(phase, done, total):
                worker.progress = (phase, done, total)
            case Loaded(info):
                worker.info = info
            case StepDone(result):
                worker.results.append(result)
            case AdapterRead(outcome):
                worker.adapters.append(outcome)
            case WorkerFailed(failure):
                self._error = self._error or _error(worker.rank, failure)
            case _:
                assert_never(message)


class _RankProcess:
    """One rank's process, as its executor sees it."""

    def __init__(
        self, rank: int, env: tuple[tuple[str, str], ...], meeting: tuple[int, ...]
    ) -> None:
        ours, theirs = socket.socketpair()
        our_port, their_port = socket.socketpair()
        ours.setblocking(False)
        our_port.setblocking(False)
        self.rank = rank
        self.info: ExecutorInfo | None = None
        self.progress = ("start", 0, 1)
        self.results: deque[StepResult] = deque()
        self.adapters: deque[AdapterOutcome] = deque()
        self.steps = MessageSocket[FromWorker](ours, FromWorker)  # type: ignore[arg-type]
        self.port = RemotePort(rank, our_port)
        with theirs, their_port:
            self.child = Child(
                Command(
                    name=f"rank-{rank}",
                    args=(str(theirs.fileno()), str(their_port.fileno())),
                    module=WORKER,
                    env=env,
                    pass_fds=(theirs.fileno(), their_port.fileno(), *meeting),
                )
            )

    def loss(self) -> NodeError:
        """Return why the stream ended, if the process shows it."""
        if not self.child.wait(monotonic() + EXIT_S):
            return NodeError(f"rank {self.rank} closed its socket")
        code = self.child.exit_code
        last = self.child.tail[-1] if self.child.tail else "the process wrote nothing"
        text = f"rank {self.rank} ended with exit code {code}: {last}"
        is_killed = code in (-signal.SIGKILL, -signal.SIGTERM)
        return NodeError(text, code=RANK_KILLED) if is_killed else NodeError(text)


class RemotePort:
    """The `TransferPort` of a rank whose agent runs in its worker."""

    def __init__(self, rank: int, stream: socket.socket) -> None:
        self._rank = rank
        self._socket = MessageSocket[AgentEvent](stream, AgentEvent)  # type: ignore[arg-type]
        self._is_closed = False

    def send(self, command: AgentCommand) -> None:
        """Send a command. If the socket is full, the next `send` or `poll` sends the rest."""
        if not self._is_closed:
            self._socket.send(command)

    def poll(self) -> list[AgentEvent]:
        """Return new events. Raises `NodeError` once the worker is gone and no event is left."""
        if self._is_closed:
            return []
        self._socket.flush()
        events = self._socket.receive()
        if self._socket.is_closed and not events:
            raise NodeError(f"the transfer agent of rank {self._rank} is gone")
        return events

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._is_closed = True
        self._socket.close()


@contextmanager
def _meeting(size: int) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """Make what the ranks inherit: memory that all share, and a socket between each two."""
    with ExitStack() as stack:
        memory = os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
        stack.callback(os.close, memory)
        peers: list[list[int]] = [[] for _ in range(size)]
        for one, other in combinations(range(size), 2):
            ends = socket.socketpair()
            for rank, end in zip((one, other), ends, strict=True):
                peers[rank].append(stack.enter_context(end).fileno())
        yield memory, [tuple(descriptors) for descriptors in peers]


def environment_of(
    rank: int, engine: EngineConfig, *, is_on_gpus: bool
) -> tuple[tuple[str, str], ...]:
    """Return the environment of a rank: its threads and, on GPUs, the GPUs with its own first."""
    threads = ("OMP_NUM_THREADS", str(threads_per_rank(engine)))
    return (
        (threads, (VISIBLE_GPUS, ",".join(gpus_of(rank)))) if is_on_gpus else (threads,)
    )


def _combined(infos: Sequence[ExecutorInfo]) -> ExecutorInfo:
    """Return one info with the addresses and compute paths of all ranks; the rest must agree."""
    shared = {
        "ranks": tuple(address for info in infos for address in info.ranks),
        "batch_invariant": all(info.batch_invariant for info in infos),
        "has_two_orders": any(info.has_two_orders for info in infos),
        "compute": "+".join(dict.fromkeys(info.compute for info in infos)),
        "draft_cost": infos[0].draft_cost,  # which each has measured
    }
    info = msgspec.structs.replace(infos[0], **shared)
    # Only the first rank has read all weights, so the models of the others are not compared.
    for rank, other in enumerate(infos):
        if msgspec.structs.replace(other, model=info.model, **shared) != info:
            raise InvariantBroken(
                f"rank {rank} loaded another model or pool than rank 0"
            )
    return info


def _settled(config: ClusterConfig) -> tuple[ClusterConfig, bool]:
    """Return the settings of each rank, and whether each rank has a GPU of its own.

    The size of a pool in host memory is settled here, since each rank would find less memory free.
    """
    plan = plan_rank(config, config.engine.tensor_parallel_size)
    cache = msgspec.structs.replace(config.cache, num_blocks=plan.num_blocks)
    return msgspec.structs.replace(config, cache=cache), plan.device.type == "cuda"


def _agreed(results: Sequence[StepResult]) -> StepResult:
    """Return one result for all ranks, which must agree on the tokens, or their KV would differ."""
    first = results[0]
    # A rank that has not compiled a grammar yet has no tokens, and then none counts.
    tokens = tuple(
        () if () in every else every[0]
        for every in zip(*(result.tokens for result in results), strict=True)
    )
    for rank, result in enumerate(results):
        pairs = zip(result.tokens, tokens, strict=True)
        if result.step_id != first.step_id or any(
            both not in ((), ours) for ours, both in pairs
        ):
            raise InvariantBroken(
                f"step {first.step_id}: rank {rank} sampled other tokens than rank 0"
            )
    return msgspec.structs.replace(
        first,
        tokens=tokens,
        failed=tuple(
            one for one in first.failed if all(one in each.failed for each in results)
        ),
        started_s=min(result.started_s for result in results),
        ended_s=max(result.ended_s for result in results),
    )


def _error(rank: int, failure: Failure) -> NodeError | ConfigError:
    if failure.code == ConfigError.code:
        return ConfigError(failure.message)
    return NodeError(f"rank {rank} failed: {failure.message}")
