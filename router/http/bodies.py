"""Read the bodies of requests within limits of type, size and time, and of memory for large ones.

`Handlers` makes one `Bodies` and reads every body with it. A body that is not small takes room from
a limited budget, and gives it back when its prompts have become token ids, so that clients cannot
fill the memory of the router. Room is taken as a body arrives, and no body waits for room: a body
that finds none is refused, or takes the room of stalled bodies.
"""

import asyncio

from aiohttp import web

from baton.protocol.errors import Overloaded, RequestError
from baton.router.health import ServedModel
from baton.runtime.clock import monotonic
from baton.runtime.log import clip

MIB = 1024 * 1024
# A body up to this size is parsed on the event loop, which takes a few milliseconds at most.
SMALL_BYTES = 128 * 1024
BODY_TIMEOUT_S = 60.0
# A body may be this large with any model, so that many short prompts fit one request.
_ALWAYS_ALLOWED_BYTES = 4 * MIB
# JSON may take six bytes for one byte of a prompt, as in \u001f.
_ESCAPED_BYTES = 6
# Bodies up to this size need no room: there can be as many as connections without danger.
_FREE_BYTES = 4 * 1024
# A body has stalled if this much of it takes longer than this time to arrive. If all room is taken,
# it loses its room to a body that arrives faster.
_PIECE_BYTES = 64 * 1024
STALLED_S = 2.0
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
        self.num_bytes = 0
        self.deadline: asyncio.Timeout | None = None  # while the body is arriving
        self.was_overtaken = False
        self._num_pieces = 0
        self._progress_s = monotonic()

    def __enter__(self) -> "Room":
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.leave(self)

    def came(self, num_bytes: int, most_bytes: int) -> None:
        """Hold twice what has arrived. Raises `Overloaded` if there is no room for it.

        An announced length alone holds nothing, because clients may not send what they announce.
        """
        if num_bytes // _PIECE_BYTES > self._num_pieces:
            self._num_pieces, self._progress_s = num_bytes // _PIECE_BYTES, monotonic()
        if num_bytes > max(_FREE_BYTES, self.num_bytes):
            # Without a length, or if the body is compressed, the rest may be of any size.
            wanted = max(num_bytes, min(2 * num_bytes, most_bytes))
            self._bodies.take(self, wanted - self.num_bytes)

    def stalled_s(self, now_s: float) -> float:
        """Return how long the body has taken for its current piece; 0 once it is complete."""
        return now_s - self._progress_s if self.deadline is not None else 0.0

    def overtake(self) -> None:
        """Stop reading this body, because others need its room."""
        assert self.deadline is not None
        if self.deadline.expired():  # its time is up, and the reading task is about to end
            return
        self.was_overtaken = True
        self.deadline.reschedule(asyncio.get_running_loop().time())


class Bodies:
    def __init__(self, max_body_mib: int) -> None:
        self._most_bytes = max_body_mib * MIB * _LARGE_BODIES
        self._held_bytes = 0
        self._rooms: dict[Room, None] = {}  # bodies that hold memory

    def room(self) -> Room:
        return Room(self)

    def take(self, room: Room, num_bytes: int) -> None:
        """Give `room` that many more bytes. Raises `Overloaded`."""
        lacking = self._held_bytes + num_bytes - self._most_bytes
        if lacking > 0 and not self._overtake(room, lacking):
            held_mib = self._held_bytes // MIB
            text = f"the router holds {held_mib} MiB of large bodies and takes no more right now"
            raise Overloaded(text, code="too_many_large_bodies")
        self._held_bytes += num_bytes
        room.num_bytes += num_bytes
        self._rooms[room] = None

    def leave(self, room: Room) -> None:
        """Take back the memory of a body. It may be called again."""
        self._held_bytes -= room.num_bytes
        room.num_bytes = 0
        self._rooms.pop(room, None)

    def _overtake(self, room: Room, num_bytes: int) -> bool:
        """Free that many bytes by ending the bodies that have stalled longest, if possible."""
        now_s = monotonic()
        stalled = [
            one for one in self._rooms if one.stalled_s(now_s) > STALLED_S and one is not room
        ]
        if sum(one.num_bytes for one in stalled) < num_bytes:
            return False
        for one in sorted(stalled, key=lambda one: -one.stalled_s(now_s)):
            if num_bytes <= 0:
                break
            num_bytes -= one.num_bytes
            self.leave(one)
            one.overtake()
        return True

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
            async with asyncio.timeout(BODY_TIMEOUT_S) as room.deadline:
                return await self._read(request, room, max_bytes)
        except TimeoutError:
            if room.was_overtaken:
                text = "the body arrived too slowly while other large bodies needed its memory"
                raise Overloaded(text, code="body_overtaken") from None
            text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise RequestError(text, code="timeout", http_status=408) from None
        except web.RequestPayloadError as error:
            text = "the body is not encoded as its headers say"
            raise RequestError(text, code="invalid_body") from error
        finally:
            room.deadline = None

    async def _read(self, request: web.Request, room: Room, max_bytes: int) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        while chunk := await request.content.readany():
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            room.came(num_bytes, request.content_length or max_bytes)
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
