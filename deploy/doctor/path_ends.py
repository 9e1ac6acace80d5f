"""The ends of a measured path: `PathReader` listens like decode, `offer_pool` dials like prefill.

`commands` runs one on each host, by hand or through a launcher. They meet as nodes do: prefill
dials decode with the cluster's key, and decode reads prefill's blocks.
"""

import contextlib
import select
import socket
import time
from collections.abc import Callable

import msgspec
import psutil
import zmq

from baton.deploy.doctor.path_messages import (
    OfferTaken,
    PathMeasured,
    PoolOffered,
    to_owner_codec,
    to_reader_codec,
)
from baton.deploy.doctor.probe_pool import BLOCK_BYTES, NUM_BLOCKS, ProbePool
from baton.deploy.doctor.ucx_log import UcxLog
from baton.protocol import VERSION
from baton.protocol.config import ClusterConfig, NodeConfig, TransferConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.protocol.messages import PROTOCOL_VERSION
from baton.runtime.channels.dialer import Dialer, Disconnected
from baton.runtime.channels.endpoint import bindable
from baton.runtime.channels.keys import load_keys
from baton.runtime.channels.listener import Listener
from baton.runtime.clock import monotonic
from baton.runtime.host import devices_for, own_address
from baton.runtime.process import Interrupts

POLL_S = 0.1
REFUSALS = 2  # failed handshakes in a row, because one may fail by chance


class PathRow(msgspec.Struct, frozen=True):
    """The result of a path at the end that dialled."""

    prefill_host: str
    decode_host: str
    measured: PathMeasured
    version: str  # of the end that listens, like those below
    protocol: int
    clock_s: float  # how far its clock is ahead, with an error of up to a round trip


class PathReader:
    """Waits for offered pools, and reads each of them. It must be closed.

    Raises `ConfigError` if it cannot listen at `endpoint` or the transport cannot work.
    """

    def __init__(self, config: ClusterConfig, endpoint: str) -> None:
        self._log = UcxLog()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listener = Listener(
            endpoint, to_owner_codec(), to_reader_codec(), self._context, load_keys(config.keys)
        )
        self._config = config

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    def serve(
        self,
        interrupts: Interrupts,
        timeout_s: float,
        tell: Callable[[PoolOffered, PathMeasured], None],
        *,
        is_once: bool = False,
    ) -> bool:
        """Read every pool that is offered until an interrupt comes, or with `is_once` one pool.

        Return False if `is_once` is set and no pool was offered within `timeout_s`.
        """
        until_s = monotonic() + timeout_s
        while not interrupts.requested:
            select.select([self._listener.fileno(), interrupts.fileno()], [], [], POLL_S)
            while (received := self._listener.receive()) is not None:
                if received.message is None:
                    continue
                tell(received.message, self._answer(received.peer, received.message, timeout_s))
                if is_once:
                    return True
            if is_once and monotonic() > until_s:
                return False
        return True

    def close(self) -> None:
        self._listener.close()
        self._context.term()
        self._log.close()

    def _answer(self, peer: bytes, offer: PoolOffered, timeout_s: float) -> PathMeasured:
        mine = OfferTaken(VERSION, PROTOCOL_VERSION, time.time())
        self._listener.send(peer, mine)
        try:
            pool = ProbePool(_transfer(self._config, NodeConfig(bind=self.endpoint)))
        except ConfigError as error:
            measured = PathMeasured(failure=error.to_failure())
            self._listener.send(peer, measured)
            self._wait_for_end(peer, timeout_s)
            return measured
        try:
            measured = pool.measure(offer, timeout_s)
            if measured.transport == "nixl":
                measured = msgspec.structs.replace(measured, lane=self._log.lane())
            elif measured.transport:
                measured = msgspec.structs.replace(measured, lane="mapped memory")
            self._listener.send(peer, measured)
            # The owner ends first, because over TCP, UCX may end a process whose reader vanishes.
            self._wait_for_end(peer, timeout_s)
        finally:
            pool.close()
        return measured

    def _wait_for_end(self, peer: bytes, timeout_s: float) -> None:
        until_s = monotonic() + timeout_s
        while self._listener.is_connected(peer) and monotonic() < until_s:
            time.sleep(POLL_S)


