"""What connects an engine loop with other processes, as the loop sees it.

The real one (`engine/sockets.py`) holds ZMQ sockets; the simulator and tests have their own. The
loop is the only caller. Nothing here blocks but `wait`.
"""

from typing import Protocol

import msgspec

from baton.engine.outputs import Origin
from baton.kv_transfer.interfaces import DialPeer, DropPeer, FromPeer, PeerLost, ToPeer
from baton.protocol.messages import ToNode, ToRouter


class FromRouter(msgspec.Struct, frozen=True):
    origin: Origin
    message: ToNode


class RouterLost(msgspec.Struct, frozen=True):
    """The channel broke or the router was silent too long; its requests are nobody's now."""

    origin: Origin


LinkEvent = FromRouter | RouterLost | FromPeer | PeerLost


class Links(Protocol):
    def receive(self, now_s: float) -> list[LinkEvent]: ...

    def to_router(self, origin: Origin, message: ToRouter) -> None: ...

    def to_peer(self, command: ToPeer | DialPeer | DropPeer) -> None: ...

    def watch(self, fileno: int) -> None:
        """Let `wait` return when this descriptor becomes readable."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until something may have come, at most `timeout_s` seconds."""
        ...
