"""Opens the channels of one thread, all with one set of keys, and waits for any of them."""

import select

import zmq

from baton.protocol.codec import Codec
from baton.runtime.channels.dialer import Dialer, In, Out
from baton.runtime.channels.keys import NO_KEYS, Keys
from baton.runtime.channels.listener import Listener


class Channels:
    """One ZMQ context with its I/O thread. Only `wait` blocks."""

    def __init__(self, keys: Keys = NO_KEYS) -> None:
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._epoll = select.epoll()

    def dial(
        self, endpoint: str, name: bytes, outgoing: Codec[Out], incoming: Codec[In]
    ) -> Dialer[Out, In]:
        """Begin to connect. Raises `ConfigError` if the endpoint cannot or must not be dialled."""
        return Dialer(endpoint, name, outgoing, incoming, self._context, self._keys)

    def listen(self, endpoint: str, outgoing: Codec[Out], incoming: Codec[In]) -> Listener[Out, In]:
        """Bind. Raises `ConfigError` if the endpoint cannot or must not be bound."""
        return Listener(endpoint, outgoing, incoming, self._context, self._keys)

    def watch(self, fileno: int) -> None:
        """Let this descriptor end a `wait`."""
        self._epoll.register(fileno, select.EPOLLIN)

    def unwatch(self, fileno: int) -> None:
        self._epoll.unregister(fileno)

    def wait(self, timeout_s: float) -> None:
        self._epoll.poll(timeout_s)

    def close(self) -> None:
        """End the context, once all dialers and listeners are closed."""
        self._epoll.close()
        self._context.term()
