"""The prefill scheduler under any order of events, with every reference to a block accounted for.

The test is the router, the connector and the executor. As long as an offer lasts, every announced
block must hold what was computed for it, under the generation that it was announced with and that
the executor has written: a reader may be looking at it. What the scheduler says and what the
connector reports may cross.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from baton.engine.block_pool import BlockPool
from baton.engine.plan import StepPlan
from baton.engine.scheduler import NodeLimits
from baton.kv_transfer.interfaces import Offer, Released
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.errors import Failure
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import CancelDone, End, Failed, FirstTokens, Prefill, Span, Withdrawn
from tests.support.drive import key, sampling
from tests.support.toy_executor import VOCAB, ToyExecutor, next_token

BLOCK_SIZE = 4
LIMITS = NodeLimits(10, 3, 40, tuple(range(0, VOCAB, 20)), VOCAB)
LOST = Failure("node_lost", "gone", retryable=True)
ORIGINS = 2


class Ask(NamedTuple):
    """One message of a router."""

    first: int
    num_choices: int
    length: int
    num_output: int
    max_tokens: int
    has_decode: bool
    salt: int  # prompts with the same one share their prefix
    num_steps: int  # that are taken at once


ASKS = st.builds(
    Ask, st.integers(0, 2), st.integers(1, 3), st.integers(1, 36), st.integers(0, 6),
    st.integers(1, 4), st.sampled_from([True, True, False]), st.sampled_from([0, 0, 7]),
    st.integers(0, 4),
)  # fmt: skip


@dataclass
class Offering:
    """An offer as the connector has it."""

    message: Prefill
    blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    is_complete: bool = False
    is_leaving: bool = False


@dataclass
class Wanted:
    """What the router knows of a message: the choices that may still get a first token."""

    message: Prefill
    origin: int
    live: set[int]


class PrefillMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(8, 24))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = PrefillScheduler(self.pool, LIMITS)
        self.executor = ToyExecutor(num_blocks, BLOCK_SIZE)
        self.written = [0] * num_blocks  # the generation table of the pool
        self.launched: deque[StepPlan] = deque()
        self.offerings: dict[Key, Offering] = {}
        self.wanted: dict[Key, Wanted] = {}
        self.attempts: dict[str, int] = {}
        self.num_released: Counter[Key] = Counter()

    # --- the router -----------------------------------------------------------------------------

    @rule(origin=st.integers(0, ORIGINS - 1), name=st.sampled_from("abcdef"), ask=ASKS)
    def add(self, origin: int, name: str, ask: Ask) -> None:
        """A new request, a resume, or a newer attempt of some choices of an old one."""
        self.listen()
        attempt = self.attempts[name] = self.attempts.get(name, -1) + 1
        num_output = min(ask.num_output, ask.length - 1)
        message = Prefill(
            key(name, ask.first, attempt), [(ask.salt + i) % VOCAB for i in range(ask.length)],
            ask.length - num_output, sampling(ask.max_tokens + num_output), ask.num_choices,
            NodeId("d0") if ask.has_decode else None,
        )  # fmt: skip
        choices = set(range(ask.first, ask.first + ask.num_choices))
        for of, old in self.wanted.items():
            if of.request_id == name:
                old.live -= choices
        self.wanted[message.key] = Wanted(message, origin, choices)
        self.scheduler.add(0.0, origin, message)
        for _ in range(ask.num_steps):
            self.launch()
            if self.launched:
                self.settle()
            self.connect()

    @rule(picks=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), min_size=1, max_size=3))
    def cancel(self, picks: list[tuple[int, int]]) -> None:
        self.listen()
        known = sorted(self.wanted)
        keys = tuple(
            known[i].of_choice(choice) if i < len(known) else key("unknown", choice)
            for i, choice in picks
        )
        self.scheduler.cancel(0, keys)
        for of, old in self.wanted.items():
            old.live -= {one.choice for one in keys if one == of.of_choice(one.choice)}

    @rule(origin=st.integers(0, ORIGINS - 1))
    def lose_router(self, origin: int) -> None:
        self.listen()
        self.scheduler.forget(origin)
        for old in self.wanted.values():
            if old.origin == origin:
                old.live = set()

    @rule()
    def listen(self) -> None:
        """Take what routers are told, and hold it to the contract."""
        for origin, message in self.scheduler.outputs.take_router_messages():
            if isinstance(message, CancelDone):
                continue
            assert isinstance(message, Failed | FirstTokens)
            wanted = self.wanted[message.key]
            assert wanted.live, f"{message.key} speaks after its end"
            assert wanted.origin == origin
            wanted.live = set()
            if isinstance(message, FirstTokens):
                asked = wanted.message
                first = asked.key.choice
                assert message.position == len(asked.token_ids)
                assert [token.token_id for token in message.tokens] == [
                    next_token(asked.token_ids, choice)
                    for choice in range(first, first + asked.num_choices)
                ]

    # --- the connector --------------------------------------------------------------------------

    @rule()
    def connect(self) -> None:
        """Hear what the scheduler wants; it may have crossed a report."""
        for event in self.scheduler.outputs.take_connector_events():
            assert isinstance(event, Offer | Span | End | Withdrawn)
            offering = self.offerings.get(event.key)
            if isinstance(event, Offer):
                assert offering is None
                assert not self.num_released[event.key]
                message = self.wanted[event.key].message
                assert event.num_blocks == self.pool.blocks_for(len(message.token_ids))
                self.offerings[event.key] = Offering(message)
            elif offering is not None:
                self.advance(offering, event)

    def advance(self, offering: Offering, event: Span | End | Withdrawn) -> None:
        match event:
            case Span():
                assert not offering.is_complete
                assert event.first_block == len(offering.blocks)
                assert event.block_ids
                if not offering.is_leaving:
                    offering.blocks += event.block_ids
                    offering.generations += event.generations
            case End():
                assert len(event.tokens) == offering.message.num_choices
                num_blocks = self.pool.blocks_for(len(offering.message.token_ids))
                assert offering.is_leaving or len(offering.blocks) == num_blocks
                offering.is_complete = True
            case Withdrawn():
                offering.is_leaving = True
                if not offering.blocks:
                    self.give_back(event.key, LOST)

    def give_back(self, of: Key, failure: Failure | None) -> None:
        del self.offerings[of]
        self.num_released[of] += 1
        self.scheduler.on_report(0.0, Released(of, failure))

    @precondition(lambda self: self.offerings)
    @rule(index=st.integers(0, 9), is_lost=st.booleans())
    def release(self, index: int, is_lost: bool) -> None:
        """Decode has them all, or declines, or its lease ends."""
        of = sorted(self.offerings)[index % len(self.offerings)]
        self.give_back(of, LOST if is_lost or not self.offerings[of].is_complete else None)

    # --- the executor ---------------------------------------------------------------------------

    @rule()
    def launch(self) -> None:
        if len(self.launched) < 2:
            plan = self.scheduler.plan(0.0)
            if plan is not None:
                assert 0 < len(plan.slices) <= LIMITS.max_num_seqs
                assert sum(part.length for part in plan.slices) <= LIMITS.chunk_tokens
                self.launched.append(plan)

    @precondition(lambda self: self.launched)
    @rule()
    def settle(self) -> None:
        plan = self.launched.popleft()
        for block, generation in plan.generations:
            self.written[block] = generation
        self.scheduler.settle(0.0, plan, self.executor.run(plan))

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def every_reference_has_its_owner(self) -> None:
        scheduler, owned = self.scheduler, Counter[int]()
        for handoff in chain(scheduler._computing.values(), scheduler._holding.values()):
            owned.update(handoff.sequence.block_table)
        assert not any(handoff.sequence.block_table for handoff in scheduler._waiting)
        counted = {block: self.pool.references(block) for block in range(self.pool.num_blocks)}
        assert {block: count for block, count in counted.items() if count} == owned
        assert len(owned) == self.pool.num_owned

    @invariant()
    def what_may_be_read_is_right(self) -> None:
        for plan in self.launched:
            for part in plan.slices:
                assert all(self.pool.references(block) for block in part.block_table)
        for offering in self.offerings.values():
            tokens = offering.message.token_ids
            assert tuple(offering.generations) == self.pool.generations_of(offering.blocks)
            assert offering.generations == [self.written[block] for block in offering.blocks]
            for index, block in enumerate(offering.blocks):
                start = index * BLOCK_SIZE
                for position in range(start, min(start + BLOCK_SIZE, len(tokens))):
                    slot = self.executor.slots[block][position - start]
                    assert slot == tuple(tokens[: position + 1])

    def teardown(self) -> None:
        """Whoever was not cancelled gets its tokens or an error, and then nothing is held."""
        for _ in range(300):
            self.connect()
            for of in list(self.offerings):
                if self.offerings[of].is_complete or self.offerings[of].is_leaving:
                    self.give_back(of, None if self.offerings[of].is_complete else LOST)
            self.launch()
            if self.launched:
                self.settle()
            self.every_reference_has_its_owner()
        self.listen()
        assert not any(wanted.live for wanted in self.wanted.values())
        assert (self.launched, self.offerings) == (deque(), {})
        load = self.scheduler.load()
        assert (load.num_running, load.num_waiting, self.pool.num_owned) == (0, 0, 0)
        assert self.scheduler._holding == {}
        assert load.free_blocks == load.total_blocks


PrefillMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestPrefillMachine = PrefillMachine.TestCase
