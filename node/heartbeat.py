"""Send a node's vital signs from a separate thread, however long a step takes.

The node's loop writes into `Vitals`. `HeartbeatThread` sends `Starting` once a second until it is
ready and `Heartbeat` from then on, over its own socket to every router. It never touches the node's
other channels and never waits for the loop, because the heartbeats must show that a loop hangs.
"""

import math
import threading
from collections.abc import Callable, Sequence

import msgspec

from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import Heartbeat, Load, Starting, ToNode, ToRouter, Totals
from baton.runtime.channels.dialer import Dialer
from baton.runtime.channels.listener import Channels
from baton.runtime.clock import Clock
from baton.runtime.log import logger

HEARTBEAT_INTERVAL_S = 1.0
TICK_S = 0.1
JOIN_TIMEOUT_S = 2.0
STANDSTILL_S = 2.0
# When the absence of a router is logged first, and the longest time until it is logged again.
FIRST_LOGGED_S = 5.0
LONGEST_UNLOGGED_S = 600.0

log = logger("node")


class VitalSigns(msgspec.Struct, frozen=True):
    """One consistent reading of a node's state. Times are on the clock of the thread."""

    is_ready: bool = False
    phase: str = "starting"
    done: int = 0
    total: int = 0
    load: Load = Load()
    turned_s: float | None = None  # when the loop last had nothing left to do
    step_started_s: float | None = None  # the oldest step that has not ended
    predicted_s: float = 0.0  # for that step
    is_draining: bool = False
    unreachable: tuple[NodeId, ...] = ()

    def step_age_s(self, now_s: float) -> float:
        return (
            0.0
            if self.step_started_s is None
            else max(0.0, now_s - self.step_started_s)
        )

    def loop_age_s(self, now_s: float) -> float:
        return 0.0 if self.turned_s is None else max(0.0, now_s - self.turned_s)


class Vitals:
    """The state that the node's loop noted last. Any thread may read it."""

    def __init__(self) -> None:
        # This is a frozen value behind one reference: replacing it is atomic, and only one thread
        # writes.
        self.signs = VitalSigns()
        self.totals: Callable[[], Totals] = Totals  # any thread may call it

    def note(self, **changed: object) -> None:
        """Replace these fields of `signs`."""
        self.signs = msgspec.structs.replace(self.signs, **changed)


class HeartbeatThread:
    """Sends a node's vital signs to each router every second, from `start` to `stop`."""

    def __init__(
        self,
        vitals: Vitals,
        node_id: NodeId,
        epoch: Epoch,
        endpoints: Sequence[str],
        clock: Clock,
        open_channels: Callable[[], Channels] = Channels,
    ) -> None:
        self._vitals = vitals
        self._node_id = node_id
        self._epoch = epoch
        self._endpoints = tuple(endpoints)
        self._clock = clock
        self._open_channels = open_channels
        self._ran_s = clock()
        # When the process last went on after it had stood still.
        self._resumed_s = -math.inf
        self._stopping = threading.Event()
        self._dialers: list[Dialer[ToRouter, ToNode]] = []
        self._watch = RouterWatch()
        self._channels: Channels
        self._thread = threading.Thread(
            target=self._run, name="heartbeats", daemon=True
        )

    def start(self) -> None:
        """Start the thread. Raises `ConfigError` if an endpoint cannot or must not be dialled."""
        # A separate context has its own I/O thread, so the node's traffic delays no heartbeat.
        self._channels = self._open_channels()
        identity = f"heartbeats:{self._node_id}".encode()
        self._dialers = [
            self._channels.dial(endpoint, identity, to_router_codec(), to_node_codec())
            for endpoint in self._endpoints
        ]
        self._thread.start()

    def stop(self) -> None:
        """End the thread. No heartbeat is sent after this returns; a second call does nothing."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def note_running(self, now_s: float) -> None:
        """Note that this thread runs. After a gap, the node's loop gets its time anew.

        Only a process that stands still as a whole holds this thread for so long, and its loop
        cannot have turned meanwhile.
        """
        if now_s - self._ran_s > STANDSTILL_S:
            self._resumed_s = now_s
        self._ran_s = now_s

    def message(self, now_s: float) -> Starting | Heartbeat:
        """Return the message that would be sent at `now_s`."""
        signs = self._vitals.signs
        if not signs.is_ready:
            return Starting(
                self._node_id, self._epoch, signs.phase, signs.done, signs.total
            )
        return Heartbeat(
            self._node_id,
            self._epoch,
            signs.load,
            min(signs.step_age_s(now_s), now_s - self._resumed_s),
            signs.predicted_s,
            min(signs.loop_age_s(now_s), now_s - self._resumed_s),
            signs.is_draining,
            self._vitals.totals(),
            signs.unreachable,
        )

    def _run(self) -> None:
        due_s = 0.0
        try:
            while not self._stopping.wait(TICK_S):
                now_s = self._clock()
                self.note_running(now_s)
                everyone = now_s >= due_s
                if everyone:
                    due_s = now_s + HEARTBEAT_INTERVAL_S
                heartbeat = self.message(now_s)
                for dialer in self._dialers:
                    was_connected = dialer.connected
                    while dialer.receive() is not None:
                        pass
                    # Old heartbeats are worthless, so none is queued for an absent router.
                    if dialer.connected and (everyone or not was_connected):
                        dialer.send(heartbeat)
                    self._watch.look(now_s, dialer)
        finally:
            for dialer in self._dialers:
                dialer.close()
            self._channels.close()


class RouterWatch:
    def __init__(self) -> None:
        # When each absent router is logged (again), and how long after the last time that is.
        self._absent: dict[str, tuple[float, float]] = {}

    def look(self, now_s: float, router: Dialer[ToRouter, ToNode]) -> None:
        """Note whether a router answers. Log its absence after 5 s, then at growing intervals."""
        if router.connected:
            _, wait_s = self._absent.pop(router.endpoint, (now_s, FIRST_LOGGED_S))
            if wait_s > FIRST_LOGGED_S:
                log.info("found the router", router=router.endpoint)
            return
        later = (now_s + FIRST_LOGGED_S, FIRST_LOGGED_S)
        log_at_s, wait_s = self._absent.setdefault(router.endpoint, later)
        if now_s < log_at_s or router.refusals:  # the node's channel reports refusals
            return
        wait_s = min(wait_s * 4, LONGEST_UNLOGGED_S)
        self._absent[router.endpoint] = (now_s + wait_s, wait_s)
        reason = (
            "nothing answers there" if router.is_resolved else "name does not resolve"
        )
        log.warning(f"waiting for router {router.endpoint}: {reason}")
