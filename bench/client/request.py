"""Requests to a server: their checks, their JSON, and sending one and recording its outcome.

Everything that takes time happens before the moment of sending: the body is encoded and a
connection is open by then, as in a client with a pool. `send` never raises for the behaviour of a
server: that is an `Outcome`.
"""

import asyncio
import os
from collections.abc import Sequence

import msgspec

from baton.bench.client.http import Connection, Exchange, Session
from baton.bench.client.response import Problem
from baton.bench.records import Outcome, Planned, Record
from baton.bench.settings import API_KEY_VARIABLE, Target, place_of
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.clock import monotonic

LEAD_S = 0.05  # a request is prepared this long before its moment
# The client sets these fields itself and reads the response accordingly.
OWN_FIELDS = (
    "model", "prompt", "messages", "stream", "n", "max_tokens", "max_completion_tokens",
)  # fmt: skip


class Stopped(BatonError):
    """The session was told to end before the request was sent."""


def settled(target: Target, requests: Sequence[Planned]) -> Target:
    """Return `target` with its API chosen for `requests`, and by default the environment's key."""
    api = target.api
    if api == "auto":
        api = "chat" if any(planned.messages for planned in requests) else "completions"
    target.extra  # noqa: B018  it raises if the text is not a JSON object
    api_key = target.api_key or os.environ.get(API_KEY_VARIABLE, "")
    return msgspec.structs.replace(target, api=api, api_key=api_key)


def check(target: Target, requests: Sequence[Planned]) -> None:
    """Raise `ConfigError` if these requests cannot be sent to this target."""
    place_of(target.url)
    if taken := [name for name in OWN_FIELDS if name in target.extra]:
        raise ConfigError(f"the extra body must not set {', '.join(taken)}: the load does")
    if not target.api_key.isprintable() or not target.api_key.isascii():
        raise ConfigError("the API key must be printable ASCII")
    for planned in requests:
        if planned.messages and not target.is_chat:
            raise ConfigError("the load has chat messages; the completions API takes none")
        if planned.prompt_ids and target.is_chat:
            raise ConfigError("the load has prompts of token ids; the chat API takes none")


_encoder = msgspec.json.Encoder()


def body_of(target: Target, planned: Planned) -> bytes:
    """Return the JSON of one request."""
    body: dict[str, object] = {"model": target.model}
    if target.is_chat:
        body["messages"] = planned.messages or [{"role": "user", "content": planned.prompt}]
    else:
        body["prompt"] = planned.prompt_ids or planned.prompt
    body["max_tokens"] = planned.output_tokens
    body["temperature"] = 0
    body["stream"] = True
    if target.usage:
        body["stream_options"] = {"include_usage": True}
    # With `ignore_eos`, `min_tokens` is not needed, and it costs some servers time in every step.
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.token_ids:
        body["return_token_ids"] = True
    return _encoder.encode(body | target.extra)


async def send(
    session: Session, target: Target, planned: Planned, due_s: float | None = None
) -> Record:
    """Send `planned` at `due_s` on the monotonic clock (None: at once) and read the response.

    All stamps of the record are on that clock; `planned.at_s` is not read. Raises `Stopped` if the
    session ended before the moment came.
    """
    request = session.request("POST", session.base_path + target.path, body_of(target, planned))
    intended_s = monotonic() if due_s is None else due_s
    sent_s, found = await _connected(session, target.timeout_s, intended_s, due_s is None)
    record = Record(
        index=planned.index,
        intended_s=intended_s,
        sent_s=sent_s,
        end_s=sent_s,
        outcome=Outcome.UNREACHABLE,
        forced_tokens=planned.output_tokens if target.ignore_eos else 0,
        warm_up=planned.warm_up,
    )
    if isinstance(found, Problem):
        record.end_s = monotonic()
        record.outcome, record.detail = found
        return record
    exchange = Exchange(target.is_chat)
    await session.exchange(found, request, exchange, target.timeout_s)
    _fill(record, exchange, planned)
    return record


async def _connected(
    session: Session, timeout_s: float, due_s: float, at_once: bool
) -> tuple[float, Connection | Problem]:
    """Wait until `due_s`; return the moment of sending, and a connection or a `Problem`.

    Opening starts earlier. If it takes until after the moment, the delay counts as the server's and
    not as a lag of the client; if it failed before the moment, a second attempt at the moment
    decides.
    """
    found: Connection | Problem | None = session.take()
    opening = None if found else asyncio.ensure_future(session.open(timeout_s))
    is_due = at_once or await session.until(due_s)
    sent_s = due_s if at_once else monotonic()
    is_early = not at_once and (opening is None or opening.done())
    if opening is not None:
        found = await opening
    assert found is not None
    if not is_due:
        if isinstance(found, Connection):
            session.give_back(found)
        raise Stopped("the load was stopped")
    if is_early and (isinstance(found, Problem) or not found.is_idle):
        found = await session.open(timeout_s)
    if isinstance(found, Connection) and not found.is_idle:
        session.give_back(found)
        found = Problem(Outcome.UNREACHABLE, "the server closed the connection at once")
    return sent_s, found


def _fill(record: Record, exchange: Exchange, planned: Planned) -> None:
    """Copy the results of the exchange into the record."""
    reader = exchange.reader
    reader.fill(record, num_requested=planned.output_tokens)
    if exchange.problem is not None:
        record.outcome, record.detail = exchange.problem
    record.end_s, record.first_byte_s = exchange.end_s, exchange.first_byte_s
    record.status = exchange.status
