"""Run what clients make the router compute in processes of their own, with limits for each job.

A `Worker` starts one process with its first job. That process loads what its jobs need once, and
forks itself for each of them, so that a job costs milliseconds, has its own limits of CPU time and
memory, and can be killed at any moment without harm to another one. A job travels over a socket
pair of its own: the router sends the job and closes its half, and reads the reply up to the end. If
the router closes the pair because the client left or the time is over, the job is killed.

`serve` is the other end. It must never load torch.
"""

import asyncio
import contextlib
import gc
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

import msgspec

from baton.protocol.errors import (
    BatonError,
    Failure,
    Overloaded,
    RequestError,
    from_failure,
)
from baton.runtime.clock import monotonic
from baton.runtime.log import logger
from baton.runtime.process import Child, Command

# Running streams matter more than jobs.
NICE = 5
# For the process to load what its jobs need and to take a job.
START_S = 30.0
REAP_S = 1.0
MIB = 1024 * 1024
_READ_BYTES = 256 * 1024
_TAKEN = b"\x01"
# The limits of a job, which go to the process beside the job's socket: CPU seconds and bytes.
_LIMITS = struct.Struct("<dQ")
_MEMORY_FULL = -1  # takes the place of a signal's number

J = TypeVar("J")
R = TypeVar("R")

log = logger("router")


class Turns:
    """Lets so many jobs run at once. Where several clients have jobs that wait, they take turns."""

    def __init__(self, at_once: int) -> None:
        self._num_free = at_once
        # The next turn is that of the first client, whose jobs are in the order of their arrival.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, client: str) -> None:
        """Wait for a turn, which the caller must `release`."""
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # The turn came when the job had just been given up.
            if not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
                if turns:
                    self._waiting[client] = turns  # behind all other clients
                return
        self._num_free += 1


class Lane:
    """Jobs of one kind of cost: the limits of each, and how many may run at once.

    A job may wait `wall_s` for its turn, and then run as long.
    """

    def __init__(
        self, at_once: int, *, cpu_s: float, memory_mib: int, wall_s: float
    ) -> None:
        self.turns = Turns(at_once)
        self.cpu_s = cpu_s
        self.memory_mib = memory_mib
        self.wall_s = wall_s


class TooMuchWork(RequestError):
    """A job took more CPU time or memory than its lane allows."""

    code = "too_much_work"


class _Done(msgspec.Struct, tag=True):
    value: msgspec.Raw


class _Failed(msgspec.Struct, tag=True):
    failure: Failure


class _Broken(msgspec.Struct, tag=True):
    """The job met a bug."""

    trace: str


class _Ended(msgspec.Struct, tag=True):
    """The job's process ended by a signal, or had no more memory."""

    by_signal: int


_encode = msgspec.msgpack.encode
_End = _Done | _Failed | _Broken | _Ended
_END: msgspec.msgpack.Decoder[_End] = msgspec.msgpack.Decoder(_End)


class Worker(Generic[J, R]):
    """The router's end. It lives on one event loop; call `close` in the end."""

    def __init__(
        self, module: str, arguments: tuple[str, ...], reply: msgspec.msgpack.Decoder[R]
    ) -> None:
        """`python -m module DESCRIPTOR arguments...` must call `serve`."""
        self._module = module
        self._arguments = arguments
        self._reply = reply
        self._child: Child | None = None
        self._dropped: list[Child] = []  # killed, but not yet gone
        self._control: socket.socket | None = None
        # Since when the process has taken no job.
        self._waits_since_s: float | None = None
        self._is_closed = False

    async def run(self, job: J, lane: Lane, client: str = "") -> R:
        """Return the reply to a job of a client.

        Raises what the job raised, `TooMuchWork`, or `Overloaded` if it could not be done in time.
        """
        data = _encode(job)
        try:
            async with asyncio.timeout(lane.wall_s):
                await lane.turns.acquire(client)
            try:
                ended = await self._exchange(data, lane)
                if ended is None:
                    ended = await self._exchange(data, lane)
            finally:
                lane.turns.release()
        except TimeoutError:
            text = f"the request could not be read within {lane.wall_s:g} s: send it again later"
            raise Overloaded(text, code="worker_timeout") from None
        match ended:
            case _Done(value):
                return self._reply.decode(value)
            case _Failed(failure):
                raise from_failure(failure)
            case _Broken(trace):
                log.error("unhandled error in a job", module=self._module, trace=trace)
                raise BatonError("the router failed to handle this request")
            case _Ended(by_signal) if by_signal != signal.SIGKILL:
                raise TooMuchWork("the request takes too much work")
        text = "the process that works on requests ended: send the request again"
        raise Overloaded(text, code="worker_lost")

    def close(self) -> None:
        """End the process and its jobs. It may be called again."""
        self._is_closed = True
        self._drop()
        for child in self._dropped:
            child.wait(monotonic() + REAP_S)  # it takes milliseconds

    async def _exchange(self, data: bytes, lane: Lane) -> _End | None:
        """Return how a job ended; None if the process ended or hung before it took the job."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                child = self._hand_over(theirs, lane)
            if not await self._is_taken(ours):
                if child is self._child:
                    log.warning(
                        "a process that works on requests ended or hangs", pid=child.pid
                    )
                    self._drop()
                return None
            reply = bytearray()
            async with asyncio.timeout(lane.wall_s):
                # A job that is killed reads no more.
                with contextlib.suppress(ConnectionError):
                    await loop.sock_sendall(ours, data)
                    ours.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while received := await loop.sock_recv(ours, _READ_BYTES):
                        reply += received
        try:
            return _END.decode(reply)
        except msgspec.DecodeError:  # the process was killed beside its job
            return _Ended(signal.SIGKILL)

    async def _is_taken(self, ours: socket.socket) -> bool:
        """Wait for the process to take a job, which it may have to start for. False if it ended."""
        if self._waits_since_s is None:
            self._waits_since_s = monotonic()
        try:
            async with asyncio.timeout(START_S):
                taken = await asyncio.get_running_loop().sock_recv(ours, len(_TAKEN))
        except (TimeoutError, ConnectionError):
            return False
        if taken == _TAKEN:
            self._waits_since_s = None
        return taken == _TAKEN

    def _hand_over(self, theirs: socket.socket, lane: Lane) -> Child:
        """Give the process a job's socket, and start the process if there is none."""
        limits = _LIMITS.pack(lane.cpu_s, lane.memory_mib * MIB)
        self._dropped = [child for child in self._dropped if child.poll() is None]
        # Clients may leave sooner than a process that hangs is given up for one of their jobs.
        waits_since_s = self._waits_since_s
        hangs = waits_since_s is not None and monotonic() > waits_since_s + START_S
        if self._control is not None and not hangs:
            with contextlib.suppress(OSError):
                socket.send_fds(self._control, [limits], [theirs.fileno()])
                assert self._child is not None
                return self._child
        self._drop()
        if self._is_closed:
            raise Overloaded("the router is shutting down", code="shutting_down")
        control, end = socket.socketpair()
        control.setblocking(False)
        with end:
            arguments = (str(end.fileno()), *self._arguments)
            # One job is one process: the tokenizer must start no threads in it.
            env = (("TOKENIZERS_PARALLELISM", "false"),)
            command = Command(
                "worker", arguments, self._module, env, pass_fds=(end.fileno(),)
            )
            self._child = Child(command)
        self._control = control
        socket.send_fds(control, [limits], [theirs.fileno()])
        return self._child

    def _drop(self) -> None:
        """Kill the process, so that the next job starts another one."""
        if self._control is not None:
            self._control.close()
        if self._child is not None:
            self._child.kill()
            self._dropped.append(self._child)
        self._child = self._control = self._waits_since_s = None


