"""The prefill scheduler under any order of events: readers see what was announced."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from baton.engine.scheduling.plan import StepPlan
from baton.engine.scheduling.scheduler import NodeLimits
from baton.kv_transfer.interfaces import Offer, OfferBroken, Released
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.errors import Failure
from baton.protocol.ids import Key
from baton.protocol.messages import BlockRange, End, Failed, FirstTokens, Prefill, Withdrawn
from tests.support.scheduler_machine import (
    BLOCK_SIZE,
    EOS,
    LOST,
    ORIGINS,
    Ask,
    SchedulerMachine,
    asks,
)
from tests.support.toy_executor import VOCAB, next_token


@dataclass
class Offering:
    """An offer as the connector has it."""

    message: Prefill
    blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    is_complete: bool = False
    is_leaving: bool = False


class PrefillMachine(SchedulerMachine):
    """As long as an offer lasts, every announced block must hold what was computed for it, under
    the generation that it was announced with and that the executor has written: a reader may be
    looking at it."""

    kind = PrefillScheduler
    refuses_older_routers = False  # decode does
    limits = NodeLimits(10, 3, 40, EOS, VOCAB)

    @initialize(num_blocks=st.integers(8, 24))
    def start(self, num_blocks: int) -> None:
        self.begin(num_blocks)
        self.written = [0] * num_blocks  # the generation table of the pool
        self.offerings: dict[Key, Offering] = {}
        self.num_released: Counter[Key] = Counter()
        self.lost: set[Key] = set()  # released with a failure
        self.computed: set[Key] = set()  # the router has the first tokens

    @rule(origin=st.integers(0, ORIGINS - 1), name=st.sampled_from("abcdef"), ask=asks(36, 4))
    def request(self, origin: int, name: str, ask: Ask) -> None:
        self.add(origin, name, ask, Prefill)
        for _ in range(ask.eagerness):
            self.launch()
            if self.launched:
                self.settle()
            self.connect()

    @rule(origin=st.integers(0, ORIGINS - 1))
    def lose_router(self, origin: int) -> None:
        super().lose_router(origin)
        self.computed = {of for of in self.computed if self.asked[of].origin != origin}

    def hear(self, origin: int, message: object) -> None:
        assert isinstance(message, Failed | FirstTokens)
        choices = self.choices_of(message.key)
        if isinstance(message, Failed) and message.key in self.computed:
            assert message.key in self.lost
            assert choices[0].origin == origin
            self.computed.remove(message.key)
            return
        assert not all(one.is_over for one in choices), f"{message.key} speaks after its end"
        assert choices[0].origin == origin
        for one in choices:
            one.is_over = True
        if isinstance(message, FirstTokens):
            self.computed.add(message.key)
            tokens = choices[0].message.token_ids
            assert message.position == len(tokens)
            expected = [next_token(tokens, one.choice) for one in choices]
            assert [token.token_id for token in message.tokens] == expected

    def hear_connector(self, event: object) -> None:
        assert isinstance(event, Offer | BlockRange | End | Withdrawn)
        offering = self.offerings.get(event.key)
        if isinstance(event, Offer):
            assert offering is None
            assert not self.num_released[event.key]
            message = self.asked[event.key].message
            assert event.decode_node == message.decode_node
            num_tokens = len(message.token_ids)
            assert (event.num_tokens, event.num_blocks) == (
                num_tokens, self.pool.blocks_for(num_tokens),
            )  # fmt: skip
            self.offerings[event.key] = Offering(message)
        elif offering is not None:
            self.advance(offering, event)

    def advance(self, offering: Offering, event: BlockRange | End | Withdrawn) -> None:
        match event:
            case BlockRange():
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
        if failure is not None:
            self.lost.add(of)
        self.scheduler.on_report(0.0, Released(of, failure))

    @precondition(lambda self: self.offerings)
    @rule(index=st.integers(0, 9), is_lost=st.booleans())
    def release(self, index: int, is_lost: bool) -> None:
        """Decode has them all, or declines, or its lease ends."""
        of = sorted(self.offerings)[index % len(self.offerings)]
        self.give_back(of, LOST if is_lost or not self.offerings[of].is_complete else None)

    @precondition(lambda self: self.offerings)
    @rule(index=st.integers(0, 9))
    def break_off(self, index: int) -> None:
        """The channel is lost, and decode may still read what was announced."""
        of = sorted(self.offerings)[index % len(self.offerings)]
        offering = self.offerings[of]
        if offering.blocks and not offering.is_leaving:
            offering.is_leaving = True
            self.lost.add(of)
            self.scheduler.on_report(0.0, OfferBroken(of, LOST))

    def settles(self, plan: StepPlan) -> None:
        assert sum(part.length for part in plan.slices) <= self.limits.max_num_batched_tokens
        for block, generation in plan.generations:
            self.written[block] = generation

    def owned(self) -> Iterable[int]:
        scheduler = self.scheduler
        assert not any(handoff.sequence.block_table for handoff in scheduler._waiting.values())
        for handoff in chain(scheduler._computing.values(), scheduler._holding.values()):
            yield from handoff.sequence.block_table

    @invariant()
    def what_may_be_read_is_right(self) -> None:
        for offering in self.offerings.values():
            tokens = offering.message.token_ids
            assert tuple(offering.generations) == self.pool.generations_of(offering.blocks)
            assert offering.generations == [self.written[block] for block in offering.blocks]
            for position in range(min(len(offering.blocks) * BLOCK_SIZE, len(tokens))):
                block = offering.blocks[position // BLOCK_SIZE]
                slot = self.executor.slots[block][position % BLOCK_SIZE]
                assert slot == tuple(tokens[: position + 1])

    def end_readings(self) -> None:
        for of, offering in list(self.offerings.items()):
            if offering.is_complete or offering.is_leaving:
                self.give_back(of, None if offering.is_complete else LOST)

    def teardown(self) -> None:
        super().teardown()
        assert (self.offerings, self.scheduler._holding) == ({}, {})


PrefillMachine.TestCase.settings = settings(stateful_step_count=60)
TestPrefillMachine = PrefillMachine.TestCase
