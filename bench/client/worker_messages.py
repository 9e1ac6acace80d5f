"""What the load and its client processes say to each other, and how it is framed.

A frame is four bytes of length and one msgpack message over a socket pair. `load.py` has the
blocking end, `worker.py` the one of an event loop. Records travel when the load is over, so that
shipping them disturbs nothing that is being measured.
"""

import struct

import msgspec

from baton.bench.client.target import Target
from baton.bench.records import ClientProcess, Planned

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = (1 << 32) - 1


class Share(msgspec.Struct, frozen=True, tag=True):
    """What one client process is to do. `concurrency` None is an open loop."""

    target: Target
    requests: list[Planned]
    concurrency: int | None
    max_concurrency: int | None
    stop_after_s: float | None
    keep_text: bool


class Go(msgspec.Struct, frozen=True, tag=True):
    """The schedule starts at `start_s` on the monotonic clock that all processes share."""

    start_s: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Send nothing more, give up what is under way, and report."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Waiting for `Go`; the warm-up of a closed loop is over."""


class Misfit(msgspec.Struct, frozen=True, tag=True):
    """The share cannot be done: a setting is wrong."""

    message: str


class Count(msgspec.Struct, frozen=True, tag=True):
    """So far, warm-up included."""

    sent: int
    ended: int
    failed: int
    tokens: int


class Batch(msgspec.Struct, frozen=True, tag=True):
    """Encoded records."""

    records: list[msgspec.Raw]


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Nothing comes after this."""

    client: ClientProcess


ToWorker = Share | Go | Stop
FromWorker = Ready | Misfit | Count | Batch | Finished

_encode = msgspec.msgpack.Encoder().encode
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def frame(message: ToWorker | FromWorker) -> bytes:
    data = _encode(message)
    return LENGTH.pack(len(data)) + data


def decode_to_worker(data: bytes | bytearray) -> ToWorker:
    return _to_worker.decode(data)


def decode_from_worker(data: bytes | bytearray) -> FromWorker:
    return _from_worker.decode(data)