def offer_pool(config: ClusterConfig, endpoint: str, timeout_s: float) -> PathRow:
    """Let the reader at `endpoint` read a pool of this host, and return its measurement.

    Raises `ConfigError`, and `NodeError` if nothing answers or the keys differ.
    """
    keys = load_keys(config.keys)
    keys.check(bindable(endpoint), "dialling")
    with contextlib.ExitStack() as stack:
        pool = ProbePool(_transfer(config, NodeConfig(routers=(endpoint,))))
        stack.callback(pool.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        codecs = to_reader_codec(), to_owner_codec()
        dialer = Dialer(endpoint, b"doctor", *codecs, context, keys)
        stack.callback(dialer.close)
        with Interrupts() as interrupts:
            return _Owner(dialer, pool, timeout_s).measured(interrupts)


class _Owner:
    """The end that dials, until the path is measured."""

    def __init__(
        self,
        dialer: "Dialer[PoolOffered, OfferTaken | PathMeasured]",
        pool: ProbePool,
        timeout_s: float,
    ) -> None:
        self._dialer = dialer
        self._timeout_s = timeout_s
        listening = bindable(dialer.endpoint)
        self._reader_host = listening.host
        self._offer = PoolOffered(
            VERSION, PROTOCOL_VERSION, own_address(listening) or socket.gethostname(), pool.epoch,
            pool.address, NUM_BLOCKS, BLOCK_BYTES, pool.fill(), tuple(_own_tcp_ports()),
        )  # fmt: skip

    def measured(self, interrupts: Interrupts) -> PathRow:
        self._dialer.send(self._offer)
        taken, offset_s = self._taken(interrupts)
        # The reader may try several transports, and reads for some time.
        message = self._receive(interrupts, 3 * self._timeout_s, "measuring the path")
        if not isinstance(message, PathMeasured):
            raise NodeError("the listening end sent something else: use one release on both hosts")
        return PathRow(
            self._offer.host, self._reader_host, message, taken.version, taken.protocol, offset_s
        )

    def _taken(self, interrupts: Interrupts) -> tuple[OfferTaken, float]:
        """Return the first answer, and how far the clock of its host is ahead."""
        begin_s = time.time()
        message = self._receive(interrupts, self._timeout_s, "dialling")
        end_s = time.time()
        if not isinstance(message, OfferTaken):
            raise NodeError("the listening end sent something else: use one release on both hosts")
        # The answer was made between the two times, so a clock between them may be right.
        ahead_s = max(0.0, message.now_s - end_s) + min(0.0, message.now_s - begin_s)
        return message, ahead_s

    def _receive(
        self, interrupts: Interrupts, timeout_s: float, doing: str
    ) -> OfferTaken | PathMeasured:
        deadline_s = monotonic() + timeout_s
        where = self._dialer.endpoint.removeprefix("tcp://")
        while True:
            while (message := self._dialer.receive()) is not None:
                if not isinstance(message, Disconnected):
                    return message
                self._dialer.send(self._offer)
            if self._dialer.refusals >= REFUSALS:
                raise NodeError(
                    f"{where} refuses this host's key, or is not a `baton doctor --listen`: copy "
                    "one key file to both hosts (--keys)",
                    code="key_refused",
                )
            if interrupts.requested:
                raise KeyboardInterrupt
            if monotonic() > deadline_s:
                raise NodeError(
                    f"no answer from {where} within {timeout_s:g} s while {doing}: see that "
                    "`baton doctor --listen` runs there, and that the port is open between the "
                    "hosts",
                    code="path_silent",
                )
            select.select([self._dialer.fileno()], [], [], POLL_S)


def _transfer(config: ClusterConfig, node: NodeConfig) -> TransferConfig:
    """Return the settings of the transfer with the network devices that a node would take."""
    device = config.transfer.device or devices_for(node)
    return msgspec.structs.replace(config.transfer, device=device)


def _own_tcp_ports() -> list[int]:
    connections = psutil.Process().net_connections("tcp")
    return sorted({one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN})
