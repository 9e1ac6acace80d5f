"""The process that turns large bodies into token ids: `python -m baton.router.http.body_process`.

`LargeBodies` starts it and sends it one body at a time over an inherited socket. Parsing megabytes
of JSON holds Python's lock for up to a second, which would stop every stream of the router, so this
process does it. The process ends with the socket. It must never load torch.
"""

import os
import socket
import struct
import sys

import msgspec

from baton.protocol.errors import BatonError, ConfigError, Failure
from baton.router.chat_template import ChatTemplate
from baton.router.http.prepare import Job, Prepared, prepare
from baton.router.text import Text
from baton.runtime.process import die_with_parent

# Running streams matter more than the start of a long prompt.
NICE = 5
# The lengths of a job and of its body, and the length of a reply, in bytes.
JOB_HEAD = struct.Struct("<II")
REPLY_HEAD = struct.Struct("<I")


class Reply(msgspec.Struct, frozen=True):
    """Exactly one of the two is set."""

    prepared: Prepared | None = None
    failure: Failure | None = None


def main(arguments: list[str]) -> int:
    """Serve the socket until its other end closes."""
    descriptor, model_path, template_file = arguments
    os.nice(NICE)
    stream = socket.socket(fileno=int(descriptor))
    text = Text.load(model_path)
    try:
        template = ChatTemplate.load(model_path, template_file)
    except ConfigError:  # the router has logged it, and serves all requests but chats
        template = None
    decoder = msgspec.msgpack.Decoder(Job)
    encoder = msgspec.msgpack.Encoder()
    while head := _received(stream, JOB_HEAD.size):
        job_bytes, body_bytes = JOB_HEAD.unpack(head)
        job, body = _received(stream, job_bytes), _received(stream, body_bytes)
        reply = encoder.encode(_reply_to(decoder.decode(job), body, text, template))
        stream.sendall(REPLY_HEAD.pack(len(reply)))
        stream.sendall(reply)
    return 0


def _reply_to(job: Job, body: bytes, text: Text, template: ChatTemplate | None) -> Reply:
    try:
        return Reply(prepare(job, body, text, template))
    except BatonError as error:
        return Reply(failure=error.to_failure())


def _received(stream: socket.socket, num_bytes: int) -> bytes:
    """Return that many bytes, or none at the end of the stream."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = stream.recv_into(view)
        if not received:
            return b""
        view = view[received:]
    return bytes(data)


if __name__ == "__main__":
    die_with_parent()
    try:
        sys.exit(main(sys.argv[1:]))
    except BatonError as error:
        sys.exit(f"baton: {error.message}")
