"""Encode and decode messages, with one typed decoder per channel and direction.

Channels bound the size of a message before anything is allocated. A reader counts malformed
messages, drops them and logs some of them; they never end a process. A node answers a malformed
request if it can read the request's key.
"""

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import msgspec

from baton.protocol.errors import BatonError, Failure
from baton.protocol.ids import Key
from baton.protocol.messages import PeerMessage, ToNode, ToRouter

MAX_MESSAGE_BYTES = 16 << 20

T = TypeVar("T")


# What `decode` raises for bytes that are no message of the union.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class MalformedMessage(BatonError):
    code = "malformed_message"


class Codec(Generic[T]):
    """The library's functions for the messages of one union."""

    def __init__(self, union: type[T]) -> None:
        self.encode: Callable[[T], bytes] = msgspec.msgpack.Encoder().encode
        # Raises one of `UNREADABLE`.
        self.decode: Callable[[bytes | memoryview], T] = msgspec.msgpack.Decoder(
            union
        ).decode


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
        self._decode = self.decode
        self.decode = self._decode_or_refuse
        self._requests = msgspec.msgpack.Decoder(_Keyed)

    def _decode_or_refuse(self, data: bytes | memoryview) -> ToNode | Unreadable:
        try:
            return self._decode(data)
        except UNREADABLE as error:
            try:
                key = self._requests.decode(data).key
            except UNREADABLE:
                raise error from None
            return Unreadable(key, MalformedMessage(str(error)).to_failure())


def to_node_codec() -> Codec[ToNode]:
    return Codec[ToNode](ToNode)  # type: ignore[arg-type]


def to_router_codec() -> Codec[ToRouter]:
    return Codec[ToRouter](ToRouter)  # type: ignore[arg-type]


def peer_codec() -> Codec[PeerMessage]:
    return Codec[PeerMessage](PeerMessage)  # type: ignore[arg-type]
