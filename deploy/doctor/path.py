"""A measured path: `PathReader` listens like a decode node, `offer_pool` dials like a prefill node.

They meet as nodes do: the prefill end dials with the cluster's key and lends one pool, and the
decode end reads it into another, with the agents, transports and choice of transport of
`kv_transfer`. A pool that serves is never touched.
"""

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from statistics import median

import msgspec
import zmq

from baton.deploy.doctor.machine import Finding, fault, ok, warning
from baton.deploy.doctor.nixl_check import UcxLog, lane_in
from baton.kv_transfer.agent import make_port
from baton.kv_transfer.interfaces import (
    AddPeer,
    AgentEvent,
    BlockSlice,
    PeerDown,
    PeerRank,
    PeerUp,
    Read,
    ReadEnded,
    RemovePeer,
)
from baton.kv_transfer.pools import HostPool
from baton.kv_transfer.transports import choose_transport
from baton.protocol.codec import Codec
from baton.protocol.config import ClusterConfig, NodeConfig, TransferConfig
from baton.protocol.errors import ConfigError, Failure, NodeError, TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.channels.dialer import Dialer, Disconnected
from baton.runtime.channels.endpoint import parse_endpoint
from baton.runtime.channels.keys import load_keys
from baton.runtime.channels.listener import Listener
from baton.runtime.clock import monotonic
from baton.runtime.host import devices_for, own_address
from baton.runtime.process import Interrupts

POLL_S = 0.1
READ_S = 20.0  # the longest wait for an answer of the other end, by default
REFUSALS = 2  # failed handshakes in a row, because one may fail by chance
NUM_BLOCKS = 1024
BLOCK_BYTES = 64 << 10
NUM_SINGLE = 50  # reads of one block
NUM_WHOLE = 5  # reads of all blocks, fewer where they would take longer than
WHOLE_S = 3.0
WHOLE_BLOCK = BlockSlice(0, 0, BLOCK_BYTES)


class PoolOffered(msgspec.Struct, frozen=True):
    """Sent by the owner of a pool: its address, and the checksums of its blocks."""

    host: str  # the address from which it dials
    epoch: Epoch
    rank: RankAddress
    checksums: tuple[int, ...]


class PathMeasured(msgspec.Struct, frozen=True):
    """Sent by the reader: how fast it read the pool, or why it could not."""

    transport: str = ""
    lane: str = ""  # the part of the transport that was used, if it is known
    num_bytes: int = 0
    read_s: float = 0.0  # the median of some reads of the whole pool
    block_s: float = 0.0  # the median of some reads of one block
    failure: Failure | None = None

    def __str__(self) -> str:
        if self.failure is not None:
            return self.failure.message
        return (
            f"{self.num_bytes / self.read_s / 1e9:.2f} GB/s, {1e3 * self.block_s:.2f} ms for a "
            f"block of {BLOCK_BYTES >> 10} KiB, by {self.transport}"
            + (f": {self.lane}" if self.lane else "")
        )


