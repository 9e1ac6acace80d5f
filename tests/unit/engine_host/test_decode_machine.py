"""The decode scheduler under any order of events, with every reference to a block accounted for.

The test is the router, the connector and the executor. Reads write into landing blocks until the
test reports their end, so a block that is given away too early shows as wrong "KV" in a step; what
the scheduler says and what the connector reports may cross. In the end everything must have come
to its end, and every block is free, evictable or quarantined.
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

from baton.decode_node.scheduler import DecodeScheduler
from baton.engine.block_pool import BlockPool
from baton.engine.plan import StepPlan
from baton.engine.scheduler import NodeLimits
from baton.kv_transfer.interfaces import Abandon, Expect, Land, Landed, LandingEnded
from baton.protocol.errors import Failure
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import (
    Accepted,
    CancelDone,
    Decode,
    Failed,
    FirstToken,
    Offered,
    Tokens,
)
from tests.support.drive import key, sampling
from tests.support.toy_executor import VOCAB, ToyExecutor, next_token

BLOCK_SIZE = 4
# One token in twenty ends its sequence.
LIMITS = NodeLimits(8, 4, 40, tuple(range(0, VOCAB, 20)), VOCAB)
LOST = Failure("node_lost", "gone", retryable=True)
ORIGINS = 2


@dataclass
class Reading:
    """A landing as the connector has it: `land` is set once the scheduler gave blocks."""

    message: Decode
    is_offered: bool = False
    is_draining: bool = False
    land: Land | None = None


class Ask(NamedTuple):
    """One message of a router."""

    first: int
    num_choices: int
    length: int
    num_output: int
    max_tokens: int
    is_local: bool
    salt: int  # prompts with the same one share their prefix
    is_eager: bool  # prefill offers at once, and decode takes it up if it can


ASKS = st.builds(
    Ask, st.integers(0, 2), st.integers(1, 3), st.integers(1, 30), st.integers(0, 6),
    st.integers(1, 14), st.booleans(), st.sampled_from([0, 0, 7]), st.booleans(),
)  # fmt: skip


@dataclass
class Sequence:
    """What the router knows of one choice of one attempt."""

    message: Decode
    choice: int
    origin: int
    output: list[int] = field(default_factory=list)
    is_over: bool = False  # finished, failed, cancelled or forgotten: nothing may follow


def answer(message: Decode, choice: int) -> list[int]:
    """The tokens that this choice must get, the one that ends it included."""
    tokens = list(message.token_ids)
    while True:
        tokens.append(next_token(tokens, choice))
        num_output = len(tokens) - message.num_prompt_tokens
        is_last = num_output >= message.sampling.max_tokens or len(tokens) >= LIMITS.max_model_len
        if is_last or tokens[-1] in LIMITS.eos_token_ids:
            return tokens[len(message.token_ids) :]


class DecodeMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(10, 24))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = DecodeScheduler(self.pool, LIMITS)
        self.executor = ToyExecutor(num_blocks, BLOCK_SIZE)
        self.launched: deque[StepPlan] = deque()
        self.readings: dict[Key, Reading] = {}
        self.sequences: dict[Key, Sequence] = {}
        self.attempts: dict[str, int] = {}
        self.now_s = 0.0

    # --- the router -----------------------------------------------------------------------------

    @rule(origin=st.integers(0, ORIGINS - 1), name=st.sampled_from("abcdef"), ask=ASKS)
    def add(self, origin: int, name: str, ask: Ask) -> None:
        """A new request, a resume, or a newer attempt of some choices of an old one."""
        self.listen()
        attempt = self.attempts[name] = self.attempts.get(name, -1) + 1
        first, count = ask.first, ask.num_choices
        tokens = [(ask.salt + i) % VOCAB for i in range(ask.length)]
        num_output = min(ask.num_output, ask.length - 1)
        message = Decode(
            key(name, first, attempt), tokens, ask.length - num_output,
            sampling(ask.max_tokens + num_output), count,
            None if ask.is_local else NodeId("p0"),
        )  # fmt: skip
        for choice in range(first, first + count):
            self.sequences[key(name, choice, attempt)] = Sequence(message, choice, origin)
            for lower in range(attempt):
                if (old := self.sequences.get(key(name, choice, lower))) is not None:
                    old.is_over = True
        self.scheduler.add(self.now_s, origin, message)
        if ask.is_eager:
            self.connect()
            if message.key in self.readings:
                self.offer(sorted(self.readings).index(message.key))
            self.launch()
            self.connect()

    @rule(picks=st.lists(st.integers(0, 40), min_size=1, max_size=3))
    def cancel(self, picks: list[int]) -> None:
        known = sorted(self.sequences)
        keys = tuple(known[i] if i < len(known) else key("unknown", i) for i in picks)
        self.listen()
        self.scheduler.cancel(0, keys)
        for one in keys:
            if one in self.sequences:
                self.sequences[one].is_over = True

    @rule(origin=st.integers(0, ORIGINS - 1))
    def lose_router(self, origin: int) -> None:
        self.listen()
        self.scheduler.forget(origin)
        for sequence in self.sequences.values():
            sequence.is_over = sequence.is_over or sequence.origin == origin

    @rule()
    def listen(self) -> None:
        """Take what routers are told, and hold it to the contract."""
        for _, message in self.scheduler.outputs.take_router_messages():
            match message:
                case Tokens(entries=entries):
                    for entry in entries:
                        self.hear(entry.key, entry.position, entry.token_ids, entry.finish_reason)
                case Failed(key=of):
                    self.fail(of)
                case _:
                    assert isinstance(message, Accepted | CancelDone)

    def hear(self, of: Key, position: int, tokens: list[int], reason: str | None) -> None:
        sequence = self.sequences[of]
        assert not sequence.is_over, f"{of} speaks after its end"
        assert position == len(sequence.message.token_ids) + len(sequence.output)
        sequence.output += tokens
        expected = answer(sequence.message, sequence.choice)
        assert sequence.output == expected[: len(sequence.output)]
        assert (reason is not None) == (len(sequence.output) == len(expected))
        sequence.is_over = reason is not None

    def fail(self, of: Key) -> None:
        """A sequence that runs, or a whole request that does not run yet."""
        ended = [one for one in self.named_by(of) if not one.is_over]
        assert ended, f"{of} fails after its end"
        for one in ended:
            one.is_over = True

    def named_by(self, of: Key) -> list[Sequence]:
        message = self.sequences[of].message
        if of != message.key or self.sequences[of].output:
            return [self.sequences[of]]
        every = range(of.choice, of.choice + message.num_choices)
        return [self.sequences[of.of_choice(choice)] for choice in every]

    # --- the connector --------------------------------------------------------------------------

    @rule()
    def connect(self) -> None:
        """Hear what the scheduler wants; it may have crossed a report."""
        for event in self.scheduler.outputs.take_connector_events():
            if isinstance(event, Expect):
                assert event.key not in self.readings
                message = self.sequences[event.key].message
                self.readings[event.key] = Reading(message)
            elif isinstance(event, Land) and event.key in self.readings:
                reading = self.readings[event.key]
                assert reading.is_offered
                assert reading.land is None
                reading.land = event
            elif isinstance(event, Abandon) and event.key in self.readings:
                self.drain(event.key)

    def drain(self, of: Key) -> None:
        if self.readings[of].land is None:
            self.end(of, ())
        else:
            self.readings[of].is_draining = True

    def end(self, of: Key, quarantined: tuple[int, ...]) -> None:
        del self.readings[of]
        self.scheduler.on_report(self.now_s, LandingEnded(of, LOST, quarantined))

    def pick(self, index: int) -> Key:
        return sorted(self.readings)[index % len(self.readings)]

    @precondition(lambda self: self.readings)
    @rule(index=st.integers(0, 9))
    def offer(self, index: int) -> None:
        of = self.pick(index)
        reading = self.readings[of]
        if not reading.is_offered:
            reading.is_offered = True
            num_tokens = len(reading.message.token_ids)
            blocks = self.pool.blocks_for(num_tokens)
            self.scheduler.on_report(self.now_s, Offered(of, num_tokens, blocks, 30.0))

    @precondition(lambda self: self.readings)
    @rule(index=st.integers(0, 9), part=st.integers(1, 3))
    def read(self, index: int, part: int) -> None:
        """Some bytes land; also those of a landing that drains."""
        reading = self.readings[self.pick(index)]
        if reading.land is not None:
            self.write(reading, len(reading.land.block_ids) // part)

    def write(self, reading: Reading, num_blocks: int) -> None:
        assert reading.land is not None
        tokens, first = reading.message.token_ids, reading.land.first_block
        for index, block in enumerate(reading.land.block_ids[:num_blocks], first):
            start = index * BLOCK_SIZE
            for position in range(start, min(start + BLOCK_SIZE, len(tokens))):
                self.executor.slots[block][position - start] = tuple(tokens[: position + 1])

    @precondition(lambda self: self.readings)
    @rule(index=st.integers(0, 9))
    def land(self, index: int) -> None:
        of = self.pick(index)
        reading = self.readings[of]
        if reading.land is None or reading.is_draining:
            return
        del self.readings[of]
        message, firsts = reading.message, []
        self.write(reading, len(reading.land.block_ids))
        self.listen()
        for choice in range(of.choice, of.choice + message.num_choices):
            tokens = answer(message, choice)
            firsts.append(FirstToken(tokens[0], "stop" if len(tokens) == 1 else None))
            if len(tokens) == 1:  # prefill has told the router
                self.sequences[of.of_choice(choice)].is_over = True
        self.scheduler.on_report(self.now_s, Landed(of, tuple(firsts), 0, 0.0, 0.0))

    @precondition(lambda self: self.readings)
    @rule(index=st.integers(0, 9), num_unknown=st.sampled_from([0, 0, 0, 1]))
    def lose_landing(self, index: int, num_unknown: int) -> None:
        of = self.pick(index)
        land = self.readings[of].land
        if self.pool.num_quarantined > 1:
            num_unknown = 0
        self.end(of, () if land is None else land.block_ids[:num_unknown])

    # --- the executor ---------------------------------------------------------------------------

    @rule()
    def launch(self) -> None:
        if len(self.launched) < 2:
            plan = self.scheduler.plan(self.now_s)
            if plan is not None:
                assert 0 < len(plan.slices) <= LIMITS.max_num_seqs
                self.launched.append(plan)

    @precondition(lambda self: self.launched)
    @rule()
    def settle(self) -> None:
        plan = self.launched.popleft()
        self.scheduler.settle(self.now_s, plan, self.executor.run(plan))

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def every_reference_has_its_owner(self) -> None:
        scheduler, owned = self.scheduler, Counter[int]()
        for arrival in scheduler.intake.pending.values():
            owned.update([*arrival.sequence.block_table, *arrival.tails])
        for stream in chain(scheduler._running.values(), scheduler._leaving.values()):
            owned.update(stream.sequence.block_table)
        for copies in [scheduler._copies, *(plan.copies for plan in self.launched)]:
            owned.update(chain.from_iterable(copies))
        counted = {block: self.pool.references(block) for block in range(self.pool.num_blocks)}
        assert {block: count for block, count in counted.items() if count} == owned
        assert len(owned) == self.pool.num_owned

    @invariant()
    def what_is_in_flight_is_owned(self) -> None:
        for plan in self.launched:
            for part in plan.slices:
                assert all(self.pool.references(block) for block in part.block_table)
        for reading in self.readings.values():
            for block in () if reading.land is None else reading.land.block_ids:
                assert self.pool.references(block) == 1, "a block is read into and shared"
                assert not self.pool.cache.holds(block)

    def teardown(self) -> None:
        """Whoever was not cancelled comes to an end, and then nothing is held."""
        for _ in range(400):
            self.connect()
            for index in range(len(self.readings)):
                self.offer(index)
            for of in list(self.readings):
                if self.readings[of].is_draining:
                    self.end(of, ())
                elif self.readings[of].land is not None:
                    self.land(sorted(self.readings).index(of))
            self.now_s += 0.5
            self.launch()
            if self.launched:
                self.settle()
            self.every_reference_has_its_owner()
        self.listen()
        assert all(sequence.is_over for sequence in self.sequences.values())
        assert (self.launched, self.readings) == (deque(), {})
        load = self.scheduler.load()
        assert (load.num_running, load.num_waiting, self.pool.num_owned) == (0, 0, 0)
        assert load.free_blocks + load.quarantined_blocks == load.total_blocks


DecodeMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestDecodeMachine = DecodeMachine.TestCase
