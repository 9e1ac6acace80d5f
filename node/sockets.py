"""The ZMQ side of an engine process: channels to its routers and to its peer nodes.

Hello and Ready are sent again in every new session of a channel, so a router that restarts needs no
memory. Only `wait` blocks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, assert_never

import msgspec

from baton.kv_transfer.interfaces import (
    DialPeer,
    DropPeer,
    FromPeer,
    PeerLost,
    PeerName,
    ToPeer,
)
from baton.node.scheduling.plan import Origin
from baton.protocol.codec import (
    NodeInbox,
    Unreadable,
    peer_codec,
    to_router_codec,
)
from baton.protocol.errors import ConfigError, NodeError
from baton.protocol.messages import (
    Cancel,
    Crashed,
    Hello,
    NodeInfo,
    PeerHello,
    PeerMessage,
    Peers,
    Ready,
    Refused,
    ToNode,
    ToRouter,
)
from baton.runtime.channels.dialer import Dialer, Disconnected
from baton.runtime.channels.listener import Channels, Listener
from baton.runtime.clock import Clock, monotonic
from baton.runtime.log import logger
from baton.runtime.process import Backoff


class FromRouter(msgspec.Struct, frozen=True):
    origin: Origin
    message: ToNode | Unreadable


class RouterLost(msgspec.Struct, frozen=True):
    """The channel to that router broke, so its requests are no longer wanted."""

    origin: Origin


LinkEvent = FromRouter | RouterLost | FromPeer | PeerLost


# How long a process that ends because of an error waits for its routers to confirm it.
CRASHED_S = 1.0
CRASHED_POLL_S = 0.05
# How long a node that was refused waits before it asks again.
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
# How long a ready node waits for a router's answer before it introduces itself again.
JOINING_S = 2.0
# The number of failed handshakes in a row after which a node reports that a router refuses its key.
# A single one may fail because a router ends.
REFUSALS_TO_LOG = 3

log = logger("node")


@dataclass(slots=True)
class Introduced:
    """The peer of a connection, by its PeerHello."""

    hello: PeerHello
    is_answered: bool = False
    is_dropped: bool = False

    @property
    def peer(self) -> PeerName:
        return self.hello.node_id, self.hello.epoch


class EngineSockets:
    """Dials `routers`. On decode nodes, `listen` opens the endpoint that prefill nodes dial."""

    def __init__(
        self,
        routers: tuple[str, ...],
        hello: Hello,
        channels: Channels,
        clock: Clock = monotonic,
    ) -> None:
        """Dial the routers. Raises `ConfigError` if one cannot or must not be dialled."""
        self._channels = channels
        self._hello = hello
        self._clock = clock
        # Wait for any channel, or for another descriptor that is watched.
        self.watch = channels.watch
        self.wait = channels.wait
        name = str(hello.node_id).encode()
        self._routers: list[RouterChannel] = []
        for endpoint in routers:
            dialer = channels.dial(endpoint, name, to_router_codec(), NodeInbox())
            self.watch(dialer.fileno())
            self._routers.append(RouterChannel(dialer, hello, clock))
        self._listener: Listener[PeerMessage, PeerMessage] | None = None
        self._dialled: dict[PeerName, Dialer[PeerMessage, PeerMessage]] = {}
        self._introduced: dict[bytes, Introduced] = {}
        self._lost: list[PeerLost] = []  # peers that could not be dialled

    def listen(self, endpoint: str) -> str:
        """Bind for prefill nodes, and return the endpoint that they can dial."""
        self._listener = self._channels.listen(endpoint, peer_codec(), peer_codec())
        self.watch(self._listener.fileno())
        return self._listener.endpoint

    def ready(self, info: NodeInfo) -> None:
        for router in self._routers:
            router.ready(Ready(info))

    def standings(self) -> "tuple[RouterStanding, ...]":
        """Return what each router makes of this node. Any thread may call this."""
        return tuple(router.standing() for router in self._routers)

    def receive(self) -> list[LinkEvent]:
        events: list[LinkEvent] = [*self._lost]
        self._lost.clear()
        for origin, router in enumerate(self._routers):
            for message in router.receive():
                if isinstance(message, Disconnected):
                    events.append(RouterLost(origin))
                else:
                    events.append(FromRouter(origin, message))
        for peer in list(self._dialled):
            self._receive_dialled(peer, events)
        if self._listener is not None:
            self._receive_listener(self._listener, events)
        return events

    def starting(self) -> None:
        """Read routers' messages during the start. Raises `NodeError` if one refuses the node."""
        for router in self._routers:
            for message in router.receive():
                if isinstance(message, Refused):
                    text = f"the router refused this node: {message.failure.message}"
                    raise NodeError(text, code=message.failure.code)

    def to_router(self, origin: Origin, message: ToRouter) -> None:
        # A full queue ends the session, which `receive` reports as a lost router.
        self._routers[origin].dialer.send(message)

    def broadcast(self, message: ToRouter) -> None:
        for router in self._routers:
            if router.dialer.connected:
                router.dialer.send(message)

    def send_crashed(self, message: Crashed) -> None:
        """Tell the routers why this process ends, and wait up to a second for their answers."""
        dialers = [router.dialer for router in self._routers]
        waiting = [one for one in dialers if one.connected and one.send(message)]
        deadline_s = self._clock() + CRASHED_S
        while waiting and self._clock() < deadline_s:
            waiting = [one for one in waiting if not _has_answered(one, message)]
            self.wait(CRASHED_POLL_S)

    def to_peer(self, command: ToPeer | DialPeer | DropPeer) -> None:
        match command:
            case DialPeer(node=info):
                self._dial(info)
            case DropPeer(node=node, epoch=epoch):
                self._drop((node, epoch))
            case ToPeer(node=node, epoch=epoch, message=message):
                self._send_to_peer((node, epoch), message)
            case _:
                assert_never(command)

    def close(self, linger_ms: int = 0) -> None:
        """Close every channel. Queued messages to routers may still be sent within `linger_ms`."""
        for router in self._routers:
            router.dialer.close(linger_ms if router.dialer.connected else 0)
        for peer in list(self._dialled):
            self._drop(peer)
        if self._listener is not None:
            self._listener.close()
        self._channels.close()

    # --- inside --------------------------------------------------------------------------------

    def _dial(self, info: NodeInfo) -> None:
        peer = (info.node_id, info.epoch)
        if peer in self._dialled:
            return
        identity = f"{self._hello.node_id}:{self._hello.epoch}".encode()
        try:
            dialer = self._channels.dial(
                info.control_endpoint, identity, peer_codec(), peer_codec()
            )
        except ConfigError as error:  # the peer has published an invalid address
            log.warning("cannot dial a peer", node=info.node_id, reason=str(error))
            self._lost.append(PeerLost(*peer))
            return
        self._dialled[peer] = dialer
        self.watch(dialer.fileno())

    def _drop(self, peer: PeerName) -> None:
        dialer = self._dialled.pop(peer, None)
        if dialer is not None:
            self._channels.unwatch(dialer.fileno())
            dialer.close()
        for known in self._introduced.values():
            known.is_dropped = known.is_dropped or known.peer == peer

    def _send_to_peer(self, peer: PeerName, message: PeerMessage) -> None:
        if peer in self._dialled:
            self._dialled[peer].send(message)
            return
        for identity, known in self._introduced.items():
            if known.peer != peer or known.is_dropped or self._listener is None:
                continue
            if isinstance(message, PeerHello):
                if known.is_answered:
                    # A second PeerHello would mean that this process has restarted its session.
                    return
                known.is_answered = True
            self._listener.send(identity, message)
            return

    def _receive_dialled(self, peer: PeerName, events: list[LinkEvent]) -> None:
        dialer = self._dialled[peer]
        while (message := dialer.receive()) is not None:
            if isinstance(message, Disconnected):
                self._drop(peer)
                events.append(PeerLost(*peer))
                return
            events.append(FromPeer(*peer, message))

    def _receive_listener(
        self, listener: Listener[PeerMessage, PeerMessage], events: list[LinkEvent]
    ) -> None:
        while (received := listener.receive()) is not None:
            known = self._introduced.get(received.peer)
            if received.message is None:
                self._forget(received.peer, events)
            elif isinstance(received.message, PeerHello):
                self._meet(received.peer, received.message, events)
            elif known is not None:  # messages before a peer's PeerHello are ignored
                if known.is_dropped:
                    # Only this side has dropped the connection; the peer still uses it.
                    known.is_dropped = False
                    events.append(FromPeer(*known.peer, known.hello))
                events.append(FromPeer(*known.peer, received.message))

    def _meet(self, identity: bytes, hello: PeerHello, events: list[LinkEvent]) -> None:
        """Note a peer's name. One connection has one name, and one name has one connection."""
        met = Introduced(hello)
        known = self._introduced.get(identity)
        if known is not None and known.peer != met.peer:
            self._forget(identity, events)
        for other in [i for i, one in self._introduced.items() if one.peer == met.peer]:
            del self._introduced[other]
        self._introduced[identity] = met
        events.append(FromPeer(*met.peer, hello))

    def _forget(self, identity: bytes, events: list[LinkEvent]) -> None:
        known = self._introduced.pop(identity, None)
        if known is not None and not known.is_dropped:
            events.append(PeerLost(*known.peer))


