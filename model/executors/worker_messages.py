"""The messages between an executor and the worker of each rank, and the socket for them.

Two socket pairs join them, one for steps and one for the rank's transfer agent, so that a long step
delays no lease. A message is four bytes of length and msgpack; the end of a stream means that the
other process is gone.
"""

import contextlib
import socket
import threading
from typing import Generic, TypeVar

import msgspec

from baton.node.executor import AdapterLoad, AdapterOutcome, ExecutorInfo
from baton.node.scheduling.plan import StepPlan, StepResult
from baton.protocol.codec import (
    MAX_MESSAGE_BYTES,
    UNREADABLE,
    Codec,
    MalformedMessage,
)
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import Failure
from baton.protocol.ids import Epoch

LENGTH_BYTES = 4
READ_BYTES = 1 << 18

T = TypeVar("T")


class WorkerMessage(msgspec.Struct, frozen=True, tag=True):
    """The root of all messages between an executor and a worker."""


class LoadRank(WorkerMessage, frozen=True):
    """The first message to a worker.

    `memory` and `peers` are descriptors that the worker inherited: an empty file that the ranks
    share, and a socket to each of the others in rank order.
    """

    config: ClusterConfig
    epoch: Epoch
    rank: int
    memory: int
    peers: tuple[int, ...]


class RunStep(WorkerMessage, frozen=True):
    plan: StepPlan  # one `StepDone` answers each, in order


class ProfileRank(WorkerMessage, frozen=True):
    name: str  # empty ends the profile


class ReadAdapter(WorkerMessage, frozen=True):
    load: AdapterLoad  # one `AdapterRead` answers


ToWorker = LoadRank | RunStep | ProfileRank | ReadAdapter


class Loading(WorkerMessage, frozen=True):
    phase: str
    done: int
    total: int


class Loaded(WorkerMessage, frozen=True):
    info: ExecutorInfo  # `info.ranks` holds this rank's address alone


class StepDone(WorkerMessage, frozen=True):
    """The rank's agent can see all stores of a step. Each rank samples, and all must agree."""

    result: StepResult


class AdapterRead(WorkerMessage, frozen=True):
    outcome: AdapterOutcome  # of this rank


class WorkerFailed(WorkerMessage, frozen=True):
    failure: Failure  # the worker's last message


FromWorker = Loading | Loaded | StepDone | AdapterRead | WorkerFailed


class MessageSocket(Generic[T]):
    """Typed messages over one end of a stream socket. `T` is the union of incoming messages.

    `send` may be called from any thread, everything else from one. Whether calls block is the
    socket's own setting.
    """

    def __init__(self, stream: socket.socket, incoming: type[T]) -> None:
        self.is_closed = False
        self._stream = stream
        self._codec = Codec[T](incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._in = bytearray()
        self._out = bytearray()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def has_unsent(self) -> bool:
        """Return whether `flush` must be called once the socket takes bytes again."""
        return bool(self._out)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message whole and in order. Bytes that a full socket refuses wait for `flush`."""
        body = self._encoder.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise MalformedMessage(
                f"message of {len(body)} bytes exceeds {MAX_MESSAGE_BYTES}"
            )
        with self._lock:
            self._out += len(body).to_bytes(LENGTH_BYTES, "big") + body
            self._flush()

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def receive(self) -> list[T]:
        """Return the messages of a non-blocking socket. Set `is_closed` at the stream's end."""
        while self._read():
            pass
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages

    def wait(self) -> T | None:
        """Return the next message of a blocking socket, or None at the end of the stream."""
        while (message := self._take()) is None:
            if not self._read():
                return None
        return message

    def close(self) -> None:
        """End the stream, even if a child process still holds this end."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def _flush(self) -> None:
        try:
            while self._out and not self.is_closed:
                del self._out[: self._stream.send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            # The reading side notices the end too, and decides what that means.
            self._out.clear()

    def _read(self) -> bool:
        """Read the bytes that have arrived, and return whether there were any."""
        try:
            data = self._stream.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.is_closed = not data
        self._in += data
        return bool(data)

    def _take(self) -> T | None:
        if len(self._in) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + int.from_bytes(self._in[:LENGTH_BYTES], "big")
        if len(self._in) < end:
            return None
        try:
            message = self._codec.decode(bytes(self._in[LENGTH_BYTES:end]))
        except UNREADABLE as error:
            raise MalformedMessage(str(error)) from error
        del self._in[:end]
        return message