class ProbePool:
    """`NUM_BLOCKS` blocks of host memory. Raises `ConfigError` if `config` cannot work."""

    def __init__(self, config: TransferConfig) -> None:
        self.epoch = Epoch(secrets.token_hex(8))
        self._config = config
        self._pool = HostPool(NUM_BLOCKS, BLOCK_BYTES)
        self._agent = make_port(self._pool, self.epoch, config)
        self._ticket = 0

    def offer(self, host: str) -> PoolOffered:
        """Fill the pool with unique bytes, and return what its reader needs."""
        self._pool.buffer[:] = os.urandom(self._pool.shape.pool_bytes)
        checksums = self._pool.checksums(range(NUM_BLOCKS), 0, BLOCK_BYTES)
        return PoolOffered(host, self.epoch, self._agent.address(), checksums)

    def measure(self, offer: PoolOffered, timeout_s: float) -> PathMeasured:
        """Read the offered pool some times. A problem becomes the `failure` of the answer."""
        try:
            name = self._connect(offer, monotonic() + timeout_s)
            return self._read(offer, name, timeout_s)
        except TransferError as error:
            return PathMeasured(failure=error.to_failure())
        finally:
            self._agent.send(RemovePeer(PeerRank(offer.epoch)))

    def close(self) -> None:
        self._agent.close()
        self._pool.close()

    def _connect(self, offer: PoolOffered, deadline_s: float) -> str:
        """Try the transports in the order in which nodes do; return the one that connected."""
        failed: dict[str, str] = {}
        while True:
            name = self._choose(offer, failed)
            owner = PeerRank(offer.epoch)
            add = AddPeer(owner, name, offer.rank, NUM_BLOCKS, BLOCK_BYTES, WHOLE_BLOCK)
            self._agent.send(add)
            event = self._next(deadline_s, f"{name} at {offer.host}")
            if isinstance(event, PeerUp):
                return name
            assert isinstance(event, PeerDown)
            failed[name] = event.failure.message

    def _choose(self, offer: PoolOffered, failed: dict[str, str]) -> str:
        forced = self._config.transport
        try:
            return choose_transport(
                offer.rank, self._agent.address(), forced, failed.keys()
            )
        except TransferError as error:
            tried = "".join(
                f"; {name} was tried: {why}" for name, why in failed.items()
            )
            raise TransferError(error.message + tried, code=error.code) from error

    def _read(self, offer: PoolOffered, name: str, timeout_s: float) -> PathMeasured:
        singles = [
            self._timed(offer, (block,), timeout_s)
            for block in range(0, NUM_BLOCKS, NUM_BLOCKS // NUM_SINGLE)
        ]
        wholes: list[float] = []
        while len(wholes) < NUM_WHOLE and sum(wholes) < WHOLE_S:
            wholes.append(self._timed(offer, tuple(range(NUM_BLOCKS)), timeout_s))
        if self._pool.checksums(range(NUM_BLOCKS), 0, BLOCK_BYTES) != offer.checksums:
            raise TransferError(
                "the bytes that were read differ from those of the other end"
            )
        size = NUM_BLOCKS * BLOCK_BYTES
        return PathMeasured(name, "", size, median(wholes), median(singles))

    def _timed(
        self, offer: PoolOffered, blocks: tuple[int, ...], timeout_s: float
    ) -> float:
        """Read some blocks and return how long that took, in seconds."""
        self._ticket += 1
        self._agent.send(
            Read(
                self._ticket, PeerRank(offer.epoch), blocks, blocks, (0,) * len(blocks)
            )
        )
        event = self._next(monotonic() + timeout_s, "a read")
        if isinstance(event, PeerDown):
            raise TransferError(event.failure.message)
        assert isinstance(event, ReadEnded)
        if event.failure is not None:
            raise TransferError(event.failure.message, code=event.failure.code)
        return event.ended_s - event.posted_s

    def _next(self, deadline_s: float, what: str) -> AgentEvent:
        """Return the agent's next event. Raises `TransferError` if none comes in time."""
        while True:
            for event in self._agent.poll():
                return event
            left_s = deadline_s - monotonic()
            if left_s <= 0:
                raise TransferError(
                    f"no answer in time from {what}", code="path_timed_out"
                )
            select.select([self._agent.fileno()], [], [], left_s)


class PathReader:
    """Waits for an offered pool, and reads it. It must be closed.

    Raises `ConfigError` if it cannot listen at `endpoint` or the transport cannot work.
    """

    def __init__(self, config: ClusterConfig, endpoint: str) -> None:
        self._log = UcxLog()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        codecs = Codec[PathMeasured](PathMeasured), Codec[PoolOffered](PoolOffered)
        self._listener = Listener(
            endpoint, *codecs, self._context, load_keys(config.keys)
        )
        self._config = config

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    def read(
        self, interrupts: Interrupts, timeout_s: float
    ) -> tuple[str, PathMeasured] | None:
        """Read the first pool that is offered; return the host that offered it, and the result.

        Return None if an interrupt comes, or none is offered within `timeout_s`; 0 waits for ever.
        """
        until_s = monotonic() + timeout_s
        while not interrupts.requested and not (timeout_s and monotonic() > until_s):
            select.select(
                [self._listener.fileno(), interrupts.fileno()], [], [], POLL_S
            )
            while (received := self._listener.receive()) is not None:
                if (offer := received.message) is not None:
                    limit_s = timeout_s or READ_S
                    return offer.host, self._measure(received.peer, offer, limit_s)
        return None

    def close(self) -> None:
        self._listener.close()
        self._context.term()
        self._log.close()

    def _measure(
        self, peer: bytes, offer: PoolOffered, timeout_s: float
    ) -> PathMeasured:
        with contextlib.ExitStack() as stack:
            try:
                pool = ProbePool(
                    _transfer(self._config, NodeConfig(bind=self.endpoint))
                )
                stack.callback(pool.close)
                measured = pool.measure(offer, timeout_s)
            except ConfigError as error:
                measured = PathMeasured(failure=error.to_failure())
            lane = lane_in(self._log.text()) if measured.transport == "nixl" else ""
            measured = msgspec.structs.replace(measured, lane=lane)
            self._listener.send(peer, measured)
            # The owner ends first, because over TCP, UCX may end a process whose reader vanishes.
            until_s = monotonic() + timeout_s
            while self._listener.is_connected(peer) and monotonic() < until_s:
                time.sleep(POLL_S)
        return measured


def offer_pool(
    config: ClusterConfig, endpoint: str, timeout_s: float, rdma_ports: Sequence[str]
) -> Finding:
    """Let the reader at `endpoint` read a pool of this host, and judge the path.

    `rdma_ports` are those of this host. Raises `ConfigError`, and `NodeError` if nothing answers or
    the keys differ.
    """
    keys = load_keys(config.keys)
    keys.check(parse_endpoint(endpoint), "dialling")
    with contextlib.ExitStack() as stack:
        pool = ProbePool(_transfer(config, NodeConfig(routers=(endpoint,))))
        stack.callback(pool.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        codecs = Codec[PoolOffered](PoolOffered), Codec[PathMeasured](PathMeasured)
        dialer = Dialer(endpoint, b"doctor", *codecs, context, keys)
        stack.callback(dialer.close)
        listening = parse_endpoint(endpoint)
        offer = pool.offer(own_address(listening) or socket.gethostname())
        dialer.send(offer)
        with Interrupts() as interrupts:
            # The reader may try several transports, and reads for some time.
            measured = _answer(dialer, offer, interrupts, 3 * timeout_s, timeout_s)
    check = f"{listening.host} reads {offer.host}"
    return path_finding(check, measured, rdma_ports)


def _answer(
    dialer: "Dialer[PoolOffered, PathMeasured]",
    offer: PoolOffered,
    interrupts: Interrupts,
    timeout_s: float,
    connect_s: float,
) -> PathMeasured:
    begin_s = monotonic()
    where = dialer.endpoint.removeprefix("tcp://")
    while True:
        while (message := dialer.receive()) is not None:
            if not isinstance(message, Disconnected):
                return message
            dialer.send(offer)
        if dialer.refusals >= REFUSALS:
            raise NodeError(
                f"{where} refuses this host's key, or is not a `baton doctor --listen`: copy "
                "one key file to both hosts (--keys)",
                code="key_refused",
            )
        if interrupts.requested:
            raise KeyboardInterrupt
        limit_s = timeout_s if dialer.connected else connect_s
        if monotonic() - begin_s > limit_s:
            raise NodeError(
                f"no answer from {where} within {limit_s:g} s: check that `baton doctor --listen` "
                "runs there, and that the port is open between the hosts",
                code="path_silent",
            )
        select.select([dialer.fileno()], [], [], POLL_S)


def path_finding(
    check: str, measured: PathMeasured, rdma_ports: Sequence[str]
) -> Finding:
    """Judge a measured path. `rdma_ports` are those of the end that dialled."""
    if measured.failure is not None:
        code = measured.failure.code
        advice = (
            "open all TCP ports of the host that is read to the other, because UCX picks its ports "
            "freely, and check that transfer.device names a device of one network"
        )
        if code == ConfigError.code:
            advice = "see `baton doctor` on the host that reads"
        elif code == "no_transport":
            advice = "install the extra nixl on both hosts, and name a device (transfer.device)"
        return fault(check, f"{measured.failure.message}: {advice}")
    if rdma_ports and measured.lane.startswith("tcp/"):
        return warning(
            check,
            f"{measured}, although there are RDMA ports ({', '.join(rdma_ports)}): name one with "
            "transfer.device, and check that the other host has one in the same network",
        )
    return ok(check, str(measured))


def _transfer(config: ClusterConfig, node: NodeConfig) -> TransferConfig:
    """Return the settings of the transfer with the network devices that a node would take."""
    device = config.transfer.device or devices_for(node)
    return msgspec.structs.replace(config.transfer, device=device)
