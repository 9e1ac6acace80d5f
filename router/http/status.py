"""The status page at `/`, and `/status.json`, the document that it fetches every second.

The page is one static file that loads nothing else; its policy allows only the script and the style
in it. The document is made from the router's state at each request, and from the last requests and
faults, which cost one append to a bounded ring each. No prompt and no output is kept.
"""

import base64
import hashlib
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from baton.protocol.errors import Failure
from baton.router.core.health import Health, ServedModel, Status
from baton.router.core.pair_health import PairTransfers
from baton.router.core.request import ServedBy
from baton.router.http.metrics import HttpMetrics
from baton.router.http.request_log import Running
from baton.router.outputs import RequestMetrics, StageSpan, waterfall
from baton.runtime.metrics import LostNode

PAGE = Path(__file__).with_name("status.html")
# A page shows at most this many pairs: those in trouble, then those with the most handoffs.
MAX_PAIRS = 200
MAX_REQUESTS = 60
MAX_FAULTS = 40
# Each prompt of a request has stages of its own. Only the first ones are kept and counted.
MAX_PROMPTS = 8
# A stream may move on any number of times, and each move has stages.
MAX_STAGES = 64
MAX_LOSSES = 6  # losses of one request that are noted as faults
MAX_MESSAGE_CHARS = 300


class RequestRecord(msgspec.Struct, frozen=True):
    """A request that has ended. If it has several prompts, this is the slowest one."""

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
    path: ServedBy | None
    num_attempts: int
    prefill_node: str | None  # of the last attempt
    decode_node: str | None
    stages: list[StageSpan]


class FaultRecord(msgspec.Struct, frozen=True):
    """A failed request or a lost attempt. Equal refusals in a row are one record."""

    at: float  # seconds since 1970
    code: str
    message: str
    request_id: str
    prefill_node: str | None = None
    decode_node: str | None = None
    count: int = 1


class StatusDocument(msgspec.Struct, frozen=True):
    """The content of `/status.json`. Counts start with the router, so readers take differences."""

    now: float  # seconds since 1970
    uptime_s: float
    version: str
    router: str  # the name of this process
    model: str
    status: Status
    message: str
    num_running: int
    num_queued: int
    num_requests: int  # of ended requests
    num_refused: int  # with 429, 503 or 504
    num_failed: int  # with another 5xx status, or an error event instead
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    block_size: int  # tokens per block; 0 until it is known
    nodes: list[dict[str, object]]
    lost: tuple[LostNode, ...]
    num_pairs: int
    pairs: list[PairTransfers]
    requests: list[RequestRecord]
    faults: list[FaultRecord]


class StatusPage:
    """The page and its document, for one `App`."""

    def __init__(self, version: str, router: str, began_at: float) -> None:
        """`began_at` is when the router started, in seconds since 1970."""
        self.recent = RecentRequests()
        self._version = version
        self._router = router
        self._began_at = began_at
        self._page = PAGE.read_bytes()
        self._headers = {
            "Content-Security-Policy": _policy(self._page.decode()),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        }

    async def page(self, request: web.Request) -> web.Response:
        """Answer GET / with the page, which holds no data."""
        return web.Response(
            body=self._page,
            content_type="text/html",
            charset="utf-8",
            headers=self._headers,
        )

    def document(
        self,
        now: float,
        health: Health,
        model: ServedModel | None,
        metrics: HttpMetrics,
    ) -> bytes:
        """Return the body of `/status.json`."""
        # Those that are avoided come first, then those with the most handoffs.
        pairs = sorted(
            health.transfers,
            key=lambda one: (
                not one.reason,
                -one.num_handoffs,
                one.prefill_node,
                one.decode_node,
            ),
        )
        document = StatusDocument(
            now=now,
            uptime_s=now - self._began_at,
            version=self._version,
            router=self._router,
            model="" if model is None else model.name,
            status=health.status,
            message=health.message,
            num_running=health.num_running,
            num_queued=health.num_queued,
            num_requests=metrics.num_requests,
            num_refused=metrics.num_refused,
            num_failed=metrics.num_failed,
            num_prompt_tokens=metrics.num_prompt_tokens,
            num_cached_tokens=metrics.num_cached_tokens,
            num_output_tokens=metrics.num_output_tokens,
            block_size=0 if model is None else model.block_size,
            nodes=named_nodes(health),
            lost=health.lost,
            num_pairs=len(pairs),
            pairs=pairs[:MAX_PAIRS],
            requests=self.recent.requests(),
            faults=self.recent.faults(),
        )
        return msgspec.json.encode(document)


