"""The socket that nodes dial, read on the router's event loop, and the news that nodes get unasked.

The link turns bytes into messages and never blocks; all decisions are made above it. The loop
watches the descriptor of a plain ZMQ socket, because awaiting each message would cost several times
as much.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import assert_never

import msgspec

from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.errors import NodeError, RequestError
from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import (
    Cancel,
    CancelDone,
    Drain,
    DrainNode,
    DrainState,
    Hello,
    Peers,
    Profile,
    Ready,
    Refused,
    ResetPrefixCache,
    Role,
    ToNode,
    ToRouter,
    WatchCache,
)
from baton.router.core.registry import (
    Asked,
    Change,
    Entered,
    Left,
    Notice,
    Refuse,
    Registry,
)
from baton.router.core.request import DRAINING, HandoffEnded, NodeProcess
from baton.runtime.channels.listener import Channels, Received
from baton.runtime.channels.wire import OPERATOR, name_of
from baton.runtime.log import logger

HEARTBEATS = b"heartbeats:"
# A batch ends after this many messages or seconds, so that other work on the loop gets its turn.
BATCH = 512
BATCH_S = 0.02
# The largest number of processes for which cancels are kept that were not confirmed.
MAX_CANCELLED = 64

# A message of a node, or None at the end of the session of its main channel.
Heard = Iterator[tuple[NodeId, ToRouter | None]]

log = logger("router")


class NodeSession(msgspec.Struct, frozen=True):
    """One session of a node's main channel, and the process that opened it."""

    peer: bytes
    epoch: Epoch


