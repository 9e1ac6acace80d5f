"""A measured path: `PathReader` listens like a decode node, `offer_pool` dials like a prefill node.

They meet as nodes do: the prefill end dials with the cluster's key, and the decode end reads its
blocks, with the agents, transports and choice of transport of `kv_transfer`.
"""

import contextlib
import select
import socket
import time
from collections.abc import Sequence

import msgspec
import psutil
import zmq

from baton.deploy.doctor.machine import Finding, fault, ok, warning
from baton.deploy.doctor.nixl_check import UcxLog, lane_in
from baton.deploy.doctor.probe_pool import PathMeasured, PoolOffered, ProbePool
from baton.protocol.codec import Codec
from baton.protocol.config import ClusterConfig, NodeConfig, TransferConfig
from baton.protocol.errors import ConfigError, NodeError
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


class PathReader:
    """Waits for an offered pool, and reads it. It must be closed.

    Raises `ConfigError` if it cannot listen at `endpoint` or the transport cannot work.
    """

    def __init__(self, config: ClusterConfig, endpoint: str) -> None:
        self._log = UcxLog()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        codecs = Codec[PathMeasured](PathMeasured), Codec[PoolOffered](PoolOffered)
        self._listener = Listener(endpoint, *codecs, self._context, load_keys(config.keys))
        self._config = config

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    def read(self, interrupts: Interrupts, timeout_s: float) -> tuple[str, PathMeasured] | None:
        """Read the first pool that is offered; return the host that offered it, and the result.

        Return None if an interrupt comes, or none is offered within `timeout_s`; 0 waits for ever.
        """
        until_s = monotonic() + timeout_s
        while not interrupts.requested and not (timeout_s and monotonic() > until_s):
            select.select([self._listener.fileno(), interrupts.fileno()], [], [], POLL_S)
            while (received := self._listener.receive()) is not None:
                if (offer := received.message) is not None:
                    limit_s = timeout_s or READ_S
                    return offer.host, self._measure(received.peer, offer, limit_s)
        return None

    def close(self) -> None:
        self._listener.close()
        self._context.term()
        self._log.close()

    def _measure(self, peer: bytes, offer: PoolOffered, timeout_s: float) -> PathMeasured:
        with contextlib.ExitStack() as stack:
            try:
                pool = ProbePool(_transfer(self._config, NodeConfig(bind=self.endpoint)))
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
        connections = psutil.Process().net_connections("tcp")
        ports = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
        listening = parse_endpoint(endpoint)
        offer = pool.offer(own_address(listening) or socket.gethostname(), tuple(sorted(ports)))
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
                f"no answer from {where} within {limit_s:g} s: see that `baton doctor --listen` "
                "runs there, and that the port is open between the hosts",
                code="path_silent",
            )
        select.select([dialer.fileno()], [], [], POLL_S)


def path_finding(check: str, measured: PathMeasured, rdma_ports: Sequence[str]) -> Finding:
    """Judge a measured path. `rdma_ports` are those of the end that dialled."""
    if measured.failure is not None:
        code = measured.failure.code
        advice = (
            "open all TCP ports of the host that is read to the other, because UCX picks its ports "
            "freely, and see that transfer.device names a device of one network"
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
            "transfer.device, and see that the other host has one in the same network",
        )
    return ok(check, str(measured))


def _transfer(config: ClusterConfig, node: NodeConfig) -> TransferConfig:
    """Return the settings of the transfer with the network devices that a node would take."""
    device = config.transfer.device or devices_for(node)
    return msgspec.structs.replace(config.transfer, device=device)
