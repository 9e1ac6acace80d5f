"""A process that owns a pool and a transfer agent, for tests that kill, stop and add it again.

`TransferPeer` is the test's end of it. They speak over a socket pair, one message a packet; the
child ends when the test's end is closed. Its own process, because UCX reads its environment there
and damaged transport metadata may crash it.
"""

import contextlib
import hashlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import msgspec
import numpy as np

from baton.kv_transfer.agent import AgentLimits, TransferAgent
from baton.kv_transfer.interfaces import (
    AddPeer,
    AgentCommand,
    AgentEvent,
    BlockSlice,
    PeerRank,
    PoolMemory,
    Transport,
)
from baton.kv_transfer.pools import DevicePool, HostPool
from baton.kv_transfer.transports import make_transports, usable_transports
from baton.kv_transfer.transports.addresses import ShmAddress
from baton.kv_transfer.transports.cuda_ipc import CudaIpcAddress
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.protocol.config import TransferConfig, TransportChoice
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.clock import monotonic
from tests.support.memfd_memory import device_pool
from tests.support.sources import REPOSITORY

MAX_MESSAGE_BYTES = 1 << 17
ANSWER_TIMEOUT_S = 90.0
EVENT_TIMEOUT_S = 60.0


class PeerOptions(msgspec.Struct, frozen=True):
    epoch: Epoch
    transport: TransportChoice
    num_blocks: int = 64
    block_bytes: int = 64 << 10
    limits: AgentLimits = AgentLimits()
    rank: int = 0  # of those with the same epoch
    # Nixl as it runs on GPUs: without its thread, with a spare block.
    is_polled: bool = False
    network_device: str = ""


class Request(msgspec.Struct, frozen=True):
    """What a test asks, done in the order of the fields and answered with one `Answer`."""

    fill: int | None = None  # the whole pool with the bytes of that seed
    bump: tuple[int, ...] = ()  # blocks that get a new owner
    commands: tuple[AgentCommand, ...] = ()
    wait_s: float = 0.0  # at most, for the next events
    digests: tuple[int, ...] = ()  # of these blocks


class Answer(msgspec.Struct, frozen=True):
    address: RankAddress
    open_files: int
    # What reads each peer, once that is certain.
    read_by: dict[str, str] = {}
    events: tuple[AgentEvent, ...] = ()
    digests: tuple[bytes, ...] = ()


