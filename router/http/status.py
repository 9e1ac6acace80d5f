"""The status page at `/`, and `/status.json`, the document that it fetches every second.

`App` serves both. The page is one static file that loads nothing else; its policy allows only the
script and the style in it. The document is made from the router's state at each request.
"""

import base64
import hashlib
import re
from pathlib import Path

import msgspec
from aiohttp import web

from baton.router.health import Health, ServedModel, Status
from baton.router.http.metrics import HttpMetrics
from baton.router.http.recent import FaultRecord, RecentRequests, RequestRecord
from baton.runtime.metrics import LostNode

PAGE = Path(__file__).with_name("status.html")
# A page shows at most this many pairs: those in trouble, then those with the most handoffs.
MAX_PAIRS = 200


class PairRecord(msgspec.Struct, frozen=True):
    """The handoffs of two nodes since the router started; `reason` says why the pair is avoided."""

    prefill_node: str
    decode_node: str
    num_handoffs: int
    num_failures: int
    num_bytes: int
    transfer_s: float
    reason: str = ""
    avoided_s: float = 0.0


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
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    block_size: int  # tokens per block; 0 until it is known
    nodes: list[dict[str, object]]
    lost: tuple[LostNode, ...]
    num_pairs: int
    pairs: list[PairRecord]
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
            body=self._page, content_type="text/html", charset="utf-8", headers=self._headers
        )

    def document(
        self, now: float, health: Health, model: ServedModel | None, metrics: HttpMetrics
    ) -> bytes:
        """Return the body of `/status.json`."""
        pairs = _pairs(health)
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


def _pairs(health: Health) -> list[PairRecord]:
    """Return the pairs that are avoided, then the others, those with the most handoffs first."""
    trouble = {(one.prefill_node, one.decode_node): one for one in health.pairs}
    records = []
    for one in health.transfers:
        bad = trouble.get((one.prefill_node, one.decode_node))
        records.append(
            PairRecord(
                one.prefill_node, one.decode_node, one.num_handoffs, one.num_failures,
                one.num_bytes, one.transfer_s, bad.reason if bad is not None else "",
                bad.avoided_s if bad is not None else 0.0,
            )
        )  # fmt: skip
    records.sort(
        key=lambda one: (not one.reason, -one.num_handoffs, one.prefill_node, one.decode_node)
    )
    return records


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