class NodeLink:
    """`on_batch` gets each batch of messages, which it must read to the end.

    A node has one session: the one that sent Hello last. If another process of the same name is
    still connected, the new one is refused. `drain` answers operators.
    """

    def __init__(
        self,
        endpoint: str,
        channels: Channels,
        on_batch: Callable[[Heard], None],
        drain: Callable[[NodeId], DrainState],
    ) -> None:
        """Bind the endpoint. Raises `ConfigError`. An event loop must be running."""
        self._refusals_to_tell = 1
        self._on_batch = on_batch
        self._drain = drain
        self._channels = channels
        try:
            self._listener = channels.listen(
                endpoint, to_node_codec(), to_router_codec()
            )
        except BaseException:
            channels.close()
            raise
        self._sessions: dict[NodeId, NodeSession] = {}
        self._epochs: dict[NodeId, Epoch] = {}  # of the last session of each node
        self._open_cancels: dict[NodeProcess, set[Key]] = {}  # that are not confirmed
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.Handle | None = None
        self._outgoing: list[tuple[NodeSession, bytes]] = []
        self._is_open = True
        self._loop.add_reader(self._listener.fileno(), self._on_readable)

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    def send(self, node: NodeId, message: ToNode) -> None:
        """Send a message at the end of this turn of the loop. A lost one is dropped.

        Messages that are sent together wake libzmq's thread only once. A message that cannot be
        encoded raises here, where it ends only its own request.
        """
        if (
            isinstance(message, Cancel)
            and (epoch := self._epochs.get(node)) is not None
        ):
            # It is kept until it is confirmed, for the node may lose its channel alone. It then
            # keeps these sequences for their clients, which get them from other nodes. Another
            # process of its name may be here before it is back.
            self._open_cancels.setdefault((node, epoch), set()).update(message.keys)
            if len(self._open_cancels) > MAX_CANCELLED:
                del self._open_cancels[next(iter(self._open_cancels))]
        session = self._sessions.get(node)
        if session is None or not self._is_open:
            return
        encoded = self._listener.encode(message)
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append((session, encoded))

    def send_kept_cancels(self, process: NodeProcess) -> None:
        """Send a node the cancels that it has not confirmed, for it may have lived on."""
        if keys := self._open_cancels.pop(process, None):
            self.send(process[0], Cancel(tuple(keys), "node lost"))

    @property
    def has_backlog(self) -> bool:
        """Return whether messages may have arrived that the last batch had no room for."""
        return self._again is not None

    def read(self) -> None:
        """Read the messages that have arrived, up to one batch. Later turns read the rest."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._is_open:
            self._on_batch(self._batch())
            self._log_refusals()

    def close(self) -> None:
        if self._is_open:
            self._flush()
            self._is_open = False
            if self._again is not None:
                self._again.cancel()
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._channels.close()

    def _on_readable(self) -> None:
        if self._again is None:  # else this turn or the next one reads anyway
            self.read()

    def _batch(self) -> Heard:
        ends_s = self._loop.time() + BATCH_S
        for _ in range(BATCH):
            received = self._listener.receive()
            if received is None:
                return
            yield from self._heard(received)
            if self._loop.time() > ends_s:
                break
        # The descriptor only signals changes, so the rest must be read without another signal.
        self._again = self._loop.call_soon(self.read)

    def _heard(self, received: Received[ToRouter]) -> Heard:
        name = name_of(received.peer)
        message = received.message
        if name == OPERATOR:
            if isinstance(message, DrainNode):
                self._listener.send(received.peer, self._drain(message.node_id))
            return
        try:
            node = NodeId(name.removeprefix(HEARTBEATS).decode())
        except UnicodeDecodeError:
            return  # not a node, because the names of nodes are text
        session = self._sessions.get(node)
        if name.startswith(HEARTBEATS):
            if message is not None:
                yield node, message
        elif isinstance(message, Hello):
            yield from self._open_session(node, received.peer, message)
        elif session is not None and session.peer == received.peer:
            if message is None:
                del self._sessions[node]
            elif isinstance(message, CancelDone):
                self.forget_cancels((node, session.epoch), message.keys)
            yield node, message
        # It follows a refused Hello.
        elif message is not None and not isinstance(message, Ready):
            self._listener.end(received.peer)  # so that it introduces itself

    def _open_session(self, node: NodeId, peer: bytes, hello: Hello) -> Heard:
        session = self._sessions.get(node)
        if session is not None and session.peer != peer:
            # The end of the old session may not have been read yet.
            if session.epoch != hello.epoch and self._listener.is_connected(
                session.peer
            ):
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
            self._listener.end(session.peer)
            yield node, None
        self._sessions[node] = NodeSession(peer, hello.epoch)
        self._epochs[node] = hello.epoch
        yield node, hello

    def _flush(self) -> None:
        outgoing = self._outgoing
        self._outgoing = []
        for session, encoded in outgoing:
            self._listener.send_encoded(session.peer, encoded)

    def forget_cancels(self, process: NodeProcess, keys: Iterable[Key]) -> None:
        """Forget cancels that are confirmed, or of sequences whose client has come back."""
        if (kept := self._open_cancels.get(process)) is not None:
            kept.difference_update(keys)
            if not kept:
                del self._open_cancels[process]

    def _log_refusals(self) -> None:
        # A refused peer keeps trying, so only its 1st, 2nd, 4th, 8th … refusal is logged.
        if self._listener.refusals >= self._refusals_to_tell:
            self._refusals_to_tell = 2 * self._listener.refusals
            log.warning(
                "connections were refused: not a baton node, or its keys.file differs from ours",
                so_far=self._listener.refusals,
            )


class ProfileState(msgspec.Struct, frozen=True):
    """A profile. Each rank of a node writes and logs `NAME-NODE-rankN.json`."""

    name: str
    nodes: tuple[NodeId, ...]
    lost: tuple[NodeId, ...] = ()  # were profiled, but ended before the profile did


class NodeNotifier:
    """Tells nodes and the log what has changed about the nodes of this router.

    With `watches_caches`, it asks nodes in service what their prefix caches hold.
    """

    def __init__(
        self,
        registry: Registry,
        send: Callable[[NodeId, ToNode], None],
        *,
        watches_caches: bool,
    ) -> None:
        self._registry = registry
        self._send = send
        self._watches_caches = watches_caches
        self._profile: ProfileState | None = None
        self._profiled: dict[NodeId, Epoch] = {}

    def announce(self, change: Change) -> None:
        match change:
            case Refuse(node=node, failure=failure, is_new=is_new):
                if is_new:
                    log.warning("node refused", node=node, reason=failure.message)
                self._send(node, Refused(failure))
            case Entered(info=info):
                log.info("node in service", node=info.node_id, role=info.role)
                self._introduce(info.role)
                self._send(info.node_id, Peers(self._registry.peers_of(info.role)))
                if self._watches_caches:
                    self._send(info.node_id, WatchCache())
            case Asked(node=node, role=role):
                self._send(node, Peers(self._registry.peers_of(role)))
            case Notice(message=text, node=node, other=other, reason=reason):
                log.warning(
                    text,
                    node=node,
                    other=other,
                    **({"reason": reason} if reason else {}),
                )
            case Left(node=node, role=role, failure=failure):
                write = log.info if failure.code == DRAINING else log.warning
                write("node out of service", node=node, reason=failure.message)
                self._introduce(role)
                # Its channel may still work, so it gets the news too.
                if self._registry.node(node) is not None:
                    self._send(
                        node, Peers(self._registry.peers_of(role), failure.message)
                    )
            case _:
                assert_never(change)

    def reset_prefix_caches(self) -> None:
        """Let nodes forget their prefix caches, before any request that they get later."""
        for node in self._registry.nodes:
            if node.info is not None:
                self._send(node.node_id, ResetPrefixCache())

    def start_profile(self) -> ProfileState:
        """Let every ready node record its steps. Raises `RequestError` during another profile."""
        if self._profile is not None:
            text = (
                f"{self._profile.name} is being recorded: stop it first (/stop_profile)"
            )
            raise RequestError(text, code="profile_running")
        name = f"profile-{secrets.token_hex(4)}"
        self._profiled = {
            n.node_id: n.epoch for n in self._registry.nodes if n.info is not None
        }
        self._profile = ProfileState(name, tuple(self._profiled))
        for node in self._profiled:
            self._send(node, Profile(name))
        return self._profile

    def stop_profile(self) -> ProfileState:
        """Let the nodes of the profile write their traces. Raises `RequestError` if there is none.

        A node that has ended or started anew since then writes nothing, and is among `lost`.
        """
        if self._profile is None:
            text = "no profile is being recorded: start one first (/start_profile)"
            raise RequestError(text, code="no_profile")
        alive = {n.node_id: n.epoch for n in self._registry.nodes if n.info is not None}
        nodes = tuple(n for n, epoch in self._profiled.items() if alive.get(n) == epoch)
        lost = tuple(n for n in self._profiled if n not in nodes)
        state = ProfileState(self._profile.name, nodes, lost)
        self._profile = None
        for node in nodes:
            self._send(node, Profile())
        return state

    def drain(self, node_id: NodeId) -> DrainState:
        """Tell a node to drain, again if necessary, and return how far it is."""
        node = self._registry.node(node_id)
        if node is None:
            known = ", ".join(self._registry.node_ids) or "none"
            text = f"there is no node {node_id}; the nodes of this router: {known}"
            return DrainState(node_id, problem=text)
        if node.info is None:
            text = (
                f"{node_id} is still starting: end its process instead of draining it"
            )
            return DrainState(node_id, is_known=True, problem=text)
        self._registry.drains(node_id)
        self._send(node_id, Drain())
        num_running = node.load.num_running + node.load.num_waiting
        return DrainState(node_id, is_known=True, num_running=num_running)

    def judge(self, now_s: float, ended: HandoffEnded) -> None:
        """Note what a handoff shows about its pair. A change is logged."""
        pairs = self._registry.pairs
        failure = ended.failure
        names = {"prefill": ended.prefill[0], "decode": ended.decode[0]}
        if failure is None:
            if pairs.worked(ended.prefill, ended.decode):
                log.info("a pair of nodes works again", **names)
        elif pairs.failed(now_s, ended.prefill, ended.decode, failure):
            log.warning(
                "a pair of nodes is avoided: a handoff failed",
                **names,
                code=failure.code,
                reason=failure.message,
            )

    def _introduce(self, role: Role) -> None:
        """Tell all nodes of the other role that the set of nodes with this role has changed."""
        other: Role = "decode" if role == "prefill" else "prefill"
        peers = Peers(self._registry.peers_of(other))
        for node in self._registry.in_service(other):
            self._send(node.node_id, peers)