def named_nodes(health: Health) -> list[dict[str, object]]:
    """Return the nodes with names for their load and totals, which messages send as arrays."""
    named = msgspec.structs.asdict
    return [
        {**named(node), "load": named(node.load), "totals": named(node.totals)}
        for node in health.nodes
    ]


def _policy(page: str) -> str:
    """Return a Content-Security-Policy that allows the page's own content and its fetches."""
    allowed = {
        name: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL)
        )
        for name in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


class _KeptRequest(msgspec.Struct, frozen=True):
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
        self._ended: deque[_KeptRequest] = deque(maxlen=MAX_REQUESTS)
        self._faults: deque[FaultRecord] = deque(maxlen=MAX_FAULTS)

    def answered(
        self, running: Running, status: int, request_id: str, took_s: float
    ) -> None:
        """Keep an ended request for text. Other HTTP requests are not kept."""
        metrics = [stream.metrics for stream in running.streams[:MAX_PROMPTS]]
        now = self._wall_clock()
        name = request_id or running.request_id
        if metrics:
            self._ended.append(
                _KeptRequest(
                    name,
                    now,
                    status,
                    took_s,
                    running.outcome,
                    len(running.streams),
                    metrics,
                )
            )
        if running.failure is not None:
            self._failed(now, running.failure, running, name)
        for one in metrics:
            if one.num_retries or one.num_resumes:
                self._faults.extend(_losses(one, now, name))

    def requests(self) -> list[RequestRecord]:
        """Return the last requests, the newest first."""
        return [_record(one) for one in reversed(self._ended)]

    def faults(self) -> list[FaultRecord]:
        """Return the last faults, the newest first."""
        return list(reversed(self._faults))

    def _failed(
        self, now: float, failure: Failure, running: Running, name: str
    ) -> None:
        if failure.http_status < 422:
            return  # the client's own mistake
        last = self._faults[-1] if self._faults else None
        attempts = [
            one
            for s in running.streams[:MAX_PROMPTS]
            for one in s.metrics.attempts[-1:]
        ]
        fault = FaultRecord(
            now, failure.code, failure.message[:MAX_MESSAGE_CHARS], name
        )
        if attempts:
            nodes = attempts[-1].prefill_node, attempts[-1].decode_node
            fault = msgspec.structs.replace(
                fault, prefill_node=nodes[0], decode_node=nodes[1]
            )
        elif last is not None and (last.code, last.message) == (
            fault.code,
            fault.message,
        ):
            # Under overload, many refusals must not push out all other faults.
            self._faults.pop()
            fault = msgspec.structs.replace(fault, count=last.count + 1)
        self._faults.append(fault)


def _record(one: _KeptRequest) -> RequestRecord:
    slowest = max(one.metrics, key=lambda metrics: metrics.e2e_s or 0.0)
    last = slowest.attempts[-1] if slowest.attempts else None
    return RequestRecord(
        request_id=one.request_id,
        ended_at=one.ended_at,
        status=one.status,
        outcome=one.outcome,
        e2e_s=one.took_s if slowest.e2e_s is None else slowest.e2e_s,
        first_token_s=slowest.time_to_first_token_s,
        num_prompts=one.num_prompts,
        num_prompt_tokens=sum(metrics.num_prompt_tokens for metrics in one.metrics),
        num_cached_tokens=sum(metrics.num_cached_tokens for metrics in one.metrics),
        num_output_tokens=sum(metrics.num_output_tokens for metrics in one.metrics),
        path=slowest.path,
        num_attempts=slowest.num_attempts,
        prefill_node=last.prefill_node if last is not None else None,
        decode_node=last.decode_node if last is not None else None,
        stages=waterfall(slowest)[:MAX_STAGES],
    )


def _losses(metrics: RequestMetrics, now: float, request_id: str) -> list[FaultRecord]:
    """Return a fault for each of the last attempts that were lost."""
    lost = [one for one in metrics.attempts[-MAX_LOSSES:] if one.lost_at_s is not None]
    began = now - (metrics.e2e_s or 0.0)
    return [
        FaultRecord(
            began + (one.lost_at_s or 0.0),
            one.failure,
            "the request went on elsewhere",
            request_id,
            one.prefill_node,
            one.decode_node,
        )
        for one in lost
    ]
