"""The socket that nodes dial, read on the router's event loop.

`core` is its only caller and makes all decisions; the listener only turns bytes into messages. It
never blocks. The loop watches the descriptor of a plain ZMQ socket, because awaiting each message
would cost several times as much.
"""

import asyncio
from collections.abc import Callable
from typing import assert_never

import msgspec
import zmq

from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.errors import NodeError
from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import (
    Cancel,
    Drain,
    DrainNode,
    DrainState,
    Hello,
    Peers,
    Refused,
    Role,
    ToNode,
    ToRouter,
    WatchCache,
)
from baton.router.registry import Change, Entered, Left, Notice, Refuse, Registry
from baton.router.request import DRAINING, HandoffEnded
from baton.runtime.channels.keys import Keys
from baton.runtime.channels.listener import Listener, Received
from baton.runtime.channels.wire import OPERATOR, name_of
from baton.runtime.log import logger

BEATS = b"beats:"
# The number of messages that are read before other work on the loop gets its turn.
BATCH = 512

Heard = Callable[[NodeId, ToRouter], None]
Gone = Callable[[NodeId], None]
Unsent = Callable[[NodeId, ToNode], None]
DrainAsked = Callable[[NodeId], DrainState]

log = logger("router")


class NodeSession(msgspec.Struct, frozen=True):
    """One session of a node's main channel, and the process that opened it."""

    peer: bytes
    epoch: Epoch


class NodeListener:
    """`heard` gets messages of both channels of a node, and `gone` the end of the main channel.

    `idle` is called after each batch of messages. A node has one session: the one that sent Hello
    last. If another process of the same name is still connected, the new one is refused.
    """

    def __init__(
        self, endpoint: str, keys: Keys, heard: Heard, gone: Gone, idle: Callable[[], None]
    ) -> None:
        """Bind the endpoint. Raises `ConfigError`. An event loop must be running."""
        self._refusals_to_tell = 1
        self._heard, self._gone, self._idle = heard, gone, idle
        self.drain_asked: DrainAsked | None = None  # answers operators
        self.unsent: Unsent | None = None  # gets messages for nodes that are gone or too slow
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._listener = Listener[ToNode, ToRouter](
                endpoint, to_node_codec(), to_router_codec(), self._context, keys
            )
        except BaseException:
            self._context.term()
            raise
        self._sessions: dict[NodeId, NodeSession] = {}
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.Handle | None = None
        self._outgoing: list[tuple[NodeId, bytes, ToNode, bytes]] = []
        self._is_open = True
        self._loop.add_reader(self._listener.fileno(), self.drain)

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    def send(self, node: NodeId, message: ToNode) -> None:
        """Send a message at the end of this turn of the loop. `unsent` reports a lost one.

        Messages that are sent together wake libzmq's thread only once. A message that cannot be
        encoded raises here, where it ends only its own request.
        """
        session = self._sessions.get(node)
        if session is None or not self._is_open:
            self._lose(node, message)
            return
        encoded = self._listener.encode(message)
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append((node, session.peer, message, encoded))

    def drain(self) -> None:
        """Read the messages that have arrived, up to one batch."""
        if not self._is_open:
            return
        for _ in range(BATCH):
            received = self._listener.receive()
            if received is None:
                break
            self._pass_on(received)
        else:
            # The descriptor only signals changes, so the rest must be read without another signal.
            self._again = self._loop.call_soon(self.drain)
        self._tell_refusals()
        self._idle()

    def close(self) -> None:
        if self._is_open:
            self._flush()
            self._is_open = False
            if self._again is not None:
                self._again.cancel()
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._context.term()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        for node, peer, message, encoded in outgoing:
            if not self._listener.send_encoded(peer, encoded):
                self._lose(node, message)

    def _lose(self, node: NodeId, message: ToNode) -> None:
        if self.unsent is not None:
            self.unsent(node, message)

    def _tell_refusals(self) -> None:
        # A refused peer keeps trying, so only its 1st, 2nd, 4th, 8th … refusal is logged.
        if self._listener.refusals >= self._refusals_to_tell:
            self._refusals_to_tell = 2 * self._listener.refusals
            log.warning(
                "connections were refused: not a baton node, or its keys.file differs from ours",
                so_far=self._listener.refusals,
            )

    def _pass_on(self, received: Received[ToRouter]) -> None:
        name = name_of(received.peer)
        if name == OPERATOR:
            if isinstance(received.message, DrainNode) and self.drain_asked is not None:
                self._listener.send(received.peer, self.drain_asked(received.message.node_id))
            return
        try:
            node = NodeId(name.removeprefix(BEATS).decode())
        except UnicodeDecodeError:
            return  # not a node, because the names of nodes are text
        if name.startswith(BEATS):
            if received.message is not None:
                self._heard(node, received.message)
            return
        session = self._sessions.get(node)
        is_current = session is not None and session.peer == received.peer
        if isinstance(received.message, Hello):
            self._meet(node, received.peer, received.message)
        elif not is_current:
            return  # another session replaced this one, or this one was refused
        elif received.message is None:
            del self._sessions[node]
            self._gone(node)
        else:
            self._heard(node, received.message)

    def _meet(self, node: NodeId, peer: bytes, hello: Hello) -> None:
        session = self._sessions.get(node)
        if session is not None and session.peer != peer:
            # The end of the old session may not have been read yet.
            if session.epoch != hello.epoch and self._listener.is_connected(session.peer):
                text = (
                    f"another process uses the id {node} at this router: give each node an id of "
                    "its own (--id)"
                )
                log.warning("node refused", node=node, reason=text)
                failure = NodeError(text, code="duplicate_node").to_failure()
                self._listener.send(peer, Refused(failure))
                return
            # This is the same process over a new connection, or the successor of a dead one.
            del self._sessions[node]
            self._gone(node)
        self._sessions[node] = NodeSession(peer, hello.epoch)
        self._heard(node, hello)


