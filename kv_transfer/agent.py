"""One rank's transfer agent: a thread that reads peers' blocks into the local pool.

Executors and workers make it with `make_port`; their node uses it through `TransferPort`. This file
holds the thread and its descriptors, and `agent_turns` does the work. The agent never decides what
a read means, and never blocks its caller.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from baton.kv_transfer.agent_turns import AgentLimits, AgentTurns, Checksums
from baton.kv_transfer.device_pool import DevicePool
from baton.kv_transfer.host_pool import HostPool
from baton.kv_transfer.interfaces import AgentCommand, AgentEvent, Transport
from baton.kv_transfer.transports.choice import make_transports
from baton.protocol.config import TransferConfig
from baton.protocol.errors import ConfigError, InvariantBroken
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.clock import boottime

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
            # The pause grows with the time that slices take, so an end is seen late by an eighth of
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
