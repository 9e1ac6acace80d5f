"""Find a stream of another router on the decode nodes, and take it over for its client.

Every decode node is asked, including those that dial in later. A router that has just started knows
few of its nodes, so a choice that no node holds counts as gone only after the nodes have had time
to dial in.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec

from baton.protocol.errors import BatonError, Failure, Overloaded, from_failure, taken_over
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import (
    Attach,
    Attached,
    Cancel,
    Crashed,
    Failed,
    HeldChoice,
    NotAttached,
    TokenEntry,
)
from baton.router.core.lifecycle import NO_NODE, Lifecycle
from baton.router.core.registry import Registry
from baton.router.core.request import (
    RETRY_S,
    AdoptedChoice,
    NodeMessage,
    Request,
    SelectNodes,
    gone,
    unknown,
)
from baton.router.core.stream import RequestStream, digest_of
from baton.runtime.log import logger

# Nodes find a restarted router within two seconds.
REJOIN_S = 10.0
ANSWER_S = 5.0
MAX_SEARCHES = 1_024
# The number of failures of its request that a search holds back until all nodes have answered. A
# node reports at most one per sequence, so more failures come from a broken node.
MAX_EARLY = 1_000

AskNode = Callable[[NodeId, Attach | Cancel], object]
# Makes the stream of a request that was found. Raises `BatonError` if that is impossible.
Accept = Callable[["FoundRequest"], RequestStream]
Early = list[tuple[NodeId, NodeMessage]]
Adopt = Callable[["Claim", RequestStream, "FoundRequest", Early], None]

log = logger("router")


class ReceivedPart(msgspec.Struct, frozen=True):
    """What the client already has of one choice."""

    num_tokens: int = 0
    has_begun: bool = False  # it has the event that opens the choice
    has_ended: bool = False  # it has the event with the finish reason
    digest: int = 0  # of its tokens, by `digest_of`


class FoundChoice(msgspec.Struct, frozen=True):
    """One attempt at a choice in the state of the node that holds it."""

    node: NodeId
    held: HeldChoice
    is_landing: bool = False  # its prompt is on its way from prefill

    def continues(self, received: ReceivedPart) -> bool:
        """Return whether this goes on from the client's tokens, as far as the node knows them.

        An attempt of another router may have other tokens at the same positions.
        """
        num_tokens = received.num_tokens
        held = self.held.token_ids
        if self.must_prove_itself(received):
            return True
        return num_tokens <= len(held) and digest_of(held[:num_tokens]) == received.digest

    def must_prove_itself(self, received: ReceivedPart) -> bool:
        """Return whether `RequestStream.expect_again` will check the client's last token.

        Prefill has sampled it, and the prompt is on its way to the node, or was given up on it.
        """
        may_lack_one = self.is_landing or not self.is_live
        return may_lack_one and received.num_tokens == len(self.held.token_ids) + 1

    @property
    def is_live(self) -> bool:
        """Whether it runs or has ended, and was not merely left by its router."""
        return self.held.is_running or self.held.finish_reason is not None


class FoundRequest(msgspec.Struct, frozen=True):
    """Everything needed to continue. Choices that the client has in full may be missing."""

    attached: Attached  # the reply of one node, which does not list the choices of all nodes
    choices: dict[int, FoundChoice]
    first_attempt: int = 0  # an attempt that no earlier router of the request has made
    may_be_elsewhere: bool = False  # nodes that have not answered may hold another attempt


class Search:
    """What decode nodes have answered about one stream, and what follows from it."""

    def __init__(
        self,
        request_id: RequestId,
        received: tuple[ReceivedPart, ...] | None,
        now_s: float,
        settled_s: float,
        missing: Collection[NodeId] = (),
        unmet_s: float = 0.0,
    ) -> None:
        """Begin at `now_s`; by `settled_s` all nodes will have dialled in that can.

        Until `unmet_s`, one that cannot, and that this router has never met, may hold the stream.

        `received` is None for a client that has nothing yet. Nodes that are `missing` were lost so
        recently that they may come back with the stream.
        """
        self.request_id = request_id
        self._received = received
        self._began_s, self._give_up_s = now_s, max(now_s + ANSWER_S, settled_s)
        self._has_asked_again = False
        self._settled_s = settled_s
        self._unmet_s = unmet_s
        self._asked: set[NodeId] = set()
        self._silent: set[NodeId] = set()  # nodes that were asked and have not answered
        self._missing = set(missing)
        self._first: Attached | None = None
        self._found: dict[tuple[NodeId, Key], FoundChoice] = {}
        self._first_attempt = 0

    def asks(self, node: NodeId) -> bool:
        """Return whether that node must be asked, and count it as asked."""
        if node in self._asked:
            return False
        self._asked.add(node)
        self._silent.add(node)
        self._missing.discard(node)
        return True

    def asks_again(self, now_s: float) -> list[NodeId]:
        """Return the nodes to ask once more before the stream counts as gone.

        Another router may have gone on with it at a node that answered long ago.
        """
        if self._has_asked_again or now_s - self._began_s < RETRY_S:
            return []
        self._has_asked_again = True
        self._silent |= self._asked
        self._give_up_s = now_s + ANSWER_S
        return sorted(self._asked)

    def heard(self, node: NodeId, reply: Attached | NotAttached) -> None:
        self._silent.discard(node)
        if isinstance(reply, NotAttached):
            return
        self._first = self._first or reply
        self._first_attempt = max(self._first_attempt, reply.first_attempt)
        for held in reply.choices:
            is_landing = held.key.choice in reply.landing
            self._found[node, held.key] = FoundChoice(node, held, is_landing)

    def goes_on(self, node: NodeId, entry: TokenEntry) -> None:
        """Add tokens that a sequence got after its node gave it to this router.

        So a search never holds more than the tokens of its request, even if it takes long.
        """
        found = self._found.get((node, entry.key))
        if found is None or self._first is None:
            return
        held = found.held
        num_known = len(self._first.prompt_token_ids) + len(held.token_ids) - entry.position
        if num_known < 0:
            return
        held.token_ids.extend(entry.token_ids[num_known:])
        if (reason := entry.finish_reason) is not None:
            held = msgspec.structs.replace(held, finish_reason=reason, is_running=False)
        self._found[node, entry.key] = FoundChoice(node, held)

    def lost(self, node: NodeId) -> None:
        """Forget a node, which is asked again if it comes back."""
        self._asked.discard(node)
        self._silent.discard(node)
        self._missing.add(node)
        self._found = {key: found for key, found in self._found.items() if found.node != node}

    def verdict(self, now_s: float) -> FoundRequest | Failure | None:
        """Return the request, or why it cannot be found, or None while that is unknown."""
        result: FoundRequest | None = None
        if (first := self._first) is not None:
            if self._received is not None and len(self._received) != first.num_choices:
                return gone()
            best = {i: found for i in range(first.num_choices) if (found := self._best(i))}
            wanted = [i for i in range(first.num_choices) if not self.received_of(i).has_ended]
            if all(i in best for i in wanted):
                is_open = self._may_be_held(now_s)
                result = FoundRequest(first, best, self._first_attempt, is_open)
            # Another node may have a later attempt, so the search waits for each node that was
            # asked.
            if result is not None and not self._silent and all(best[i].is_live for i in wanted):
                return result
        is_early = bool(self._silent) or now_s < self._settled_s
        if now_s < self._give_up_s and (is_early or (self._missing and result is None)):
            return None
        if result is not None:
            return result
        text = "a decode node that may hold this stream does not answer: try again"
        return unknown(text) if self._may_be_held(now_s) else gone()

    def _may_be_held(self, now_s: float) -> bool:
        """Return whether a node may hold the stream that has not said so.

        A router that has no decode node now may soon have one, to which another router has moved
        the stream.
        """
        is_unheard = bool(self._silent or self._missing or not self._asked)
        return is_unheard or now_s < self._unmet_s

    @property
    def running_keys(self) -> dict[NodeId, list[Key]]:
        """Return the sequences that nodes have given to this router, by node."""
        keys: dict[NodeId, list[Key]] = {}
        for found in self._found.values():
            if found.held.is_running:
                keys.setdefault(found.node, []).append(found.held.key)
        return keys

    def received_of(self, choice: int) -> ReceivedPart:
        return self._received[choice] if self._received is not None else ReceivedPart()

    def _best(self, choice: int) -> FoundChoice | None:
        """Return the last attempt at a choice that goes on from what the client has for certain.

        Without one, it is the last that may turn out to do so.
        """
        received = self.received_of(choice)
        fitting = [
            found
            for (_, key), found in self._found.items()
            if key.choice == choice and (received.has_ended or found.continues(received))
        ]
        proven = [found for found in fitting if not found.must_prove_itself(received)]
        return max(proven or fitting, key=lambda found: found.held.key.attempt, default=None)


def found_here(lifecycle: Lifecycle, claim: "Claim") -> FoundRequest | None:
    """Return a running request of this router, or None if another has gone on with it meanwhile.

    Raises `RequestError` if it is not the client's.
    """
    request = lifecycle.request
    received = claim.received
    kept = request.kept
    num_choices = request.num_choices
    is_wrong = received is not None and len(received) != num_choices
    if kept is None or kept.owner != claim.owner or is_wrong:
        raise from_failure(gone())
    held = tuple(
        HeldChoice(Key(request.request_id, one.index, one.number), one.output, one.finish_reason)
        for one in lifecycle.choices
    )
    attached = Attached(
        request.request_id, kept.form, num_choices, request.token_ids, request.sampling, held
    )
    # The client may have a token more, from the router that had this request before.
    found = {
        one.key.choice: FoundChoice(NO_NODE, one, is_landing=one.finish_reason is None)
        for one in held
    }
    for part, one in zip(received or (), found.values(), strict=False):
        if not part.has_ended and not one.continues(part):
            return None
    return FoundRequest(attached, found)


class Claim(msgspec.Struct, frozen=True):
    """The claim of a returning client: the stream, its owner, and what the client has of it."""

    request_id: RequestId
    owner: bytes
    received: tuple[ReceivedPart, ...] | None = None  # None if the client has nothing yet


@dataclass(slots=True)
class Searching:
    claim: Claim
    search: Search
    accept: Accept
    taken: asyncio.Future[RequestStream]
    early: Early = field(default_factory=list)


class Reattaching:
    """The running searches. `adopt` begins a request that was found and accepted."""

    def __init__(self, now_s: float, ask: AskNode, adopt: Adopt, detached_s: float) -> None:
        """Nodes keep a stream whose router is gone for `detached_s`."""
        self._settled_s = now_s + REJOIN_S
        # A stream of a router that this one replaces has ended by then.
        self._unmet_s = now_s + detached_s
        self._ask = ask
        self._adopt = adopt
        self._searching: dict[RequestId, Searching] = {}
        self._doubted: dict[RequestId, None] = {}

    def doubt(self, request_id: RequestId, may_be_elsewhere: bool) -> Failure:
        """Return how a stream ends whose next attempt begins with another token than the client's.

        Another node may hold the client's, so the client may try again. Once all nodes have
        answered it may do so only once: where nodes compute different bits, no attempt may ever
        have that token.
        """
        if not may_be_elsewhere:
            if request_id in self._doubted:
                return gone()
            self._doubted[request_id] = None
            if len(self._doubted) > MAX_SEARCHES:
                del self._doubted[next(iter(self._doubted))]
        return unknown("an attempt at this stream began with another token: try again")

    async def take(
        self,
        now_s: float,
        claim: Claim,
        joined: list[NodeId],
        missing: list[NodeId],
        accept: Accept,
    ) -> RequestStream:
        """Ask the nodes that have `joined`, and return the stream that `accept` makes.

        Nodes that are `missing` were lost just now, and may come back with it. Raises `BatonError`.
        """
        if (older := self._searching.get(claim.request_id)) is not None:
            if older.claim.owner != claim.owner:
                # Only nodes know whose it is. Neither client may end the search of the other one.
                text = "another client has just asked for this stream: ask again"
                raise Overloaded(text, code="stream_unknown", retry_after_s=1.0)
            del self._searching[claim.request_id]
            if not older.taken.done():
                older.taken.set_exception(from_failure(taken_over()))
        if len(self._searching) >= MAX_SEARCHES:
            raise Overloaded("too many clients are resuming streams at once", retry_after_s=1.0)
        search = Search(
            claim.request_id, claim.received, now_s, self._settled_s, missing, self._unmet_s
        )
        taken: asyncio.Future[RequestStream] = asyncio.get_running_loop().create_future()
        searching = Searching(claim, search, accept, taken)
        self._searching[claim.request_id] = searching
        for node in joined:
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

    def heard(self, now_s: float, node: NodeId, reply: Attached | NotAttached) -> None:
        searching = self._searching.get(reply.request_id)
        if searching is not None:
            searching.search.heard(node, reply)
            self._judge(now_s, searching)
        elif isinstance(reply, Attached):
            self._give_up({node: [one.key for one in reply.choices if one.is_running]})

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
            self._judge(now_s, searching)

    def _ask_first(self, searching: Searching, node: NodeId) -> None:
        if searching.search.asks(node):
            self._ask(node, Attach(searching.claim.request_id, searching.claim.owner))

    def _judge(self, now_s: float, searching: Searching) -> None:
        verdict = searching.search.verdict(now_s)
        if verdict is None:
            return
        if verdict == gone() and (nodes := searching.search.asks_again(now_s)):
            for node in nodes:
                self._ask(node, Attach(searching.claim.request_id, searching.claim.owner))
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
        adopted = {(one.node, one.held.key) for one in verdict.choices.values()}
        self._give_up(searching.search.running_keys, adopted)
        taken.set_result(stream)
        return True

    def _give_up(
        self,
        keys: dict[NodeId, list[Key]],
        adopted: Collection[tuple[NodeId, Key]] = (),
    ) -> None:
        """End sequences that nodes have given to this router, but for those that it `adopted`."""
        for node, running in keys.items():
            if unwanted := tuple(key for key in running if (node, key) not in adopted):
                self._ask(node, Cancel(unwanted, "ended"))


def adopted_choices(
    claim: Claim,
    found: FoundRequest,
    stream: RequestStream,
    registry: Registry,
    doubt: Callable[[RequestId, bool], Failure],
) -> tuple[AdoptedChoice, ...]:
    """Return every choice of the request, and bring `stream` to its caller's position.

    What the caller has goes through the choice's detokenizer again, so that the text goes on where
    it was cut, even inside a character or a stop string.
    """
    choices: list[AdoptedChoice] = []
    failure: Failure | None = None
    for index in range(found.attached.num_choices):
        received = claim.received[index] if claim.received is not None else ReceivedPart()
        one = found.choices.get(index)
        if one is None:  # the caller has the whole choice, and its node has forgotten it
            stream.metrics.received(min(received.num_tokens, found.attached.sampling.max_tokens))
            choices.append(AdoptedChoice(Key(claim.request_id, index), [], has_ended=True))
            continue
        held = one.held
        node = registry.node(one.node) if held.is_running else None
        # What the caller says is not trusted beyond what the nodes hold.
        is_ahead = one.must_prove_itself(received)
        num_received = min(received.num_tokens, len(held.token_ids) + is_ahead)
        is_stopped = stream.replay(index, held.token_ids[:num_received])
        if received.has_ended:  # nothing more comes of it
            stream.metrics.received(int(is_ahead))
        elif is_ahead:
            failure = failure or doubt(claim.request_id, found.may_be_elsewhere)
            stream.expect_again(index, digest_of(held.token_ids), received.digest, failure)
        has_ended = received.has_ended or is_stopped
        process = None if node is None else node.process
        choices.append(
            AdoptedChoice(
                held.key, held.token_ids, num_received, has_ended, held.finish_reason, process
            )
        )
    return tuple(choices)


def selection_of(request: Request, choice: AdoptedChoice) -> SelectNodes:
    """Return the selection that a running sequence would have asked for."""
    num_prompt = len(request.token_ids)
    return SelectNodes(
        choice.key,
        num_tokens=num_prompt + len(choice.token_ids),
        num_choices=1,
        wants_decode=True,
        num_final_tokens=num_prompt + request.sampling.max_tokens,
    )
