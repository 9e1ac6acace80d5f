"""Turn large bodies into token ids in a process of its own, and talk to it: both ends of a socket.

Parsing megabytes of JSON holds Python's lock for up to a second, which would stop every stream of
the router, so the event loop only copies bytes. The process starts with the first large body, and
again if it has ended; it ends with the socket that it inherits. It works on one body at a time, in
order of arrival; a client that leaves loses its turn. It must never load torch.
"""

import asyncio
import os
import socket
import struct
import sys
from collections.abc import Callable

import msgspec

from baton.protocol.errors import BatonError, ConfigError, Failure, Overloaded, from_failure
from baton.router.http.prepare import Job, Prepared, prepare
from baton.router.text import ChatTemplate, Text
from baton.runtime.clock import monotonic
from baton.runtime.log import logger
from baton.runtime.process import Child, Command, die_with_parent

MODULE = "baton.router.http.large_bodies"
# Running streams matter more than the start of a long prompt.
NICE = 5
# The lengths of a job and of its body, and the length of a reply, in bytes.
JOB_HEAD = struct.Struct("<II")
REPLY_HEAD = struct.Struct("<I")
# From the first byte of a body to its reply, including the start of the process.
TIMEOUT_S = 60.0
REAP_S = 1.0

log = logger("router")


class Reply(msgspec.Struct, frozen=True):
    """Exactly one of the two is set."""

    prepared: Prepared | None = None
    failure: Failure | None = None


class LargeBodies:
    """The process and the queue of bodies for it. Call `close` at the end."""

    def __init__(self, model_path: str, template_file: str) -> None:
        self._arguments = (model_path, template_file)
        self._encoder = msgspec.msgpack.Encoder()
        self._turn = asyncio.Lock()
        self._socket: _BodySocket | None = None

    async def prepare(self, job: Job, body: bytes) -> Prepared:
        """Return the token ids of a body. Raises `RequestError` or `Overloaded`."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise _too_slow() from None
        # From here on, the turn ends with the reply or the process, even if the client leaves.
        try:
            stream = self._socket
            if stream is None or stream.is_lost:
                stream = self._socket = await self._start()
        except BaseException:
            self._turn.release()
            raise
        reply = await stream.ask(self._encoder.encode(job), body)
        if reply.failure is not None:
            raise from_failure(reply.failure)
        assert reply.prepared is not None
        return reply.prepared

    def close(self) -> None:
        """End the process. It may be called again."""
        if self._socket is not None:
            self._socket.kill()
            self._socket.reap()

    async def _start(self) -> "_BodySocket":
        if self._socket is not None:
            self._socket.reap()
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = (str(theirs.fileno()), *self._arguments)
            command = Command("bodies", arguments, MODULE, pass_fds=(theirs.fileno(),))
            try:
                child = Child(command)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(
            lambda: _BodySocket(child, self._turn.release), sock=ours
        )
        return stream


class _BodySocket(asyncio.Protocol):
    """The socket to one process. `on_free` is called once after each `ask`."""

    def __init__(self, child: Child, on_free: Callable[[], None]) -> None:
        self.is_lost = False
        self._child = child
        self._on_free = on_free
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def ask(self, job: bytes, body: bytes) -> asyncio.Future[Reply]:
        """Send a body, after the last one has been answered."""
        assert self._reply is None
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._reply = loop.create_future()
        self._deadline = loop.call_later(TIMEOUT_S, self._give_up)
        self._transport.write(JOB_HEAD.pack(len(job), len(body)) + job)
        self._transport.write(body)
        return self._reply

    def _give_up(self) -> None:
        """End a process that takes too long, even if the body's client has left."""
        assert self._reply is not None
        if not self._reply.done():
            self._reply.set_exception(_too_slow())
        self.kill()

    def kill(self) -> None:
        self.is_lost = True
        self._child.kill()
        if self._transport is not None:
            self._transport.abort()

    def reap(self) -> None:
        """Wait for the end of a killed process, which takes milliseconds."""
        self._child.wait(monotonic() + REAP_S)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if len(received) < REPLY_HEAD.size:
            return
        (length,) = REPLY_HEAD.unpack_from(received)
        if len(received) < REPLY_HEAD.size + length:
            return
        reply = self._decoder.decode(memoryview(received)[REPLY_HEAD.size :])
        self._received = bytearray()
        self._end(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._child.kill()
        if self._reply is not None:
            log.warning("the process that reads large bodies ended", pid=self._child.pid)
            text = "the process that reads large bodies ended: send the request again"
            lost = Overloaded(text, code="body_process_lost")
            self._end(Reply(failure=lost.to_failure()))

    def _end(self, reply: Reply) -> None:
        waiter, self._reply = self._reply, None
        assert waiter is not None, "the process answers only what it was sent"
        if self._deadline is not None:
            self._deadline.cancel()
        if not waiter.done():
            waiter.set_result(reply)
        self._on_free()


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
