"""A scheduler under any order of events, with every reference to a block accounted for.

The test is the router, the connector and the executor; each role adds its connector. What a
scheduler says and what the connector reports may cross. In the end everything must have come to its
end, and every block is free, evictable or quarantined.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.decode_node.scheduler import DecodeScheduler
from baton.engine.scheduling.block_pool import BlockPool
from baton.engine.scheduling.plan import StepPlan
from baton.engine.scheduling.scheduler import NodeLimits
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.errors import Failure
from baton.protocol.ids import ATTEMPTS_PER_ROUTER, Key, NodeId
from baton.protocol.messages import CancelDone, Decode, Prefill
from tests.support.drive import key, sampling
from tests.support.toy_executor import VOCAB, ToyExecutor

BLOCK_SIZE = 4
# One token in twenty ends its sequence.
EOS = tuple(range(0, VOCAB, 20))
LOST = Failure("node_lost", "gone", retryable=True)
ORIGINS = 2


class Ask(NamedTuple):
    """One message of a router."""

    first: int
    num_choices: int
    length: int
    num_output: int
    max_tokens: int
    is_handed_over: bool
    salt: int  # prompts with the same one share their prefix
    eagerness: int  # how much happens with it at once


def asks(max_length: int, max_tokens: int) -> st.SearchStrategy[Ask]:
    return st.builds(
        Ask, st.integers(0, 2), st.integers(1, 3), st.integers(1, max_length), st.integers(0, 6),
        st.integers(1, max_tokens), st.booleans(), st.sampled_from([0, 0, 7]), st.integers(0, 4),
    )  # fmt: skip


@dataclass
class Asked:
    """What the router knows of one choice of one attempt."""

    message: Any  # Prefill or Decode, as the machine's scheduler takes
    choice: int
    origin: int
    output: list[int] = field(default_factory=list)
    is_over: bool = False  # finished, failed, cancelled or forgotten: nothing may follow
    is_adopted: bool = False  # another router has taken it over and has a leg for it alone


class SchedulerMachine(RuleBasedStateMachine):
    """What is the same for both: the router's side, the executor's, and who owns which block."""

    kind: type[PrefillScheduler | DecodeScheduler]
    limits: NodeLimits
    refuses_older_routers: bool

    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler: Any = self.kind(self.pool, self.limits)
        self.executor = ToyExecutor(num_blocks, BLOCK_SIZE)
        self.launched: deque[StepPlan] = deque()
        self.asked: dict[Key, Asked] = {}
        self.minted: dict[str, int] = {}  # the router that a request began at
        self.attempts: dict[tuple[int, str], int] = {}  # the latest of each router
        self.first_here: dict[str, int] = {}  # of the last router that this node has heard of
        self.now_s = 0.0

    def add(
        self, origin: int, name: str, ask: Ask, make: Callable[..., Prefill | Decode]
    ) -> Prefill | Decode:
        """A new request, a resume, or a newer attempt of some choices of an old one."""
        self.listen()
        if (origin, name) not in self.attempts:
            origin = self.minted.setdefault(name, origin)
        attempt = self.attempts[origin, name] = self.attempts.get((origin, name), -1) + 1
        is_refused = self.refuses_older_routers and attempt < self.first_here.get(name, 0)
        if attempt >= ATTEMPTS_PER_ROUTER and not is_refused:
            self.first_here[name] = attempt - attempt % ATTEMPTS_PER_ROUTER
        num_output = min(ask.num_output, ask.length - 1)
        message = make(
            key(name, ask.first, attempt), [(ask.salt + i) % VOCAB for i in range(ask.length)],
            ask.length - num_output, sampling(ask.max_tokens + num_output), ask.num_choices,
            NodeId("peer") if ask.is_handed_over else None,
        )  # fmt: skip
        choices = range(ask.first, ask.first + ask.num_choices)
        lower = [of for of in self.asked if of.request_id == name and of.attempt < attempt]
        if not is_refused:
            own = [of for of in lower if self.asked[of].origin == origin]
            self.end_asked(of for of in own if of.choice in choices)
        for choice in choices:
            self.asked[key(name, choice, attempt)] = Asked(message, choice, origin)
        before = [of for of in lower if not self.asked[of].is_over]
        self.scheduler.add(self.now_s, origin, message)
        self.listen()
        if is_refused:
            assert self.asked[message.key].is_over, "a router that was away is told"
            assert not any(self.asked[of].is_over for of in before), "and no other request is hurt"
        else:
            others = [of for of in before if self.asked[of].origin != origin]
            assert all(self.asked[of].is_over for of in others), "a router that loses it is told"
        return message

    @rule(origin=st.integers(0, ORIGINS - 1), name=st.sampled_from("abcdef"))
    def take_over_elsewhere(self, origin: int, name: str) -> None:
        """A router gets a request at another node, of which this one hears nothing yet."""
        latest = max((n for (_, of), n in self.attempts.items() if of == name), default=None)
        if latest is not None:
            latest += 1  # the first attempt of a router that has taken it over may be yet to come
            next_first = latest - latest % ATTEMPTS_PER_ROUTER + ATTEMPTS_PER_ROUTER
            self.attempts[origin, name] = next_first - 1

    def end_asked(self, keys: Iterable[Key]) -> None:
        for one in keys:
            if one in self.asked:
                self.asked[one].is_over = True

    def choices_of(self, of: Key) -> list[Asked]:
        """All choices of the message with that key."""
        every = range(of.choice, of.choice + self.asked[of].message.num_choices)
        return [self.asked[of.of_choice(choice)] for choice in every]

    @rule(picks=st.lists(st.integers(0, 40), min_size=1, max_size=3))
    def cancel(self, picks: list[int]) -> None:
        known = sorted(self.asked)
        keys = tuple(known[i] if i < len(known) else key("unknown", i) for i in picks)
        self.listen()
        for origin in range(ORIGINS):  # a router cancels what it has asked for
            own = tuple(of for of in keys if of in self.asked and self.asked[of].origin == origin)
            self.scheduler.cancel(origin, own)
        self.scheduler.cancel(0, tuple(of for of in keys if of not in self.asked))
        self.end_asked(keys)

    @rule(origin=st.integers(0, ORIGINS - 1))
    def lose_router(self, origin: int) -> None:
        self.listen()
        self.scheduler.forget(origin)
        self.end_asked(of for of, asked in self.asked.items() if asked.origin == origin)

    @rule()
    def listen(self) -> None:
        """Take what routers are told, and hold it to the contract."""
        for origin, message in self.scheduler.outputs.take_router_messages():
            if not isinstance(message, CancelDone):
                self.hear(origin, message)

    def hear(self, origin: int, message: object) -> None:
        raise NotImplementedError

    @rule()
    def connect(self) -> None:
        """Hear what the scheduler wants of the connector; it may have crossed a report."""
        for event in self.scheduler.outputs.take_connector_events():
            self.hear_connector(event)

    def hear_connector(self, event: object) -> None:
        raise NotImplementedError

    @rule()
    def launch(self) -> None:
        if len(self.launched) < 2:
            plan = self.scheduler.plan(self.now_s)
            if plan is not None:
                assert 0 < len(plan.slices) <= self.limits.max_num_seqs
                self.launched.append(plan)

    def settles(self, plan: StepPlan) -> None:
        """A hook: that plan settles next."""

    @precondition(lambda self: self.launched)
    @rule()
    def settle(self) -> None:
        plan = self.launched.popleft()
        self.settles(plan)
        self.scheduler.settle(self.now_s, plan, self.executor.run(plan))

    def owned(self) -> Iterable[int]:
        """Every block that the scheduler holds, once per reference."""
        raise NotImplementedError

    @invariant()
    def every_reference_has_its_owner(self) -> None:
        owned = Counter(self.owned())
        counted = {block: self.pool.references(block) for block in range(self.pool.num_blocks)}
        assert {block: count for block, count in counted.items() if count} == owned
        assert len(owned) == self.pool.num_owned

    @invariant()
    def what_a_step_names_is_owned(self) -> None:
        for part in chain.from_iterable(plan.slices for plan in self.launched):
            assert all(self.pool.references(block) for block in part.block_table)

    def end_readings(self) -> None:
        """Let the connector end everything that can end."""
        raise NotImplementedError

    def teardown(self) -> None:
        """Every request that was not cancelled ends, and then nothing is held."""
        for _ in range(400):
            self.connect()
            self.end_readings()
            self.now_s += 0.5
            self.launch()
            if self.launched:
                self.settle()
            self.every_reference_has_its_owner()
        self.listen()
        assert all(asked.is_over for asked in self.asked.values())
        assert not self.launched
        load = self.scheduler.load()
        assert (load.num_running, load.num_waiting, self.pool.num_owned) == (0, 0, 0)
        assert load.free_blocks + load.quarantined_blocks == load.total_blocks
