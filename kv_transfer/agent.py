"""One rank's transfer agent: a thread that reads peers' blocks into the local pool.

This file holds its making, the thread and its descriptors; `agent_turns` does the work. The agent
never decides what a read means, and never blocks its caller.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from baton.kv_transfer.agent_turns import AgentLimits, AgentTurns, Checksums
from baton.kv_transfer.interfaces import AgentCommand, AgentEvent, PoolMemory, Transport
from baton.kv_transfer.pools import DevicePool, HostPool
from baton.kv_transfer.transports.addresses import CUDA_IPC, NIXL, SHM
from baton.kv_transfer.transports.cuda_ipc import CudaIpcTransport
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.kv_transfer.transports.nixl_binding import is_installed
from baton.kv_transfer.transports.shm import ShmTransport
from baton.protocol.config import TransferConfig
from baton.protocol.errors import ConfigError, InvariantBroken
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.clock import boottime
from baton.runtime.log import logger

log = logger("transfer")

MIN_WAIT_S = 0.0001
MAX_WAIT_S = 0.005


def make_port(pool: HostPool | DevicePool, epoch: Epoch, config: TransferConfig) -> "TransferAgent":
    """Start the agent of the rank that owns `pool`, in the process lifetime `epoch`.

    Publish `.address()` as this rank's `RankAddress`, and call `.close()` before closing the pool.
    Raises `ConfigError` if the configured transport cannot work here.
    """
    transports = make_transports(pool, epoch, config)
    enter = None if isinstance(pool, HostPool) else pool.peers.enter
    checksums = None
    if config.verify_kv:
        if not isinstance(pool, HostPool):
            raise ConfigError(
                "transfer.verify_kv works only for KV pools in host memory; turn it off on GPUs"
            )
        checksums = pool.checksums
    limits = AgentLimits(read_s=config.lease_s)
    return TransferAgent(transports, limits, checksums, enter)


class TransferAgent:
    """A `TransferPort` over `transports`, which it owns from then on."""

    def __init__(
        self,
        transports: Sequence[Transport],
        limits: AgentLimits | None = None,
        checksums: Checksums | None = None,
        enter: Callable[[], None] | None = None,
    ) -> None:
        """Start the thread, which calls `enter` first to make its GPU current."""
        self._enter = enter
        self._transports = tuple(transports)
        self._turns = AgentTurns(transports, limits or AgentLimits(), boottime, checksums)
        self._address = RankAddress({t.name: t.address() for t in transports})
        self._commands: deque[AgentCommand] = deque()
        self._events: deque[AgentEvent] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="transfer agent", daemon=True)
        self._thread.start()

    # --- the node's side ------------------------------------------------------------------------

    def address(self) -> RankAddress:
        """Return how peers can read the local pool."""
        return self._address

    def send(self, command: AgentCommand) -> None:
        """Queue a command. After `close`, commands are dropped."""
        if self._closing:
            return
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    def poll(self) -> list[AgentEvent]:
        """Return new events. Raises `InvariantBroken` when a bug has ended the agent's thread."""
        if self._closing:
            return []
        _drain(self._ready)
        events = []
        while self._events:
            events.append(self._events.popleft())
        if self._error is not None and not events:
            raise InvariantBroken(f"the transfer agent ended: {self._error!r}") from self._error
        return events

    def fileno(self) -> int:
        return self._ready

    def close(self) -> None:
        """End the thread and every transport, so that nothing lands any more. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        os.close(self._ready)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._enter is not None:
                self._enter()
            self._work()
        except Exception as error:  # noqa: BLE001  `poll` raises it in the node
            self._error = error
            os.eventfd_write(self._ready, 1)
        finally:
            for transport in self._transports:
                transport.close()

    def _work(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for transport in self._transports:
            if transport.fileno() >= 0:
                poller.register(transport.fileno(), select.POLLIN)
        moved_s = boottime()
        while not self._closing:
            while self._commands:
                self._turns.hear(self._commands.popleft())
            moved = self._turns.turn()
            if events := self._turns.take_events():
                self._events.extend(events)
                os.eventfd_write(self._ready, 1)
            if moved or self._commands:
                moved_s = boottime()
                continue
            # The pause grows with the time that chunks take, so an end is seen late by an eighth of
            # it at most.
            self._wait(poller, min(max(MIN_WAIT_S, (boottime() - moved_s) / 8), MAX_WAIT_S))
            _drain(self._wake)

    def _wait(self, poller: select.poll, poll_s: float) -> None:
        """Wait for a command, a connection or a deadline."""
        wake_at_s = self._turns.wake_at_s(poll_s)
        if wake_at_s is None:
            poller.poll()
            return
        left_s = max(0.0, wake_at_s - boottime())
        if left_s >= 0.001:
            poller.poll(left_s * 1e3)
        elif not poller.poll(0):
            time.sleep(left_s)  # `poll` would round it up to a whole millisecond


def _drain(descriptor: int) -> None:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        return


def make_transports(
    pool: HostPool | DevicePool, epoch: Epoch, config: TransferConfig
) -> list[Transport]:
    """Return the transports of one rank. Raises `ConfigError` if `config.transport` cannot work.

    `auto` adds nixl to shm only where it is of use: nixl takes time to load and a thread, and
    without a network device it reaches only what shm reaches faster.
    """
    if isinstance(pool, DevicePool):
        return _of_a_gpu(pool, epoch, config)
    if config.transport == CUDA_IPC:
        raise ConfigError(
            "cuda_ipc reads GPU memory and this node computes on a CPU; set transfer.transport to "
            "auto"
        )
    transports: list[Transport] = []
    if config.transport != NIXL:
        try:
            transports.append(ShmTransport(pool, epoch))
        except ConfigError:
            if config.transport == SHM or not is_installed():
                raise
    if not transports or (config.transport == "auto" and config.device and is_installed()):
        memory = PoolMemory(pool.address, pool.shape.num_blocks, pool.shape.block_bytes)
        try:
            transports.append(NixlTransport(memory, epoch, config.device))
        except ConfigError as error:
            if not transports:
                raise
            log.warning("nixl cannot be used, so only this host is reached", reason=error.message)
    return transports


def _of_a_gpu(pool: DevicePool, epoch: Epoch, config: TransferConfig) -> list[Transport]:
    """Return which of cuda_ipc and nixl work here; `auto` logs a line for each that does not."""
    if config.transport == SHM:
        raise ConfigError("shm cannot read a GPU's memory; set transfer.transport to auto")
    transports: list[Transport] = []
    if config.transport != NIXL:
        try:
            transports.append(CudaIpcTransport(pool, epoch))
        except ConfigError as error:
            if config.transport == CUDA_IPC:
                raise
            log.warning("cuda_ipc cannot be used between GPUs of this host", reason=error.message)
    if config.transport == NIXL or (config.transport == "auto" and is_installed()):
        try:
            transports.append(NixlTransport(pool.memory, epoch, config.device))
        except ConfigError as error:
            if config.transport == NIXL:
                raise
            log.warning("nixl cannot be used, so only this host is reached", reason=error.message)
    if not transports:
        log.warning(
            "this GPU can hand no KV blocks over, so decode nodes compute their prompts "
            "themselves; to split prefill from decode, run `pip install -e '.[nixl]'` in baton's "
            "folder or start with `make serve EXTRAS=nixl`"
        )
    return transports
