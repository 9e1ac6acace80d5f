"""The socket that nodes dial, on the router's event loop: bytes in, typed messages out.

`core` is its only caller and decides everything. A plain ZMQ socket with the loop's reader on its
descriptor: a message costs a few microseconds, an awaited one several times that. Never blocks.
"""

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.errors import NodeError
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import Hello, Refused, ToNode, ToRouter
from baton.runtime.channel import Listener, Received, name_of
from baton.runtime.keys import Keys
from baton.runtime.log import logger

BEATS = b"beats:"
# Messages read in one go before the loop may serve others.
BATCH = 512

Heard = Callable[[NodeId, ToRouter], None]
Gone = Callable[[NodeId], None]

log = logger("router")


class NodeSession(msgspec.Struct, frozen=True):
    """The life of a node's main channel, and of the process behind it."""

    peer: bytes
    epoch: Epoch


class NodeListener:
    """`heard` gets what a node says over either of its channels, `gone` the end of the main one.

    `idle` is called after each batch of them. A node is one session: the one that said Hello last,
    unless another process of the same name still lives, which is then refused.
    """

    def __init__(
        self, endpoint: str, keys: Keys, heard: Heard, gone: Gone, idle: Callable[[], None]
    ) -> None:
        """Binds; raises `ConfigError` when it cannot. To be called on a running event loop."""
        self._refusals_to_tell = 1
        self._heard, self._gone, self._idle = heard, gone, idle
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
        self._is_open = True
        self._loop.add_reader(self._listener.fileno(), self.drain)

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    def send(self, node: NodeId, message: ToNode) -> bool:
        """False: the node is gone or too slow, and `gone` will say so if it was known."""
        session = self._sessions.get(node)
        if session is None or not self._is_open:
            return False
        return self._listener.send(session.peer, message)

    def drain(self) -> None:
        """Read what is there."""
        if not self._is_open:
            return
        for _ in range(BATCH):
            received = self._listener.receive()
            if received is None:
                break
            self._pass_on(received)
        else:
            # The descriptor tells of changes only, so what is left must be read without it.
            self._again = self._loop.call_soon(self.drain)
        self._tell_refusals()
        self._idle()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            if self._again is not None:
                self._again.cancel()
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._context.term()

    def _tell_refusals(self) -> None:
        # Who is kept out tries again, so the lines become rare: at 1, 2, 4, 8, ...
        if self._listener.refusals >= self._refusals_to_tell:
            self._refusals_to_tell = 2 * self._listener.refusals
            log.warning(
                "connections were refused: no node of ours, or its keys.file is not a copy of ours",
                so_far=self._listener.refusals,
            )

    def _pass_on(self, received: Received[ToRouter]) -> None:
        name = name_of(received.peer)
        try:
            node = NodeId(name.removeprefix(BEATS).decode())
        except UnicodeDecodeError:
            return  # no node of ours: their names are text
        if name.startswith(BEATS):
            if received.message is not None:
                self._heard(node, received.message)
            return
        session = self._sessions.get(node)
        is_current = session is not None and session.peer == received.peer
        if isinstance(received.message, Hello):
            self._meet(node, received.peer, received.message)
        elif not is_current:
            return  # another session replaced this one, or it was refused
        elif received.message is None:
            del self._sessions[node]
            self._gone(node)
        else:
            self._heard(node, received.message)

    def _meet(self, node: NodeId, peer: bytes, hello: Hello) -> None:
        session = self._sessions.get(node)
        if session is not None and session.peer != peer:
            if session.epoch != hello.epoch:
                text = f"another process is {node} here: give each node an id of its own (--id)"
                self._listener.send(
                    peer, Refused(NodeError(text, code="duplicate_node").to_failure())
                )
                return
            # The same process over a new connection; the old one is not yet known to be dead.
            del self._sessions[node]
            self._gone(node)
        self._sessions[node] = NodeSession(peer, hello.epoch)
        self._heard(node, hello)
