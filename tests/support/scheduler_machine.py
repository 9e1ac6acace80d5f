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
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from baton.decode_node.scheduler import DecodeScheduler
from baton.engine.block_pool import BlockPool
from baton.engine.plan import StepPlan
from baton.engine.scheduler import NodeLimits
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.errors import Failure
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import (
    CancelDone,
    Decode,
    Prefill,
)
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


class SchedulerMachine(RuleBasedStateMachine):
    """What is the same for both: the router's side, the executor's, and who owns which block."""

    kind: type[PrefillScheduler | DecodeScheduler]
    limits: NodeLimits

    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler: Any = self.kind(self.pool, self.limits)
        self.executor = ToyExecutor(num_blocks, BLOCK_SIZE)
        self.launched: deque[StepPlan] = deque()
        self.asked: dict[Key, Asked] = {}
        self.attempts: dict[str, int] = {}
        self.now_s = 0.0

    def add(
        self, origin: int, name: str, ask: Ask, make: Callable[..., Prefill | Decode]
    ) -> Prefill | Decode:
        """A new request, a resume, or a newer attempt of some choices of an old one."""
        self.listen()
        attempt = self.attempts[name] = self.attempts.get(name, -1) + 1
        num_output = min(ask.num_output, ask.length - 1)
        message = make(
            key(name, ask.first, attempt), [(ask.salt + i) % VOCAB for i in range(ask.length)],
            ask.length - num_output, sampling(ask.max_tokens + num_output), ask.num_choices,
            NodeId("peer") if ask.is_handed_over else None,
        )  # fmt: skip
        for choice in range(ask.first, ask.first + ask.num_choices):
            self.end_asked(key(name, choice, lower) for lower in range(attempt))
            self.asked[key(name, choice, attempt)] = Asked(message, choice, origin)
        self.scheduler.add(self.now_s, origin, message)
        return message

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
        """Let the connector end whatever can end."""
        raise NotImplementedError

    def teardown(self) -> None:
        """Whoever was not cancelled comes to an end, and then nothing is held."""
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