# --- the process --------------------------------------------------------------------------------


def serve(
    descriptor: int, decoder: msgspec.msgpack.Decoder[J], answer: Callable[[J], object]
) -> None:
    """Fork for each job that the router hands over, until the router closes its end.

    `answer` returns the reply to a job, or raises a `BatonError`.
    """
    os.nice(NICE)
    gc.collect()
    gc.freeze()  # so that jobs share the memory of these objects
    control = socket.socket(fileno=descriptor)
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, _ignore)
    signal.set_wakeup_fd(woken.fileno())
    wake.setblocking(False)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    # The pid and the socket, by its descriptor.
    jobs: dict[int, tuple[int, socket.socket]] = {}
    while True:
        # New jobs come first, so that none has the descriptor of one that ended in this round.
        for ready, _ in poll.poll():
            if ready == wake.fileno():
                wake.recv(_READ_BYTES)
                _bury(jobs, poll)
            elif ready == control.fileno():
                limits, descriptors, _, _ = socket.recv_fds(control, _LIMITS.size, 1)
                if not limits:
                    for pid, _ in jobs.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                job = socket.socket(fileno=descriptors[0])
                pid = os.fork()
                if not pid:
                    others = [other for _, other in jobs.values()]
                    _work(job, (control, wake, woken, *others), limits, decoder, answer)
                jobs[job.fileno()] = (pid, job)
                poll.register(job, 0)  # only its end is of interest
                # The job itself may be killed before it can say anything.
                with contextlib.suppress(OSError):
                    job.send(_TAKEN)
            elif ready in jobs:  # the router gave the job up
                poll.unregister(ready)
                os.kill(jobs[ready][0], signal.SIGKILL)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Let the signal wake the poll, which an ignored one would not."""


def _bury(jobs: dict[int, tuple[int, socket.socket]], poll: "select.poll") -> None:
    """Tell the router of each job that ended by a signal, and close the sockets of those over."""
    for descriptor, (pid, job) in list(jobs.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        del jobs[descriptor]
        with contextlib.suppress(KeyError):
            poll.unregister(descriptor)
        with job:
            if os.WIFSIGNALED(status):
                with contextlib.suppress(OSError):
                    job.send(_encode(_Ended(os.WTERMSIG(status))))


def _work(
    job: socket.socket,
    others: Sequence[socket.socket],
    limits: bytes,
    decoder: "msgspec.msgpack.Decoder[J]",
    answer: Callable[[J], object],
) -> None:
    """Do one job and end this process, which closes the sockets of `others` first."""
    try:
        for other in others:
            other.close()
        cpu_s, memory_bytes = _LIMITS.unpack(limits)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _bound_memory(memory_bytes)
        # SIGPROF ends the process in any code.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        # A native library reports lack of memory to stderr, once for each hostile job.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        data = bytearray()
        while received := job.recv(_READ_BYTES):
            data += received
        job.sendall(_end_of(data, decoder, answer))
    finally:
        os._exit(0)


def _end_of(
    data: bytearray,
    decoder: "msgspec.msgpack.Decoder[J]",
    answer: Callable[[J], object],
) -> bytes:
    try:
        value = _encode(answer(decoder.decode(data)))
        return _encode(_Done(msgspec.Raw(value)))
    except BatonError as error:
        return _encode(_Failed(error.to_failure()))
    except MemoryError:
        return _encode(_Ended(_MEMORY_FULL))
    except Exception:  # noqa: BLE001 - the router logs it
        return _encode(_Broken(traceback.format_exc()))


def _bound_memory(more_bytes: int) -> None:
    """Let this process have only `more_bytes` above what it has now, where the system can tell."""
    with contextlib.suppress(OSError):
        num_pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        most = num_pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
