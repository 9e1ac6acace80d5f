"""Lets a process connect to a listener only if it proves that it has the cluster's first key.

Only `wire` uses it. ZMQ sends a request of its authentication protocol (ZAP, RFC 27) over a socket
inside the process, once per handshake, and waits for the answer. The listener answers on its own
thread, so there is no thread to start or to join.
"""

import zmq
from zmq.utils import z85

from baton.runtime.channels.keys import KeyPair

# ZMQ allows one such address per context, so a context has one listener with a key.
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = b"baton"


class Gate:
    """Answers ZMQ's authentication requests for one listener."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Let in no dialer until `allow`."""
        self._allowed = b""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def allow(self, pair: KeyPair) -> None:
        """Let in only the processes that hold this key."""
        self._allowed = z85.decode(pair.public)

    def answer(self) -> None:
        """Answer one request that has arrived."""
        version, number, domain, _address, _identity, mechanism, *credentials = (
            self.socket.recv_multipart(zmq.NOBLOCK)
        )
        is_allowed = (version, domain, mechanism, credentials) == (
            ZAP_VERSION, DOMAIN, b"CURVE", [self._allowed],
        )  # fmt: skip
        verdict = (b"200", b"OK") if is_allowed else (b"400", b"another key")
        self.socket.send_multipart((ZAP_VERSION, number, *verdict, b"", b""), zmq.NOBLOCK)

    def close(self) -> None:
        # Unbind at once, so that the context's next listener can bind its gate there.
        self.socket.unbind(ZAP_ENDPOINT)
        self.socket.close(0)
