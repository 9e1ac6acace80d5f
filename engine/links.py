"""The interface of an engine loop to its connections to other processes.

`engine/sockets.py` implements them over ZMQ. Only the loop calls them, and only `wait` blocks.
"""

from typing import Protocol

import msgspec

from baton.engine.outputs import Origin
from baton.kv_transfer.interfaces import DialPeer, DropPeer, FromPeer, PeerLost, ToPeer
from baton.protocol.codec import Unreadable
from baton.protocol.messages import ToNode, ToRouter


class FromRouter(msgspec.Struct, frozen=True):
    origin: Origin
    message: ToNode | Unreadable


class RouterLost(msgspec.Struct, frozen=True):
    """The channel to that router broke, so its requests are no longer wanted."""

    origin: Origin


LinkEvent = FromRouter | RouterLost | FromPeer | PeerLost


class Links(Protocol):
    def receive(self) -> list[LinkEvent]: ...

    def to_router(self, origin: Origin, message: ToRouter) -> None: ...

    def to_peer(self, command: ToPeer | DialPeer | DropPeer) -> None: ...

    def watch(self, fileno: int) -> None:
        """Let `wait` return when this descriptor becomes readable."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when something may have arrived, or after `timeout_s` seconds."""
        ...