Tell = Callable[[NodeId, Peers | Refused | Drain | Cancel | WatchCache], object]
# The largest number of nodes for which cancels are kept that could not be sent.
MAX_UNHEARD = 64

log = logger("router")


class Announcer:
    """With `watches_caches`, it asks nodes in service what their prefix caches hold."""

    def __init__(self, registry: Registry, tell: Tell, *, watches_caches: bool) -> None:
        self._registry = registry
        self._tell = tell
        self._watches_caches = watches_caches
        self._unheard: dict[NodeId, set[Key]] = {}

    def announce(self, change: Change) -> None:
        match change:
            case Refuse(node=node, failure=failure, is_new=is_new):
                if is_new:
                    log.warning("node refused", node=node, reason=failure.message)
                self._tell(node, Refused(failure))
            case Entered(info=info):
                log.info("node in service", node=info.node_id, role=info.role)
                self._introduce(info.role)
                self._tell(info.node_id, Peers(self._registry.peers_of(info.role)))
                if self._watches_caches:
                    self._tell(info.node_id, WatchCache())
                if keys := self._unheard.pop(info.node_id, None):
                    self._tell(info.node_id, Cancel(tuple(keys), "node lost"))
            case Notice(message=text, node=node, other=other, reason=reason):
                log.warning(text, node=node, other=other, **({"reason": reason} if reason else {}))
            case Left(node=node, role=role, failure=failure):
                say = log.info if failure.code == DRAINING else log.warning
                say("node out of service", node=node, reason=failure.message)
                self._introduce(role)
                # Its channel may still work, so it is told.
                if self._registry.node(node) is not None:
                    self._tell(node, Peers(self._registry.peers_of(role), failure.message))
            case _:
                assert_never(change)

    def unsent(self, node: NodeId, message: ToNode) -> None:
        """Keep a cancel that cannot be sent to its node now; other messages are dropped.

        The node may have lost only its channel. It then keeps these sequences for their clients,
        which get them from other nodes.
        """
        if not isinstance(message, Cancel):
            return
        self._unheard.setdefault(node, set()).update(message.keys)
        if len(self._unheard) > MAX_UNHEARD:
            del self._unheard[next(iter(self._unheard))]

    def keeps(self, node: NodeId, key: Key) -> None:
        """Forget a cancel of this sequence, because its client has come back for it."""
        if (unheard := self._unheard.get(node)) is not None:
            unheard.discard(key)

    def drain(self, node_id: NodeId) -> DrainState:
        """Tell a node to drain, again if necessary, and return how far it is."""
        answer = drained(self._registry, node_id)
        if not answer.problem:
            self._tell(node_id, Drain())
        return answer

    def judge(self, now_s: float, ended: HandoffEnded) -> None:
        """Note what a handoff shows about its pair. A change is logged."""
        pairs, failure = self._registry.pairs, ended.failure
        names = {"prefill": ended.prefill[0], "decode": ended.decode[0]}
        if failure is None:
            if pairs.worked(ended.prefill, ended.decode):
                log.info("a pair of nodes works again", **names)
        elif pairs.failed(now_s, ended.prefill, ended.decode, failure):
            log.warning("a pair of nodes is avoided: a handoff failed", **names,
                        code=failure.code, reason=failure.message)  # fmt: skip

    def _introduce(self, role: Role) -> None:
        """Tell all nodes of the other role that the set of nodes with this role has changed."""
        other: Role = "decode" if role == "prefill" else "prefill"
        peers = Peers(self._registry.peers_of(other))
        for node in self._registry.in_service(other):
            self._tell(node.node_id, peers)


def drained(registry: Registry, node_id: NodeId) -> DrainState:
    """Give a node no more work. Return how far it is, or why it cannot be drained."""
    node = registry.node(node_id)
    if node is None:
        known = ", ".join(registry.node_ids) or "none"
        text = f"there is no node {node_id}; the nodes of this router: {known}"
        return DrainState(node_id, problem=text)
    if node.info is None:
        text = f"{node_id} is still starting: end its process instead of draining it"
        return DrainState(node_id, is_known=True, problem=text)
    registry.drains(node_id)
    num_running = node.load.num_running + node.load.num_waiting
    return DrainState(node_id, is_known=True, num_running=num_running)