class TransferPeer:
    """The test's end of one child. `close` ends it; `kill`, `stop` and `resume` are signals."""

    def __init__(
        self, options: PeerOptions, env: Mapping[str, str] | None = None
    ) -> None:
        self.options = options
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(ANSWER_TIMEOUT_S)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __name__,
                    str(theirs.fileno()),
                    msgspec.json.encode(options),
                ],
                cwd=REPOSITORY,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **(env or {})},
            )
        try:
            self.address = self._receive().address
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> PeerRank:
        return PeerRank(self.options.epoch, self.options.rank)

    def ask(self, **request: object) -> Answer:
        self._link.send(msgspec.msgpack.encode(Request(**request)))  # type: ignore[arg-type]
        return self._receive()

    def _receive(self) -> Answer:
        data = self._link.recv(MAX_MESSAGE_BYTES)
        assert data, f"the child ended with {self._process.wait()}"
        return msgspec.msgpack.decode(data, type=Answer)

    def send(self, *commands: AgentCommand) -> None:
        self.ask(commands=commands)

    def wait(self, count: int) -> list[AgentEvent]:
        """The next `count` events; fails if they do not come."""
        events: list[AgentEvent] = []
        while len(events) < count:
            more = self.ask(wait_s=EVENT_TIMEOUT_S).events
            assert more, f"no event came after {events}"
            events += more
        return events

    def digests(self, blocks: tuple[int, ...]) -> tuple[bytes, ...]:
        return self.ask(digests=blocks).digests

    def add(self, other: "TransferPeer", part: BlockSlice | None = None) -> AddPeer:
        """The command that makes `other`, or that slice of its blocks, readable from here."""
        name, *others = usable_transports(other.address, self.address, "auto")
        shape = other.options
        return AddPeer(
            other.name,
            name,
            other.address,
            shape.num_blocks,
            shape.block_bytes,
            part or BlockSlice(0, 0, self.options.block_bytes),
            tuple(others),
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Returns once the process is stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> int:
        """Ends it in order; returns the exit code."""
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(30.0)
        self.kill()
        return -int(signal.SIGKILL)


def wrong_addresses(name: str, data: bytes, epoch: Epoch) -> list[bytes]:
    """Return whole addresses of a process `epoch` that lead nowhere; none for nixl."""
    replace = msgspec.structs.replace
    if name == "shm":
        where = replace(ShmAddress.decode(data), epoch=epoch)
        return [
            replace(where, nonce=bytes(16)).encode(),
            replace(where, host="elsewhere").encode(),
        ]
    if name != "cuda_ipc":
        return []
    whole = CudaIpcAddress.decode(data)
    table = replace(whole.table, epoch=epoch)
    return [
        replace(whole, table=replace(table, host="elsewhere")).encode(),
        replace(whole, table=table, handle=b"0 0").encode(),
        replace(whole, table=table, block_bytes=9).encode(),
    ]


class _Child:
    def __init__(self, options: PeerOptions) -> None:
        has_spare = options.transport == "cuda_ipc" or options.is_polled
        self._memory = HostPool(options.num_blocks + has_spare, options.block_bytes)
        self._blocks = np.frombuffer(self._memory.buffer, np.uint8).reshape(
            -1, options.block_bytes
        )
        self._pool: HostPool | DevicePool = self._memory
        self._generations = self._memory.generations
        enter = None
        if options.transport == "cuda_ipc":
            self._pool = device_pool(self._memory, num_spare=1)
            self._generations = self._pool.table.generations
            enter = self._pool.peers.enter
        transports = self._transports(options)
        self._agent = TransferAgent(transports, options.limits, None, enter)

    def _transports(self, options: PeerOptions) -> list[Transport]:
        if options.is_polled:
            memory = PoolMemory(
                self._memory.address,
                options.num_blocks,
                options.block_bytes,
                num_spare=1,
            )
            return [NixlTransport(memory, options.epoch, has_thread=False)]
        config = TransferConfig(
            transport=options.transport, device=options.network_device
        )
        return make_transports(self._pool, options.epoch, config)

    def serve(self, link: socket.socket) -> None:
        link.send(msgspec.msgpack.encode(self._answer(Request())))
        while data := link.recv(MAX_MESSAGE_BYTES):
            request = msgspec.msgpack.decode(data, type=Request)
            link.send(msgspec.msgpack.encode(self._answer(request)))
        self._agent.close()
        self._pool.close()
        self._memory.close()

    def _answer(self, request: Request) -> Answer:
        if request.fill is not None:
            data = random.Random(request.fill).randbytes(self._blocks.size)
            self._blocks[:] = np.frombuffer(data, np.uint8).reshape(self._blocks.shape)
        self._generations[list(request.bump)] += 1
        for command in request.commands:
            self._agent.send(command)
        digests = (
            hashlib.blake2b(self._blocks[b], digest_size=16) for b in request.digests
        )
        return Answer(
            self._agent.address(),
            len(os.listdir("/proc/self/fd")),
            {
                peer.command.peer.epoch: peer.transport.name
                for peer in self._agent._turns._peers.values()
                if peer.up and peer.trials is None
            },
            tuple(self._events(request.wait_s)),
            tuple(digest.digest() for digest in digests),
        )

    def _events(self, wait_s: float) -> list[AgentEvent]:
        if not wait_s:
            return []
        deadline_s = monotonic() + wait_s
        events = self._agent.poll()
        while not events and (left_s := deadline_s - monotonic()) > 0:
            select.select([self._agent.fileno()], [], [], left_s)
            events = self._agent.poll()  # may be empty: readable only means perhaps
        return events


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        _Child(msgspec.json.decode(sys.argv[2], type=PeerOptions)).serve(inherited)
