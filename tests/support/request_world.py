"""One request's lifecycle among nodes that work, fail, pause and die in any order.

Pure: every message waits in a queue until the driver lets it through, so a list of numbers is a
whole schedule. The nodes' answers are a function of the tokens, so every delivery can be checked.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.protocol.errors import Failure, NodeError
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import (
    NOT_CACHED,
    Accepted,
    Cancel,
    CancelDone,
    Crashed,
    Decode,
    Failed,
    FinishReason,
    FirstToken,
    FirstTokens,
    Prefill,
    TokenEntry,
)
from baton.protocol.sampling import Sampling
from baton.router.lifecycle import CONFIRM_DEADLINE_S, NO_NODE, Lifecycle
from baton.router.request import (
    Begun,
    CallerGone,
    ChoiceStopped,
    Closed,
    Deliver,
    NodeLost,
    NodeMessage,
    NotPlaced,
    Outcome,
    Place,
    Placed,
    Release,
    Request,
    RequestEvent,
    Send,
    Tick,
    Unplace,
)
from tests.support.scripted_nodes import toy_token

Action = Callable[[], None]
LOST = NodeError("gone").to_failure()
OVERLOADED = Failure("no_nodes", "none", retryable=True, http_status=503)
PROMPT = [3, 1, 4, 1, 5]
STOP_EVERY = 6  # tokens that this divides end a sequence


def finish_of(message: Prefill | Decode, token_ids: list[int]) -> FinishReason | None:
    if token_ids[-1] % STOP_EVERY == 0:
        return "stop"
    num_output = len(token_ids) - message.num_prompt_tokens
    return "length" if num_output >= message.sampling.max_tokens else None


def expected_answer(request: Request, choice: int) -> list[int]:
    token_ids = list(request.token_ids)
    while True:
        token_ids.append(toy_token(token_ids, choice))
        output = token_ids[len(request.token_ids) :]
        if output[-1] % STOP_EVERY == 0 or len(output) == request.sampling.max_tokens:
            return output


@dataclass(slots=True, eq=False)
class Work:
    """What a node has of one attempt: the whole prompt first, then one sequence per live choice."""

    message: Prefill | Decode
    live: set[int]
    accepted: bool = False
    sequences: dict[int, list[int]] | None = None


@dataclass(slots=True, eq=False)
class WorldNode:
    node_id: NodeId
    is_prefill: bool
    is_up: bool = True  # as the router sees it
    is_there: bool = True  # False: what is sent to it is lost
    works: dict[Key, Work] = field(default_factory=dict)
    inbox: deque[Prefill | Decode | Cancel] = field(default_factory=deque)
    outbox: deque[NodeMessage] = field(default_factory=deque)


class World:
    def __init__(
        self, num_choices: int, max_tokens: int, num_nodes: int, max_attempts: int
    ) -> None:
        sampling = Sampling(seed=1, max_tokens=max_tokens)
        request_id = RequestId("r")
        self.request = Request(request_id, PROMPT, sampling, num_choices, max_attempts)
        self.lifecycle = Lifecycle(self.request)
        self.now_s = 0.0
        self.nodes = [WorldNode(NodeId(f"p{i}"), True) for i in range(num_nodes)]
        self.nodes += [WorldNode(NodeId(f"d{i}"), False) for i in range(num_nodes)]
        self.places: dict[Key, Place] = {}
        self.charges: Counter[tuple[NodeId, Key]] = Counter()
        self.output: dict[int, list[int]] = {choice: [] for choice in range(num_choices)}
        self.finished: dict[int, FinishReason | None] = {}
        self.stopped: set[int] = set()  # by a stop string
        self.outcomes: list[Failure | None] = []
        self.is_closed = False
        self.was_wrong = False  # about what a decode node has cached
        self.computed: set[Key] = set()  # handoffs that prefill has completed
        self.feed(Begun())

    # --- the router's side, checked ------------------------------------------------------------

    def feed(self, event: RequestEvent, node: NodeId = NO_NODE) -> None:
        if self.is_closed:
            return
        for command in self.lifecycle.step(self.now_s, event, node):
            assert not self.is_closed, f"{command} after Closed"
            match command:
                case Place(key=key):
                    assert key not in self.places
                    self.places[key] = command
                case Unplace(key=key):
                    del self.places[key]
                case Send(node=node, message=message):
                    target = self.node(node)
                    assert target.is_up or isinstance(message, Cancel)
                    if target.is_there:
                        target.inbox.append(message)
                case Release(node=node, key=key):
                    self.charges[node, key] -= 1
                    assert self.charges[node, key] == 0, f"{key} released twice on {node}"
                case Deliver():
                    self.deliver(command)
                case Outcome(failure=failure):
                    self.outcomes.append(failure)
                    assert len(self.outcomes) == 1
                case Closed():
                    self.is_closed = True

    def deliver(self, delivery: Deliver) -> None:
        assert not self.outcomes, "tokens after the outcome"
        choice = delivery.choice
        assert self.finished.get(choice) is None, "tokens after the end of a choice"
        assert choice not in self.stopped, "tokens after a stop string"
        self.output[choice] += delivery.token_ids
        expected = expected_answer(self.request, choice)
        assert self.output[choice] == expected[: len(self.output[choice])]
        if delivery.finish_reason is not None:
            assert self.output[choice] == expected
            self.finished[choice] = delivery.finish_reason

    def node(self, node_id: NodeId) -> WorldNode:
        return next(node for node in self.nodes if node.node_id == node_id)

    # --- what may happen -----------------------------------------------------------------------

    def good_actions(self, *, advancing: bool = False) -> list[Action]:
        """What can happen without a failure; with `advancing`, only what leads on."""
        actions = [action for key in self.places for action in self.placings(key)]
        for node in self.nodes:
            if node.inbox:
                actions.append(partial(self.take_in, node))
            if node.outbox:
                actions.append(partial(self.say, node))
            for key, work in node.works.items():
                if not advancing or self.advances(work):
                    actions.append(partial(self.work, node, key))
        return actions

    def bad_actions(self) -> list[Action]:
        actions: list[Action] = [lambda: self.feed(CallerGone()), self.tick]
        actions += [partial(self.not_placed, key) for key in self.places]
        for choice, output in self.output.items():
            if output and self.finished.get(choice) is None and not self.outcomes:
                actions.append(partial(self.stop, choice))
        for node in self.nodes:
            if node.is_up:
                actions += [partial(self.die, node), partial(self.pause, node)]
                actions.append(partial(self.crash, node))
            else:
                actions.append(partial(self.come_back, node))
            for key in node.works:
                actions += [partial(self.fail, node, key, which) for which in (min, max)]
        return actions

    def placings(self, key: Key) -> list[Action]:
        place = self.places[key]
        decodes = [n for n in self.nodes if n.is_up and not n.is_prefill]
        prefills = [n for n in self.nodes if n.is_up and n.is_prefill]
        pairs: list[tuple[WorldNode | None, WorldNode | None]] = [(None, d) for d in decodes]
        pairs += [(p, d) for p in prefills for d in (decodes if place.wants_decode else [None])]
        return [partial(self.place, key, p, d) for p, d in pairs]

    def place(self, key: Key, prefill: WorldNode | None, decode: WorldNode | None) -> None:
        place = self.places.pop(key)
        names = [None if node is None else node.node_id for node in (prefill, decode)]
        for name in names:
            if name is not None:
                self.charges[name, key] += 1
        bound = None if prefill is not None or place.is_remote_only else 4
        self.feed(Placed(key, names[0], names[1], max_uncached_tokens=bound))

    def not_placed(self, key: Key) -> None:
        del self.places[key]
        self.feed(NotPlaced(key, OVERLOADED))

    def tick(self) -> None:
        self.now_s += CONFIRM_DEADLINE_S + 1
        self.feed(Tick())

    def stop(self, choice: int) -> None:
        if choice not in self.stopped:
            self.stopped.add(choice)
            self.feed(ChoiceStopped(choice))

    # --- nodes ---------------------------------------------------------------------------------

    def die(self, node: WorldNode) -> None:
        node.is_up = node.is_there = False
        node.works.clear()
        node.inbox.clear()
        node.outbox.clear()
        self.feed(NodeLost(node.node_id, LOST))

    def crash(self, node: WorldNode) -> None:
        """Die of an error in a step of everything that it has."""
        self.feed(Crashed(tuple(node.works), LOST), node.node_id)
        self.die(node)

    def pause(self, node: WorldNode) -> None:
        """Out of service for the router, but alive; what it says still arrives."""
        node.is_up = False
        self.feed(NodeLost(node.node_id, LOST))

    def come_back(self, node: WorldNode) -> None:
        node.is_up = node.is_there = True

    def take_in(self, node: WorldNode) -> None:
        message = node.inbox.popleft()
        if isinstance(message, Cancel):
            for key in message.keys:
                self.drop(node, key)
            node.outbox.append(CancelDone(message.keys))
            return
        for choice in choices_of(message):
            for attempt in range(message.key.attempt):
                self.drop(node, Key(message.key.request_id, choice, attempt))
        node.works[message.key] = Work(message, set(choices_of(message)))

    def drop(self, node: WorldNode, key: Key) -> None:
        """End one sequence, and with the last one the attempt."""
        for leg_key, work in list(node.works.items()):
            if leg_key.attempt == key.attempt and key.choice in work.live:
                work.live.discard(key.choice)
                if not work.live:
                    del node.works[leg_key]

    def say(self, node: WorldNode) -> None:
        self.feed(node.outbox.popleft(), node.node_id)

    def fail(self, node: WorldNode, key: Key, which: Callable[[set[int]], int]) -> None:
        """Lose an attempt, or preempt one of its sequences once they run."""
        work = node.works[key]
        if work.sequences is not None:
            chosen = which(work.live)
            preempted = Failure("preempted", "no room", retryable=True)
            node.outbox.append(Failed(key.of_choice(chosen), preempted))
            self.drop(node, key.of_choice(chosen))
        elif isinstance(work.message, Decode) and work.message.max_uncached_tokens is not None:
            assert not self.was_wrong, "a prompt stays local again that was not cached"
            self.was_wrong = True
            node.outbox.append(Failed(key, Failure(NOT_CACHED, "no", retryable=True)))
            del node.works[key]
        else:
            node.outbox.append(Failed(key, Failure("transfer_failed", "lost", retryable=True)))
            del node.works[key]

    def work(self, node: WorldNode, key: Key) -> None:
        work = node.works[key]
        message = work.message
        if isinstance(message, Prefill):
            node.outbox.append(self.first_tokens(message))
            self.computed.add(key)
            del node.works[key]
        elif not work.accepted:
            work.accepted = True
            node.outbox.append(Accepted(key))
        elif work.sequences is None:
            self.join(node, work, message)
        else:
            choice = min(work.live, key=lambda choice: len(work.sequences[choice]))  # type: ignore[index]
            self.step(node, work, choice)

    def first_tokens(self, message: Prefill) -> FirstTokens:
        firsts = []
        for choice in choices_of(message):
            token_ids = [*message.token_ids, toy_token(message.token_ids, choice)]
            firsts.append(FirstToken(token_ids[-1], finish_of(message, token_ids)))
        return FirstTokens(message.key, len(message.token_ids), tuple(firsts))

    def join(self, node: WorldNode, work: Work, message: Decode) -> None:
        is_local = message.prefill_node is None
        if is_local or message.key in self.computed:
            work.sequences = {choice: list(message.token_ids) for choice in work.live}
        if is_local or work.sequences is None:
            return
        for choice in list(work.live):
            first = [*message.token_ids, toy_token(message.token_ids, choice)]
            if finish_of(message, first) is not None:
                self.drop(node, message.key.of_choice(choice))

    def step(self, node: WorldNode, work: Work, choice: int) -> None:
        assert work.sequences is not None
        token_ids = work.sequences[choice]
        position = len(token_ids)
        # The first entry of a handoff holds the first token again and one more.
        is_first = position == len(work.message.token_ids)
        is_remote = isinstance(work.message, Decode) and work.message.prefill_node is not None
        for _ in range(2 if is_first and is_remote else 1):
            token_ids.append(toy_token(token_ids, choice))
        reason = finish_of(work.message, token_ids)
        key = work.message.key.of_choice(choice)
        node.outbox.append(TokenEntry(key, position, token_ids[position:], reason))
        if reason is not None:
            self.drop(node, key)

    # --- the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything that is on its way arrives, nothing fails any more."""
        for node in self.nodes:
            self.come_back(node)
        for _ in range(2000):
            if not (actions := self.good_actions(advancing=True)):
                break
            actions[0]()

    def advances(self, work: Work) -> bool:
        message = work.message
        if self.is_closed:
            # No node works for a request that is over; but decode hears of an end at the first
            # token from prefill, perhaps later than the router.
            return message.key in self.computed and work.sequences is None
        is_landing = isinstance(message, Decode) and message.prefill_node is not None
        has_all = work.sequences is not None or message.key in self.computed
        return not (is_landing and work.accepted) or has_all


def choices_of(message: Prefill | Decode) -> range:
    return range(message.key.choice, message.key.choice + message.num_choices)
