"""The decode scheduler under any order of events: reads write until the connector says so."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from baton.decode_node.scheduler import DecodeScheduler
from baton.engine.scheduling.scheduler import NodeLimits
from baton.kv_transfer.interfaces import Abandon, BeginReceive, Expect, KVReceived, ReceiveEnded
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import (
    Accepted,
    Attach,
    Attached,
    Decode,
    Failed,
    FirstToken,
    NotAttached,
    Offered,
    ResumeState,
    Tokens,
)
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

KEPT = ResumeState(b"form", b"owner", 3)


@dataclass
class Reading:
    """A landing as the connector has it: `land` is set once the scheduler gave blocks."""

    message: Decode
    is_offered: bool = False
    is_draining: bool = False
    land: BeginReceive | None = None


class DecodeMachine(SchedulerMachine):
    """Reads write into landing blocks until the test reports their end, so a block that is given
    away too early shows as wrong "KV" in a step."""

    kind = DecodeScheduler
    refuses_older_routers = True
    limits = NodeLimits(8, 4, 40, EOS, VOCAB, detached_s=4.0)

    @initialize(num_blocks=st.integers(10, 24))
    def start(self, num_blocks: int) -> None:
        self.begin(num_blocks)
        self.readings: dict[Key, Reading] = {}

    @rule(origin=st.integers(0, ORIGINS - 1), name=st.sampled_from("abcdef"), ask=asks(30, 14))
    def request(self, origin: int, name: str, ask: Ask) -> None:
        # Some are streams that another router may take up.
        make = partial(Decode, kept=KEPT) if ask.max_tokens % 2 else Decode
        message = self.add(origin, name, ask, make)
        if ask.eagerness > 2:
            self.connect()
            if message.key in self.readings:
                self.offer(sorted(self.readings).index(message.key))
            self.launch()
            self.connect()

    @rule(origin=st.integers(0, ORIGINS - 1), name=st.sampled_from("abcdef"))
    def attach(self, origin: int, name: str) -> None:
        """A router that asks for a request gets it, and the one that has it is told."""
        self.listen()
        self.scheduler.attach(self.now_s, origin, Attach(RequestId(name), KEPT.owner))
        self.listen()

    def hear_attached(self, origin: int, message: Attached) -> None:
        for held in message.choices:
            asked = self.asked[held.key]
            expected = self.answer(asked.message, asked.choice)
            num_before = len(asked.message.token_ids) - asked.message.num_prompt_tokens
            output = held.token_ids[num_before:]
            assert output == expected[: len(output)]
            assert len(output) >= len(asked.output), "it knows all that a client may have"
            assert (held.finish_reason is not None) == (output == expected)
            is_own = asked.origin == origin
            assert asked.is_over or is_own, "the router that has it is told"
            asked.is_over = True
            if held.is_running:
                asked.origin, asked.output, asked.is_over = origin, output, False
                asked.is_adopted = True
        name = message.request_id
        assert message.first_attempt > self.first_here.get(name, 0)
        assert all(message.first_attempt > held.key.attempt for held in message.choices)
        self.first_here[name] = message.first_attempt
        self.take_over_elsewhere(origin, name)  # it asks all nodes, and heeds the highest answer

    @rule(origin=st.integers(0, ORIGINS - 1), picks=st.lists(st.integers(0, 40), max_size=3))
    def cancel_what_another_router_has(self, origin: int, picks: list[int]) -> None:
        """A router that was away cancels what it had: nothing changes."""
        known = [of for of, asked in self.asked.items() if asked.origin != origin]
        self.scheduler.cancel(origin, tuple(known[i] for i in picks if i < len(known)))

    def hear(self, origin: int, message: object) -> None:
        match message:
            case Attached():
                self.hear_attached(origin, message)
            case NotAttached():
                pass
            case Tokens(entries=entries):
                for entry in entries:
                    self.take(entry.key, entry.position, entry.token_ids, entry.finish_reason)
            case Failed(key=of):
                # A sequence that runs, or a whole request that does not run yet.
                one = self.asked[of]
                alone = of != one.message.key or one.output or one.is_adopted
                ended = [
                    one for one in ([one] if alone else self.choices_of(of)) if not one.is_over
                ]
                assert ended, f"{of} fails after its end"
                for one in ended:
                    one.is_over = True
            case _:
                assert isinstance(message, Accepted)

    def take(self, of: Key, position: int, tokens: list[int], reason: str | None) -> None:
        asked = self.asked[of]
        assert not asked.is_over, f"{of} speaks after its end"
        assert position == len(asked.message.token_ids) + len(asked.output)
        asked.output += tokens
        expected = self.answer(asked.message, asked.choice)
        assert asked.output == expected[: len(asked.output)]
        assert (reason is not None) == (len(asked.output) == len(expected))
        asked.is_over = reason is not None

    def answer(self, message: Decode, choice: int) -> list[int]:
        """The tokens that this choice must get, the one that ends it included."""
        tokens = list(message.token_ids)
        while True:
            tokens.append(next_token(tokens, choice))
            num_output = len(tokens) - message.num_prompt_tokens
            is_full = len(tokens) >= self.limits.max_model_len
            if num_output >= message.sampling.max_tokens or is_full or tokens[-1] in EOS:
                return tokens[len(message.token_ids) :]

    def hear_connector(self, event: object) -> None:
        if isinstance(event, Expect):
            assert event.key not in self.readings
            self.readings[event.key] = Reading(self.asked[event.key].message)
        elif isinstance(event, BeginReceive) and event.key in self.readings:
            reading = self.readings[event.key]
            assert reading.is_offered
            assert reading.land is None
            reading.land = event
        elif isinstance(event, Abandon) and event.key in self.readings:
            if self.readings[event.key].land is None:
                self.end(event.key, ())
            else:
                self.readings[event.key].is_draining = True

    def end(self, of: Key, quarantined: tuple[int, ...]) -> None:
        del self.readings[of]
        self.scheduler.on_report(self.now_s, ReceiveEnded(of, LOST, quarantined))

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
            self.write(reading.message, reading.land, len(reading.land.block_ids) // part)

    def write(self, message: Decode, land: BeginReceive, num_blocks: int) -> None:
        tokens, start = message.token_ids, land.first_block * BLOCK_SIZE
        for position in range(start, min(start + num_blocks * BLOCK_SIZE, len(tokens))):
            block = land.block_ids[(position - start) // BLOCK_SIZE]
            self.executor.slots[block][position % BLOCK_SIZE] = tuple(tokens[: position + 1])

    @precondition(lambda self: self.readings)
    @rule(index=st.integers(0, 9))
    def land(self, index: int) -> None:
        of = self.pick(index)
        reading = self.readings[of]
        if reading.land is None or reading.is_draining:
            return
        del self.readings[of]
        self.write(reading.message, reading.land, len(reading.land.block_ids))
        self.listen()
        firsts = []
        for asked in self.choices_of(of):
            tokens = self.answer(reading.message, asked.choice)
            firsts.append(FirstToken(tokens[0], "stop" if len(tokens) == 1 else None))
            if not asked.is_adopted:
                asked.is_over |= len(tokens) == 1  # prefill has told the router
        self.scheduler.on_report(self.now_s, KVReceived(of, tuple(firsts), 0, 0.0, 0.0))

    @precondition(lambda self: self.readings)
    @rule(index=st.integers(0, 9), num_unknown=st.sampled_from([0, 0, 0, 1]))
    def lose_landing(self, index: int, num_unknown: int) -> None:
        of = self.pick(index)
        land = self.readings[of].land
        if self.pool.num_quarantined > 1:
            num_unknown = 0
        self.end(of, () if land is None else land.block_ids[:num_unknown])

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def owned(self) -> Iterable[int]:
        scheduler = self.scheduler
        for prompt in scheduler.queue.pending.values():
            yield from (*prompt.sequence.block_table, *prompt.tails)
        for stream in chain(scheduler._running.values(), scheduler._leaving.values()):
            yield from stream.sequence.block_table
        for copies in [scheduler._copies, *(plan.copies for plan in self.launched)]:
            yield from chain.from_iterable(copies)

    @invariant()
    def what_is_read_into_has_one_owner(self) -> None:
        for reading in self.readings.values():
            for block in () if reading.land is None else reading.land.block_ids:
                assert self.pool.references(block) == 1, "a block is read into and shared"
                assert not self.pool.cache.holds(block)

    def end_readings(self) -> None:
        for index in range(len(self.readings)):
            self.offer(index)
        for of in list(self.readings):
            if self.readings[of].is_draining:
                self.end(of, ())
            elif self.readings[of].land is not None:
                self.land(sorted(self.readings).index(of))

    def teardown(self) -> None:
        super().teardown()
        assert self.readings == {}


DecodeMachine.TestCase.settings = settings(stateful_step_count=60)
TestDecodeMachine = DecodeMachine.TestCase
