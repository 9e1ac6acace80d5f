"""Read the bodies of requests within limits of type, size and time, and of memory for large ones.

A body that is not small reserves memory of a limited budget as it arrives, and gives it back when
its prompts have become token ids, so that clients cannot fill the memory of the router.
"""

import asyncio

from aiohttp import web

from baton.protocol.errors import Overloaded, RequestError
from baton.router.health import ServedModel
from baton.runtime.log import clip

MIB = 1024 * 1024
# A body up to this size is parsed on the event loop, which takes a few milliseconds at most.
SMALL_BYTES = 128 * 1024
BODY_TIMEOUT_S = 60.0
# A body that brings nothing for so long has stalled: it must not keep its memory for a minute.
STALLED_S = 10.0
# A body may be this large with any model, so that many short prompts fit one request.
_ALWAYS_ALLOWED_BYTES = 4 * MIB
# JSON may take six bytes for one byte of a prompt, as in \u001f.
_ESCAPED_BYTES = 6
# Bodies up to this size reserve nothing: there can be as many as connections without danger.
_FREE_BYTES = 4 * 1024
# The number of bodies of the largest size that may be in memory at once.
_LARGE_BODIES = 16


def body_limit(max_body_mib: int, model: ServedModel, max_token_bytes: int) -> int:
    """Return the size in bytes of the largest body that the model can use."""
    longest_prompt = model.max_model_len * max_token_bytes * _ESCAPED_BYTES
    return min(max_body_mib * MIB, max(longest_prompt, _ALWAYS_ALLOWED_BYTES))


class Room:
    """The memory that one body holds while its context lasts."""

    def __init__(self, bodies: "Bodies") -> None:
        self._bodies = bodies
        self._num_bytes = 0

    def __enter__(self) -> "Room":
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.held_bytes -= self._num_bytes
        self._num_bytes = 0

    def hold(self, num_bytes: int, most_bytes: int) -> None:
        """Hold twice what has arrived. Raises `Overloaded` if there is no memory for it.

        An announced length alone holds nothing, because clients may not send what they announce.
        """
        if num_bytes <= max(_FREE_BYTES, self._num_bytes):
            return
        # Without a length, or if the body is compressed, the rest may be of any size.
        more = max(num_bytes, min(2 * num_bytes, most_bytes)) - self._num_bytes
        if self._bodies.held_bytes + more > self._bodies.max_bytes:
            held_mib = self._bodies.held_bytes // MIB
            text = f"the router holds {held_mib} MiB of large bodies and takes no more right now"
            raise Overloaded(text, code="too_many_large_bodies")
        self._bodies.held_bytes += more
        self._num_bytes += more


class Bodies:
    def __init__(self, max_body_mib: int) -> None:
        self.max_bytes = max_body_mib * MIB * _LARGE_BODIES
        self.held_bytes = 0

    def room(self) -> Room:
        return Room(self)

    async def read(self, request: web.Request, room: Room, max_bytes: int) -> bytes:
        """Return the body of a request. Raises `RequestError` or `Overloaded`."""
        _check_type(request)
        length, content = request.content_length, request.content
        if length is not None and length > max_bytes:
            raise _too_large(max_bytes)
        try:
            is_small = length is not None and length <= _FREE_BYTES
            if is_small and content.is_eof() and "Content-Encoding" not in request.headers:
                return content.read_nowait()  # the body is complete
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read(request, room, max_bytes)
        except TimeoutError:
            text = (
                f"the body did not arrive within {BODY_TIMEOUT_S:g} s, or nothing of it for "
                f"{STALLED_S:g} s"
            )
            raise RequestError(text, code="timeout", http_status=408) from None
        except web.RequestPayloadError as error:
            text = "the body is not encoded as its headers say"
            raise RequestError(text, code="invalid_body") from error

    async def _read(self, request: web.Request, room: Room, max_bytes: int) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            async with asyncio.timeout(STALLED_S):
                chunk = await request.content.readany()
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            room.hold(num_bytes, request.content_length or max_bytes)


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
