"""The process of one rank: it loads the rank, then runs plan after plan for its executor.

`python -m baton.model.executors.worker STEPS PORT`, where both are inherited socket descriptors.
The main thread receives plans for the threads that compute them; another thread passes on the
transfer agent's commands and events. The process ends when its executor's end of the sockets
closes, and with a non-zero code after any error.
"""

import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import assert_never

from baton.kv_transfer.interfaces import AgentCommand, TransferPort
from baton.model.executors.profiler import StepProfiler
from baton.model.executors.step_threads import StepCpus, StepThreads
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
from baton.model.runner.rank import load_rank
from baton.model.runner.rank_plan import plan_rank
from baton.model.tensor_parallel import (
    GroupRanks,
    Ranks,
    SharedMemoryRanks,
    SingleRank,
    join,
)
from baton.node.executor import AdapterOutcome
from baton.node.scheduling.plan import StepResult
from baton.protocol.errors import BatonError, InvariantBroken, NodeError
from baton.runtime.log import logger, setup_process_log
from baton.runtime.process import die_with_parent

CLOSE_S = 2.0  # time for the running step to end once the executor is gone

log = logger("worker")


class Worker:
    def __init__(self, steps: socket.socket, port: socket.socket) -> None:
        self._steps = MessageSocket[ToWorker](steps, ToWorker)  # type: ignore[arg-type]
        self._port = port
        # An error of a step, which closes the socket of steps.
        self._error: BatonError | None = None

    def run(self) -> int:
        """Load, compute until the executor is gone, and return the exit code."""
        try:
            first = self._steps.wait()
            if first is None:
                return 0
            if not isinstance(first, LoadRank):
                raise InvariantBroken("a worker's first message must load it")
            setup_process_log(first.config.log, f"rank-{first.rank}")
            self._serve(first)
        except Exception as error:
            if self._steps.is_closed:
                return 1
            if not isinstance(error, BatonError):
                log.exception("the worker failed")
            self._send(WorkerFailed(_as_baton(error).to_failure()))
            return 1
        return int(self._error is not None)

    def _serve(self, load: LoadRank) -> None:
        profiler = StepProfiler(load.config, load.epoch, load.rank)
        threads = StepThreads(StepCpus(load.config.engine), self._take, profiler)
        ranks = _join(load)
        start = partial(load_rank, load.config, load.epoch, ranks)
        rank = threads.start(start, self._progress)
        pump = PortPump(rank.port, self._port, self._send)
        pump.start()
        try:
            self._send(Loaded(rank.info))
            while (message := self._steps.wait()) is not None:
                match message:
                    case RunStep(plan=plan):
                        threads.submit(plan)
                    case ProfileRank(name=name):
                        threads.submit(name)
                    case ReadAdapter(load=adapter):
                        threads.load_adapter(adapter)
                    case LoadRank():
                        raise InvariantBroken("a worker is loaded once")
                    case _:
                        assert_never(message)
        finally:
            has_ended = threads.close(CLOSE_S)
            pump.stop()
            rank.close()
        # A rank that fails leaves nothing in order: the others may wait for it in a collective.
        if isinstance(ranks, GroupRanks) and has_ended and self._error is None:
            ranks.leave()

    def _take(self, outcome: StepResult | NodeError | AdapterOutcome) -> None:
        if isinstance(outcome, StepResult):
            self._send(StepDone(outcome))
            return
        if isinstance(outcome, AdapterOutcome):
            self._send(AdapterRead(outcome))
            return
        try:
            raise outcome
        except NodeError:
            log.exception("the worker failed")
        self._error = outcome
        self._send(WorkerFailed(outcome.to_failure()))
        self._steps.close()  # the main thread waits for a plan, and this ends its wait

    def _progress(self, phase: str, done: int, total: int) -> None:
        self._send(Loading(phase, done, total))

    def _send(self, message: FromWorker) -> None:
        self._steps.send(message)


class PortPump:
    """The thread between the executor's socket and this rank's transfer agent."""

    def __init__(
        self,
        port: TransferPort,
        stream: socket.socket,
        send: Callable[[FromWorker], None],
    ) -> None:
        stream.setblocking(False)
        self._port = port
        self._socket = MessageSocket[AgentCommand](stream, AgentCommand)  # type: ignore[arg-type]
        self._send = send
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="port pump", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._socket.close()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.exception("the transfer agent's thread failed")
            self._send(WorkerFailed(_as_baton(error).to_failure()))

    def _work(self) -> None:
        poller = select.poll()
        for descriptor in (self._wake, self._port.fileno()):
            poller.register(descriptor, select.POLLIN)
        while not self._socket.is_closed:
            unsent = select.POLLOUT if self._socket.has_unsent else 0
            poller.register(self._socket.fileno(), select.POLLIN | unsent)
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._wake in ready:
                return
            for command in self._socket.receive():
                self._port.send(command)
            for event in self._port.poll():
                self._socket.send(event)
            self._socket.flush()


def _join(load: LoadRank) -> Ranks:
    if not load.peers:
        return SingleRank()
    config = load.config
    size = len(load.peers) + 1
    device = plan_rank(config, size).device
    if device.type == "cuda":
        # Ranks that do not meet report it before the executor gives them up.
        place = (load.rank, size)
        timeout_s = config.node.start_timeout_s / 2
        is_ordered = config.engine.deterministic == "true"
        return join(device, place, load.memory, timeout_s, is_ordered=is_ordered)
    peers = [socket.socket(fileno=descriptor) for descriptor in load.peers]
    return SharedMemoryRanks(load.rank, load.memory, peers)


def _as_baton(error: Exception) -> BatonError:
    return error if isinstance(error, BatonError) else NodeError(repr(error))


def main(arguments: list[str]) -> int:
    die_with_parent()
    if len(arguments) != 2 or not all(argument.isdecimal() for argument in arguments):
        sys.stderr.write(
            "usage: baton.model.executors.worker STEPS_FD PORT_FD (spawned by an executor)\n"
        )
        return 2
    steps, port = (socket.socket(fileno=int(argument)) for argument in arguments)
    return Worker(steps, port).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
