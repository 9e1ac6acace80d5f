"""The search for the decode nodes that hold a request of another router.

This file is pure: `router.reattaching` asks the nodes, passes on their answers, and acts on the
verdict. A router that has just started knows few of its nodes, so a choice that no node holds
counts as gone only after the nodes have had time to dial in.
"""

from collections.abc import Collection

import msgspec

from baton.protocol.errors import Failure, Overloaded, RequestError
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import Attached, HeldChoice, NotAttached, TokenEntry

# Nodes find a restarted router within two seconds.
REJOIN_S = 10.0
ANSWER_S = 5.0
# A node may notice the end of the old router later than the client.
IN_USE_S = 3.0
RETRY_S = 1.0


class ReceivedPart(msgspec.Struct, frozen=True):
    """What the client already has of one choice."""

    num_tokens: int = 0
    has_begun: bool = False  # it has the event that opens the choice
    has_ended: bool = False  # it has the event with the finish reason


class FoundChoice(msgspec.Struct, frozen=True):
    """One choice in the state of the node with its highest attempt."""

    node: NodeId
    held: HeldChoice
    is_landing: bool = False  # the client may have the next token, which prefill has sampled


class FoundRequest(msgspec.Struct, frozen=True):
    """Everything needed to continue. Choices that the client has in full may be missing."""

    attached: Attached  # the answer of one node, which does not list the choices of all nodes
    choices: dict[int, FoundChoice]
    first_attempt: int = 0  # an attempt that no earlier router of the request has made


class Search:
    def __init__(
        self,
        request_id: RequestId,
        received: tuple[ReceivedPart, ...] | None,
        now_s: float,
        settled_s: float,
        missing: Collection[NodeId] = (),
    ) -> None:
        """Begin at `now_s`; by `settled_s` all nodes will have dialled in.

        `received` is None for a client that has nothing yet. Nodes that are `missing` were lost so
        recently that they may come back with the stream.
        """
        self.request_id = request_id
        self._received = received
        self._give_up_s = max(now_s + ANSWER_S, settled_s)
        self._settled_s = settled_s
        self._asked: set[NodeId] = set()
        self._silent: set[NodeId] = set()  # nodes that were asked and have not answered
        self._missing = set(missing)
        self._first: Attached | None = None
        self._choices: dict[int, FoundChoice] = {}
        self._first_attempt = 0
        # Sequences of earlier attempts that nodes have also given to this router, which ends them.
        self.outdated: list[tuple[NodeId, Key]] = []
        self._in_use_until_s = now_s + IN_USE_S
        self._in_use: set[NodeId] = set()  # nodes at which another router has the request

    def asks(self, node: NodeId) -> bool:
        """Return whether that node must be asked, and count it as asked."""
        if node in self._asked:
            return False
        self._asked.add(node)
        self._silent.add(node)
        self._missing.discard(node)
        return True

    def asks_again(self) -> list[NodeId]:
        """Return the nodes that may have lost the other router after they were asked."""
        again = sorted(self._in_use - self._silent)
        self._silent.update(again)
        return again

    def heard(self, node: NodeId, answer: Attached | NotAttached) -> None:
        self._silent.discard(node)
        self._in_use.discard(node)
        if isinstance(answer, NotAttached):
            if answer.is_in_use:
                self._in_use.add(node)
            return
        self._first = self._first or answer
        self._first_attempt = max(self._first_attempt, answer.first_attempt)
        for held in answer.choices:
            known = self._choices.get(held.key.choice)
            if known is None or known.held.key.attempt < held.key.attempt:
                is_landing = held.key.choice in answer.landing
                self._choices[held.key.choice] = FoundChoice(node, held, is_landing)
                loser = known
            else:
                loser = FoundChoice(node, held)
            if loser is not None and loser.held.is_running:
                self.outdated.append((loser.node, loser.held.key))

    def goes_on(self, node: NodeId, entry: TokenEntry) -> None:
        """Add tokens that a sequence got after its node gave it to this router.

        So a search never holds more than the tokens of its request, even if it takes long.
        """
        choice = entry.key.choice
        found = self._choices.get(choice)
        # An attempt below the client's must not be mistaken for it when it has caught up.
        if found is None or self._first is None or not self._has_enough(choice):
            return
        held = found.held
        num_known = len(self._first.prompt_token_ids) + len(held.token_ids) - entry.position
        if found.node != node or held.key != entry.key or num_known < 0:
            return
        held.token_ids.extend(entry.token_ids[num_known:])
        if (reason := entry.finish_reason) is not None:
            held = msgspec.structs.replace(held, finish_reason=reason, is_running=False)
        self._choices[choice] = FoundChoice(node, held)

    def lost(self, node: NodeId) -> None:
        """Forget a node, which is asked again if it comes back."""
        self._asked.discard(node)
        self._silent.discard(node)
        self._in_use.discard(node)
        self._missing.add(node)
        self._choices = {i: found for i, found in self._choices.items() if found.node != node}

    def verdict(self, now_s: float) -> FoundRequest | Failure | None:
        """Return the request, or why it cannot be found, or None while that is unknown."""
        if self._in_use:
            return in_use().to_failure() if now_s >= self._in_use_until_s else None
        wanted: list[int] = []
        if self._first is not None:
            if self._received is not None and len(self._received) != self._first.num_choices:
                return gone()
            numbers = range(self._first.num_choices)
            wanted = [i for i in numbers if not self.received_of(i).has_ended]
            # Another node may have a later attempt, so the search waits for each node that was
            # asked.
            if not self._silent and all(map(self._is_live, wanted)):
                return self._found(self._first)
        has_all = self._first is not None and all(map(self._has_enough, wanted))
        is_early = bool(self._silent) or now_s < self._settled_s
        if now_s < self._give_up_s and (is_early or (self._missing and not has_all)):
            return None
        if self._first is not None and has_all:
            return self._found(self._first)
        return _unanswered() if self._silent or self._missing else gone()

    @property
    def running_keys(self) -> dict[NodeId, list[Key]]:
        """Return the sequences that nodes have given to this router, by node."""
        keys: dict[NodeId, list[Key]] = {}
        for found in self._choices.values():
            if found.held.is_running:
                keys.setdefault(found.node, []).append(found.held.key)
        return keys

    def received_of(self, choice: int) -> ReceivedPart:
        return self._received[choice] if self._received is not None else ReceivedPart()

    # --- inside --------------------------------------------------------------------------------

    def _found(self, attached: Attached) -> FoundRequest:
        return FoundRequest(attached, self._choices, self._first_attempt)

    def _has_enough(self, choice: int) -> bool:
        """Return whether the node has all that the client has, or soon gets it from prefill."""
        found = self._choices.get(choice)
        if found is None:
            return False
        had, held = self.received_of(choice).num_tokens, found.held
        return len(held.token_ids) + found.is_landing >= had

    def _is_live(self, choice: int) -> bool:
        """Return whether the choice runs or has ended where it was found."""
        if not self._has_enough(choice):
            return False
        held = self._choices[choice].held
        return held.is_running or held.finish_reason is not None


def gone() -> Failure:
    text = "no node holds this stream any more: send the request again"
    return RequestError(text, code="stream_gone", http_status=404).to_failure()


def _unanswered() -> Failure:
    text = "a decode node that may hold this stream does not answer: try again"
    return Overloaded(text, code="stream_unknown", retry_after_s=RETRY_S).to_failure()


def in_use() -> RequestError:
    text = "this stream still has a connection: try again when that has ended"
    return RequestError(text, code="stream_in_use", http_status=409)
