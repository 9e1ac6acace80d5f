"""The bodies of requests, read under limits: their type, size and time, and memory for large ones.

`Handlers` makes one `Bodies` and reads every body with it. A body that is not small has to find
room among the other large ones, and gives it back when its prompts have become token ids, so what
clients send cannot fill the memory of the router.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from aiohttp import web

from baton.protocol.errors import Overloaded, RequestError
from baton.router.health import ServedModel
from baton.runtime.log import clip

MIB = 1024 * 1024
# Up to this size a body is parsed on the event loop, which takes a few milliseconds at the most.
SMALL_BYTES = 128 * 1024
BODY_TIMEOUT_S = 60.0
# A body may be this large for any model, so that many short prompts fit into one request.
_ALWAYS_ALLOWED_BYTES = 4 * MIB
# JSON may take six bytes for one of a prompt: \u001f.
_ESCAPED_BYTES = 6
# Bodies up to this size need no room: as many as there may be connections are no danger.
_FREE_BYTES = 4 * 1024
# How many bodies of the largest size may be in memory at once.
_LARGE_BODIES = 16


def body_limit(max_body_mib: int, model: ServedModel, max_token_bytes: int) -> int:
    """Return the size of the largest body that can be of use, in bytes."""
    longest_prompt = model.max_model_len * max_token_bytes * _ESCAPED_BYTES
    return min(max_body_mib * MIB, max(longest_prompt, _ALWAYS_ALLOWED_BYTES))


class Room:
    """The memory that one body holds, as long as its context lasts."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Hold so many bytes; raises `Overloaded` if other bodies hold too much already."""
        self._bodies.take(num_bytes)
        self.num_bytes += num_bytes


class Bodies:
    def __init__(self, max_body_mib: int) -> None:
        self._most_bytes = max_body_mib * MIB * _LARGE_BODIES
        self._held_bytes = 0

    @contextlib.contextmanager
    def room(self) -> Iterator[Room]:
        room = Room(self)
        try:
            yield room
        finally:
            self._held_bytes -= room.num_bytes

    def take(self, num_bytes: int) -> None:
        if self._held_bytes + num_bytes > self._most_bytes:
            held_mib = self._held_bytes // MIB
            text = f"the router holds {held_mib} MiB of large bodies and takes no more right now"
            raise Overloaded(text, code="too_many_large_bodies")
        self._held_bytes += num_bytes

    async def read(self, request: web.Request, room: Room, max_bytes: int) -> bytes:
        """Return the body of a request; raises `RequestError` or `Overloaded`."""
        _check_type(request)
        length, content = request.content_length, request.content
        if length is not None and length > max_bytes:
            raise _too_large(max_bytes)
        try:
            is_small = length is not None and length <= _FREE_BYTES
            if is_small and content.is_eof() and "Content-Encoding" not in request.headers:
                return content.read_nowait()  # all of it has come
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read(request, room, max_bytes)
        except TimeoutError:
            text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise RequestError(text, code="timeout", http_status=408) from None
        except web.RequestPayloadError as error:
            text = "the body is not encoded in the way that its headers say"
            raise RequestError(text, code="invalid_body") from error

    async def _read(self, request: web.Request, room: Room, max_bytes: int) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        while chunk := await request.content.readany():
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            if num_bytes > max(_FREE_BYTES, room.num_bytes):
                # Without a length, or with a compressed body, the rest may be of any size.
                room.take(max(request.content_length or 0, num_bytes) - room.num_bytes)
        return b"".join(chunks)


def _too_large(max_bytes: int) -> RequestError:
    text = (
        f"the body is larger than {max_bytes / MIB:.3g} MiB, which is as much as the longest "
        f"prompt of this model or router.max_body_mib allows"
    )
    return RequestError(text, code="body_too_large", http_status=413)


def _check_type(request: web.Request) -> None:
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        given = clip(request.headers.get("Content-Type", "")) or "none"
        text = f"the header Content-Type must be application/json, but it is {given}"
        raise RequestError(text, code="unsupported_media_type", http_status=415)
