"""Encode and decode messages, with one typed decoder per channel and direction.

Sizes are checked before anything is allocated. A reader counts malformed messages, drops them and
logs some of them; they never end a process. A node answers a malformed request if it can read the
request's key.
"""

from typing import Generic, Literal, TypeVar

import msgspec

from baton.protocol.errors import BatonError, Failure
from baton.protocol.ids import Key
from baton.protocol.messages import PeerMessage, ToNode, ToRouter

MAX_MESSAGE_BYTES = 16 << 20

T = TypeVar("T")


class MalformedMessage(BatonError):
    code = "malformed_message"


class Codec(Generic[T]):
    def __init__(self, union: type[T]) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: T) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> T:
        """Return the message. Raises `MalformedMessage` unless `data` is one of the union."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise MalformedMessage(
                f"message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}"
            )
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(str(error)) from error


class Unreadable(msgspec.Struct, frozen=True, tag=True):
    """A malformed `Prefill` or `Decode` whose key could be read. It never travels."""

    key: Key
    failure: Failure


class _Keyed(msgspec.Struct):
    """The part of a `Prefill` or `Decode` that a node needs in order to refuse it."""

    type: Literal["Prefill", "Decode"]
    key: Key


class NodeInbox(Codec[ToNode | Unreadable]):
    """Decodes the messages from routers to a node, which must answer every request."""

    def __init__(self) -> None:
        super().__init__(ToNode)  # type: ignore[arg-type]
        self._requests = msgspec.msgpack.Decoder(_Keyed)

    def decode(self, data: bytes | memoryview) -> ToNode | Unreadable:
        try:
            return super().decode(data)
        except MalformedMessage as error:
            try:
                key = self._requests.decode(data).key
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                raise error from None
            return Unreadable(key, error.to_failure())


def to_node_codec() -> Codec[ToNode]:
    return Codec[ToNode](ToNode)  # type: ignore[arg-type]


def to_router_codec() -> Codec[ToRouter]:
    return Codec[ToRouter](ToRouter)  # type: ignore[arg-type]


def peer_codec() -> Codec[PeerMessage]:
    return Codec[PeerMessage](PeerMessage)  # type: ignore[arg-type]
