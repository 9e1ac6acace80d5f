"""Turn large bodies into token ids in a process of its own, and talk to it: both ends of a socket.

Parsing megabytes of JSON holds Python's lock for up to a second, which would stop every stream of
the router, so a thread gives them to a process and waits there. The process starts with the first
large body, and again if it has ended; it ends with the socket that it inherits. It works on one
body at a time, in order of arrival. It must never load torch.
"""

import asyncio
import os
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec

from baton.protocol.errors import BatonError, ConfigError, Failure, Overloaded, from_failure
from baton.router.http.api.prepare import Job, Prepared, prepare
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.tokenizer import Text
from baton.runtime.clock import monotonic
from baton.runtime.log import logger
from baton.runtime.process import Child, Command, die_with_parent

MODULE = "baton.router.http.api.large_bodies"
# Running streams matter more than the start of a long prompt.
NICE = 5
# The lengths of a job and of its body, and the length of a reply, in bytes.
JOB_HEAD = struct.Struct("<II")
REPLY_HEAD = struct.Struct("<I")
# From a body to its reply, including the wait for its turn or the start of the process.
TIMEOUT_S = 60.0
REAP_S = 1.0

log = logger("router")


class Reply(msgspec.Struct, frozen=True):
    """Exactly one of the two is set."""

    prepared: Prepared | None = None
    failure: Failure | None = None


class LargeBodies:
    """The process, and the thread that waits for it. Call `close` at the end."""

    def __init__(self, model_path: str, template_file: str) -> None:
        self._arguments = (model_path, template_file)
        # One thread, so that bodies wait in its queue; one whose client leaves loses its turn.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False

    async def prepare(self, job: Job, body: bytes) -> Prepared:
        """Return the token ids of a body. Raises `RequestError` or `Overloaded`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reply = await loop.run_in_executor(self._thread, self._ask, job, body)
        except TimeoutError:
            raise _too_slow() from None
        if reply.failure is not None:
            raise from_failure(reply.failure)
        assert reply.prepared is not None
        return reply.prepared

    def close(self) -> None:
        """End the process. It may be called again."""
        self._is_closed = True
        if self._child is not None:
            self._child.kill()
        self._thread.shutdown(cancel_futures=True)  # its socket has ended with the process
        self._drop()

    def _ask(self, job: Job, body: bytes) -> Reply:
        """Give a body to the process. One that ends, or takes too long, is replaced."""
        if self._socket is None:
            self._start()
        assert self._socket is not None
        assert self._child is not None
        self._socket.settimeout(TIMEOUT_S)  # even if the body's client has left
        encoded = msgspec.msgpack.encode(job)
        try:
            self._socket.sendall(JOB_HEAD.pack(len(encoded), len(body)) + encoded)
            self._socket.sendall(body)
            if head := _received(self._socket, REPLY_HEAD.size):
                (length,) = REPLY_HEAD.unpack(head)
                if data := _received(self._socket, length):
                    return msgspec.msgpack.decode(data, type=Reply)
        except TimeoutError:
            self._drop()
            return Reply(failure=_too_slow().to_failure())
        except OSError:
            pass
        log.warning("the process that reads large bodies ended", pid=self._child.pid)
        self._drop()
        text = "the process that reads large bodies ended: send the request again"
        return Reply(failure=Overloaded(text, code="body_process_lost").to_failure())

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = (str(theirs.fileno()), *self._arguments)
            command = Command("bodies", arguments, MODULE, pass_fds=(theirs.fileno(),))
            try:
                self._child = Child(command)
            except BaseException:
                self._drop()
                raise
        if self._is_closed:
            self._child.kill()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait(monotonic() + REAP_S)  # it takes milliseconds
        self._socket = self._child = None


def _too_slow() -> Overloaded:
    text = f"the body could not be read within {TIMEOUT_S:g} s"
    return Overloaded(text, code="body_timeout")


# --- the process --------------------------------------------------------------------------------


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
