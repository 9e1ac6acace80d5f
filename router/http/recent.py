"""The last requests with the spans of their stages, and the last faults, for the status page.

`App` reports every answer; `/status.json` asks. A request that went well costs one append to a
bounded ring: spans and records are made only when they are asked for. No prompt, no output and no
token is kept.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from baton.protocol.errors import BatonError
from baton.router.http.request_log import RUNNING, Running
from baton.router.outputs import Attempt, Path, RequestMetrics

MAX_REQUESTS = 60
MAX_FAULTS = 40
# Each prompt of a request has stages of its own; so many are kept to find the slowest one.
MAX_PROMPTS = 8
# A stream may move on any number of times; the first attempts and the last ones are shown.
MAX_ATTEMPTS = 6
MAX_MESSAGE_CHARS = 300


class StageSpan(msgspec.Struct, frozen=True):
    """One stage of an attempt, in seconds since the arrival of the request."""

    stage: str
    start_s: float
    end_s: float


class AttemptRecord(msgspec.Struct, frozen=True):
    choice: int
    number: int
    prefill_node: str | None
    decode_node: str | None
    failure: str  # the code with which the attempt was lost, or empty
    spans: tuple[StageSpan, ...]


class RequestRecord(msgspec.Struct, frozen=True):
    """A request that has ended. Several prompts are shown by the slowest of them."""

    request_id: str
    ended_at: float  # seconds since 1970
    status: int
    outcome: str  # "finished", "client_gone" or the code of an error
    e2e_s: float
    first_token_s: float | None
    num_prompts: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    path: Path | None
    attempts: tuple[AttemptRecord, ...]


class FaultRecord(msgspec.Struct, frozen=True):
    """A request that failed, or an attempt that was lost. Equal refusals in a row count as one."""

    at: float  # seconds since 1970
    code: str
    message: str
    request_id: str
    prefill_node: str | None = None
    decode_node: str | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class _EndedRequest:
    request_id: str
    ended_at: float
    status: int
    took_s: float
    outcome: str
    num_prompts: int
    metrics: list[RequestMetrics]


class RecentRequests:
    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._ended: deque[_EndedRequest] = deque(maxlen=MAX_REQUESTS)
        self._faults: deque[FaultRecord] = deque(maxlen=MAX_FAULTS)

    def answered(self, request: web.Request, status: int, request_id: str, took_s: float) -> None:
        """Keep a request for text that has ended. Other HTTP requests are not kept."""
        running = request.get(RUNNING)
        if running is None:
            return
        metrics = [stream.metrics for stream in running.streams[:MAX_PROMPTS]]
        now, name = self._wall_clock(), request_id or running.request_id
        if metrics:
            self._ended.append(
                _EndedRequest(
                    name, now, status, took_s, running.outcome, len(running.streams), metrics
                )
            )
        if running.error is not None:
            self._failed(now, running.error, running, name)
        for one in metrics:
            if one.num_retries or one.num_resumes:
                self._faults.extend(_losses(one, now, name))

    def requests(self) -> list[RequestRecord]:
        """Return the last requests, the newest first."""
        return [_record(one) for one in reversed(self._ended)]

    def faults(self) -> list[FaultRecord]:
        """Return the last faults, the newest first."""
        return list(reversed(self._faults))

    def _failed(self, now: float, error: BatonError, running: Running, name: str) -> None:
        if error.http_status < 422:
            return  # the client's own mistake
        last = self._faults[-1] if self._faults else None
        attempts = [one for s in running.streams[:MAX_PROMPTS] for one in s.metrics.attempts[-1:]]
        fault = FaultRecord(now, error.code, error.message[:MAX_MESSAGE_CHARS], name)
        if attempts:
            nodes = attempts[-1].prefill_node, attempts[-1].decode_node
            fault = msgspec.structs.replace(fault, prefill_node=nodes[0], decode_node=nodes[1])
        elif last is not None and (last.code, last.message) == (fault.code, fault.message):
            self._faults.pop()  # under overload many refusals must not push out all else
            fault = msgspec.structs.replace(fault, count=last.count + 1)
        self._faults.append(fault)


def spans_of(attempt: Attempt, end_s: float) -> tuple[StageSpan, ...]:
    """Return the stages of an attempt in their order; none overlaps another.

    Nodes measure durations, and the router the moments at which their tokens came. What lies
    between two stages is the way of messages. `end_s` is the end of the request.
    """
    stop_s = end_s if attempt.lost_at_s is None else attempt.lost_at_s
    if attempt.placed_at_s is None:
        return _in_order([("router_queue", attempt.asked_at_s, stop_s)], stop_s)
    placed_s = attempt.placed_at_s
    queued_s = placed_s + attempt.queue_s
    stages = [
        ("router_queue", attempt.asked_at_s, placed_s),
        ("queue", placed_s, queued_s),
        ("prefill", queued_s, queued_s + attempt.prefill_s),
    ]
    if (decoding_s := attempt.decoding_at_s) is not None:
        step_s = decoding_s - attempt.first_step_s
        waits_s = step_s - attempt.decode_queue_s
        stages += [
            ("transfer", waits_s - attempt.exposed_s, waits_s),
            ("decode_queue", waits_s, step_s),
            ("first_step", step_s, decoding_s),
            ("decode", decoding_s, stop_s),
        ]
    return _in_order(stages, stop_s)


def _in_order(stages: list[tuple[str, float, float]], stop_s: float) -> tuple[StageSpan, ...]:
    spans, at_s = [], 0.0
    for stage, start_s, end_s in stages:
        begin_s, until_s = max(start_s, at_s), min(end_s, stop_s)
        if until_s > begin_s:
            spans.append(StageSpan(stage, round(begin_s, 6), round(until_s, 6)))
            at_s = until_s
    return tuple(spans)


def _record(one: _EndedRequest) -> RequestRecord:
    slowest = max(one.metrics, key=lambda metrics: metrics.e2e_s or 0.0)
    e2e_s = one.took_s if slowest.e2e_s is None else slowest.e2e_s
    kept = slowest.attempts
    if len(kept) > MAX_ATTEMPTS:
        kept = [*kept[: MAX_ATTEMPTS // 2], *kept[-(MAX_ATTEMPTS // 2) :]]
    return RequestRecord(
        one.request_id,
        one.ended_at,
        one.status,
        one.outcome,
        e2e_s,
        slowest.time_to_first_token_s,
        one.num_prompts,
        sum(metrics.num_prompt_tokens for metrics in one.metrics),
        sum(metrics.num_cached_tokens for metrics in one.metrics),
        sum(metrics.num_output_tokens for metrics in one.metrics),
        slowest.path,
        tuple(_attempt(attempt, e2e_s) for attempt in kept),
    )


def _attempt(attempt: Attempt, e2e_s: float) -> AttemptRecord:
    return AttemptRecord(
        attempt.choice,
        attempt.number,
        attempt.prefill_node,
        attempt.decode_node,
        attempt.failure,
        spans_of(attempt, e2e_s),
    )


def _losses(metrics: RequestMetrics, now: float, request_id: str) -> list[FaultRecord]:
    """Return a fault for each of the last attempts that were lost."""
    lost = [one for one in metrics.attempts[-MAX_ATTEMPTS:] if one.lost_at_s is not None]
    began = now - (metrics.e2e_s or 0.0)
    return [
        FaultRecord(
            began + (one.lost_at_s or 0.0), one.failure, "the request went on elsewhere",
            request_id, one.prefill_node, one.decode_node,
        )
        for one in lost
    ]  # fmt: skip
