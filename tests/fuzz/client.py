"""A hostile client: it sends bytes as they are, and checks what comes back.

Each response must be one that a client can act on: an error is one JSON object with a code, and a
5xx is a 503 or 504 that says when to come again.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass

LIMIT_BYTES = 1 << 26
CONNECT_S = 10.0
# A router answers whatever is complete within this time: two lanes of ten seconds, and a queue.
RESPONSE_S = 60.0
# So long after its last bytes, a client that has sent no whole request leaves.
LINGER_S = 0.3
ERROR_KEYS = {"message", "type", "param", "code"}
BUSY = (503, 504)
SHOWN_BYTES = 300


@dataclass(frozen=True)
class Attack:
    """What one connection sends: `pieces` with `pause_s` between them."""

    name: str
    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    num_responses: int = 0  # that must come; others may
    copies: int = 1
    leaves_early: bool = False

    def __repr__(self) -> str:
        num_bytes = sum(map(len, self.pieces))
        begin = b"".join(self.pieces[:4])[:SHOWN_BYTES]
        return (
            f"Attack({self.name}, {len(self.pieces)} pieces, {num_bytes} bytes, "
            f"pause {self.pause_s:g} s, {self.copies} copies, begins {begin!r})"
        )


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes


async def carry_out(port: int, attack: Attack) -> list[str]:
    """Return what was wrong with the responses to one copy of an attack."""
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, limit=LIMIT_BYTES
            )
    except OSError as error:
        return [f"the router took no connection: {error!r}"]
    sending = asyncio.create_task(_send(writer, attack))
    try:
        return await _check_responses(reader, sending, attack)
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await sending
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, attack: Attack) -> None:
    """Send all pieces, unless the router closes the connection before."""
    with contextlib.suppress(OSError):
        for piece in attack.pieces:
            writer.write(piece)
            await writer.drain()
            if attack.pause_s:
                await asyncio.sleep(attack.pause_s)


async def _check_responses(
    reader: asyncio.StreamReader, sending: "asyncio.Task[None]", attack: Attack
) -> list[str]:
    problems = []
    num_responses = 0
    while True:
        try:
            response = await _next_response(
                reader, sending, num_responses < attack.num_responses
            )
        except TimeoutError:
            return [
                *problems,
                f"response {num_responses} did not come in {RESPONSE_S:g} s",
            ]
        except (OSError, asyncio.IncompleteReadError):
            return problems  # the connection ended
        if response is None:
            return problems
        num_responses += 1
        if problem := wrong_with(response):
            problems.append(problem)
        if attack.leaves_early:
            return problems


async def _next_response(
    reader: asyncio.StreamReader, sending: "asyncio.Task[None]", must_come: bool
) -> Response | None:
    """Return the next response; None if there is none and none has to come."""
    if must_come:
        async with asyncio.timeout(RESPONSE_S):
            return await _read(reader)
    reading = asyncio.create_task(_read(reader))
    try:
        done, _ = await asyncio.wait(
            [reading, sending], timeout=RESPONSE_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise TimeoutError("the router neither reads nor ends the connection")
        await asyncio.wait([reading], timeout=LINGER_S)
        return reading.result() if reading.done() else None
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError, EOFError, ValueError):
            await reading


async def _read(reader: asyncio.StreamReader) -> Response:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    start, *lines = head.rstrip().split("\r\n")
    status = int(start.split(" ")[1])
    headers = {
        name.lower(): text.strip()
        for name, _, text in (one.partition(":") for one in lines)
    }
    if status < 200 or status in (204, 304):
        return Response(status, headers, b"")
    if "chunked" in headers.get("transfer-encoding", ""):
        body = b""
        while num_bytes := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(num_bytes + 2))[:-2]
        await reader.readuntil(b"\r\n")
        return Response(status, headers, body)
    return Response(
        status, headers, await reader.readexactly(int(headers["content-length"]))
    )


def wrong_with(response: Response) -> str:
    """Return what no response may be, or nothing."""
    status = response.status
    if status < 400:
        return ""
    shown = f"{status}: {response.body[:300]!r}"
    if status >= 500 and not (status in BUSY and "retry-after" in response.headers):
        return f"a server error, {shown}"
    if "application/json" not in response.headers.get("content-type", ""):
        return f"an error that is no JSON, {shown}"
    if not response.body and response.headers.get("content-length"):
        return ""  # of a HEAD, whose reader cannot tell
    try:
        error = json.loads(response.body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"an error without its object, {shown}"
    if not ({"message", "type"} <= set(error) <= ERROR_KEYS and error["message"]):
        return f"an error of another form, {shown}"
    return ""