def _has_answered(
    router: Dialer[ToRouter, ToNode | Unreadable], crashed: Crashed
) -> bool:
    while (message := router.receive()) is not None:
        if isinstance(message, Disconnected):
            return True  # the router is gone
        if isinstance(message, Cancel) and message.keys == crashed.keys:
            return True
    return False


RegistrationState = Literal[
    "absent", "joining", "in service", "out of service", "refused"
]


class RouterStanding(msgspec.Struct, frozen=True):
    """A node's standing at one router. A silent router is `absent`, or `joining` if connected."""

    router: str  # its endpoint
    state: RegistrationState
    reason: str = ""


class RouterChannel:
    """A node's channel to one router. The node introduces itself in every new session.

    It does so again while the router gives no answer. If the router refuses the node, which may be
    over when nodes or routers change, the node asks again after growing pauses.
    """

    def __init__(
        self, dialer: Dialer[ToRouter, ToNode | Unreadable], hello: Hello, clock: Clock
    ) -> None:
        self.dialer = dialer
        self._hello = hello
        self._clock = clock
        self._ready: Ready | None = None
        # The answer in this session. It is frozen: replacing it is atomic, and one thread writes.
        self._answer: RouterStanding | None = None
        self._backoff: Backoff | None = None  # while the router refuses the node
        self._ask_at_s = math.inf
        self._has_logged = False  # that the router refuses the node's key
        dialer.send(hello)

    def ready(self, ready: Ready) -> None:
        self._ready = ready
        self.dialer.send(ready)
        self._ask_at_s = self._clock() + JOINING_S

    def receive(self) -> Iterator[ToNode | Unreadable | Disconnected]:
        while (message := self.dialer.receive()) is not None:
            self._note(message)
            yield message
        if self.dialer.connected:
            self._has_logged = False
        elif self._is_key_refused and not self._has_logged:
            self._has_logged = True
            log.error(
                "the router refused this node's key, or the node has no key",
                router=self.dialer.endpoint,
                hint="keys.file must name a copy of the router's key, or neither side may have one",
            )
        if self._clock() >= self._ask_at_s:
            self._ask_again()

    def standing(self) -> RouterStanding:
        """Return what the router makes of this node. Any thread may call this."""
        router = self.dialer.endpoint
        if self.dialer.connected:
            return self._answer or RouterStanding(router, "joining")
        is_refused = self._is_key_refused
        reason = "it refuses this node's key" if is_refused else "it cannot be reached"
        return RouterStanding(router, "absent", reason)

    @property
    def _is_key_refused(self) -> bool:
        return self.dialer.refusals >= REFUSALS_TO_LOG

    def _introduce(self) -> None:
        self.dialer.send(self._hello)
        self._ask_at_s = math.inf  # a router answers a node that is ready
        if self._ready is not None:
            self.ready(self._ready)

    def _ask_again(self) -> None:
        if self.dialer.connected:
            self._introduce()
        else:  # the last introduction still waits for the router
            self._ask_at_s = self._clock() + JOINING_S

    def _note(self, message: ToNode | Unreadable | Disconnected) -> None:
        router = self.dialer.endpoint
        if isinstance(message, Disconnected):
            self._answer = None
            self._introduce()
        elif isinstance(message, Refused) and self._ready is not None:
            reason = message.failure.message
            self._answer = RouterStanding(router, "refused", reason)
            if self._backoff is None:
                self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
                log.warning(
                    "the router refused this node, which asks again from time to time",
                    router=router,
                    reason=reason,
                )
            self._ask_at_s = self._clock() + self._backoff.after(0.0)
        elif isinstance(message, Peers):
            state: RegistrationState = (
                "out of service" if message.out_of_service else "in service"
            )
            self._answer = RouterStanding(router, state, message.out_of_service)
            self._ask_at_s = math.inf
            if self._backoff is not None:
                self._backoff = None
                log.info("the router took this node in", router=router)
