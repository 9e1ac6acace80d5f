"""The running searches for clients that come back for a stream of another router.

`core` calls it on the event loop. It asks every decode node, including those that dial in later,
and ends each search with one call. It reads no text and knows no HTTP.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from baton.protocol.errors import BatonError, Failure, Overloaded, from_failure
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import (
    Attach,
    Attached,
    Cancel,
    Crashed,
    Failed,
    NotAttached,
    TokenEntry,
)
from baton.router.request.events import NodeMessage
from baton.router.request.search import REJOIN_S, FoundRequest, ReceivedPart, Search, in_use
from baton.router.stream import RequestStream
from baton.runtime.log import logger

MAX_SEARCHES = 1_024
# The number of failures of its request that a search holds back until all nodes have answered. A
# node reports at most one per sequence, so more failures come from a broken node.
MAX_EARLY = 1_000

AskNode = Callable[[NodeId, Attach | Cancel], object]
# Makes the stream of a request that was found. Raises `BatonError` if that is impossible.
Accept = Callable[[FoundRequest], RequestStream]
Early = list[tuple[NodeId, NodeMessage]]
# Begins a request that was found and accepted, then feeds it the early messages.
Adopt = Callable[["Claim", RequestStream, FoundRequest, Early], None]

log = logger("router")


class Claim(msgspec.Struct, frozen=True):
    """The claim of a returning client: the stream, its owner, and what the client has of it."""

    request_id: RequestId
    owner: bytes
    received: tuple[ReceivedPart, ...] | None = None  # None if the client has nothing yet


class DecodeNodes(msgspec.Struct, frozen=True):
    """The nodes that may hold a stream: those that can be asked, and those that were just lost."""

    joined: list[NodeId]
    missing: list[NodeId]


@dataclass(slots=True)
class Searching:
    claim: Claim
    search: Search
    accept: Accept
    taken: asyncio.Future[RequestStream]
    early: Early = field(default_factory=list)


class Reattaching:
    def __init__(self, now_s: float, ask: AskNode, adopt: Adopt) -> None:
        self._settled_s = now_s + REJOIN_S
        self._ask = ask
        self._adopt = adopt
        self._searching: dict[RequestId, Searching] = {}

    async def take(
        self, now_s: float, claim: Claim, nodes: DecodeNodes, accept: Accept
    ) -> RequestStream:
        """Search `nodes`, and return the stream that `accept` makes. Raises `BatonError`."""
        if claim.request_id in self._searching:
            raise in_use()
        if len(self._searching) >= MAX_SEARCHES:
            raise Overloaded("too many clients are resuming streams at once", retry_after_s=1.0)
        search = Search(claim.request_id, claim.received, now_s, self._settled_s, nodes.missing)
        taken: asyncio.Future[RequestStream] = asyncio.get_running_loop().create_future()
        searching = Searching(claim, search, accept, taken)
        self._searching[claim.request_id] = searching
        for node in nodes.joined:
            self._ask_first(searching, node)
        try:
            return await taken
        except asyncio.CancelledError:
            if taken.done() and not taken.cancelled() and taken.exception() is None:
                taken.result().close()
            raise

    def entered(self, node: NodeId) -> None:
        for searching in self._searching.values():
            self._ask_first(searching, node)

    def left(self, node: NodeId) -> None:
        for searching in self._searching.values():
            searching.search.lost(node)

    def heard(self, now_s: float, node: NodeId, answer: Attached | NotAttached) -> None:
        searching = self._searching.get(answer.request_id)
        if searching is not None:
            searching.search.heard(node, answer)
            self._judge(now_s, searching)
        elif isinstance(answer, Attached):
            self._give_up({node: [one.key for one in answer.choices if one.is_running]})

    def holds_back(self, node: NodeId, request_id: RequestId, message: NodeMessage) -> bool:
        """Keep a message of a request that is searched for. Return False for other requests."""
        searching = self._searching.get(request_id)
        if searching is None:
            return False
        if isinstance(message, TokenEntry):
            searching.search.goes_on(node, message)
        elif isinstance(message, Failed | Crashed) and len(searching.early) < MAX_EARLY:
            searching.early.append((node, message))
        return True

    def end(self, failure: Failure) -> None:
        """End every search with this failure. The nodes keep the streams."""
        for searching in self._searching.values():
            if not searching.taken.done():
                searching.taken.set_exception(from_failure(failure))
        self._searching.clear()

    def tick(self, now_s: float) -> None:
        for searching in list(self._searching.values()):
            for node in searching.search.asks_again():
                self._ask_one(searching, node)
            self._judge(now_s, searching)

    # --- inside --------------------------------------------------------------------------------

    def _ask_first(self, searching: Searching, node: NodeId) -> None:
        if searching.search.asks(node):
            self._ask_one(searching, node)

    def _ask_one(self, searching: Searching, node: NodeId) -> None:
        self._ask(node, Attach(searching.claim.request_id, searching.claim.owner))

    def _judge(self, now_s: float, searching: Searching) -> None:
        verdict = searching.search.verdict(now_s)
        if verdict is None:
            return
        del self._searching[searching.claim.request_id]
        if not self._end(searching, verdict):
            self._give_up(searching.search.running_keys)

    def _end(self, searching: Searching, verdict: FoundRequest | Failure) -> bool:
        """Hand over what was found. Return False if it is no longer wanted."""
        taken = searching.taken
        if taken.done():  # the client has left
            return False
        try:
            if isinstance(verdict, Failure):
                raise from_failure(verdict)
            stream = searching.accept(verdict)
            self._adopt(searching.claim, stream, verdict, searching.early)
        except BatonError as error:
            taken.set_exception(error)
            return False
        except Exception:
            log.exception("a stream could not be resumed")
            taken.set_exception(BatonError("the router failed to resume this stream"))
            return False
        for node, key in searching.search.outdated:
            self._ask(node, Cancel((key,), "ended"))
        taken.set_result(stream)
        return True

    def _give_up(self, keys: dict[NodeId, list[Key]]) -> None:
        for node, running in keys.items():
            if running:
                self._ask(node, Cancel(tuple(running), "ended"))
