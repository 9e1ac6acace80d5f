"""A model whose KV can be checked, and whose nodes compute different bits.

For each token, a slot of one KV head holds the `Context` up to it, one of the other its digest.
So a wrong block table, a block that was reused too soon, or a copy that is lost or of another rank
fails at once. The next token depends on the context, the seed, the choice and the node: a stream
that mixes the attempts of two nodes has a token that no node would say.
"""

import itertools
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from baton.kv_transfer.interfaces import TransferPort
from baton.node.executor import RANK_KILLED
from baton.node.scheduling.plan import Slice, StepPlan, StepResult
from baton.protocol.errors import NodeError
from baton.protocol.ids import Key
from tests.sim.clock import Process

if TYPE_CHECKING:  # masks load torch, which tests of schedulers do without
    from tests.sim.rules import SimMasks

VOCAB = 1000
MOST_TRIES = 100_000
BLOCK_SIZE = 4
NUM_HEADS = 2  # of whose slots a block holds one after the other
SLOT_BYTES = 8
BLOCK_BYTES = NUM_HEADS * BLOCK_SIZE * SLOT_BYTES
FULL_CHECK_EVERY = 16  # decode steps; the others check the last slots alone
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class Context:
    """A sequence of tokens. Equal sequences are one object."""

    length: int
    token: int  # the last one
    digest: int
    before: "Context | None"
    after: dict[int, "Context"] = field(default_factory=dict)

    def then(self, token: int) -> "Context":
        found = self.after.get(token)
        if found is None:
            digest = ((self.digest ^ (token + 1)) * _MIX + 1) & _MASK
            found = self.after[token] = Context(
                self.length + 1, token, digest ^ digest >> 29, self
            )
        return found

    def extended(self, tokens: list[int]) -> "Context":
        context = self
        for token in tokens:
            context = context.then(token)
        return context


def first_allowed(says: Callable[[int], int], allows: Callable[[int], bool]) -> int:
    """Return the first allowed one of what a model `says` when it is asked again and again."""
    if allows(token := says(0)):
        return token
    tokens = map(says, itertools.count())
    return next(filter(allows, itertools.islice(tokens, MOST_TRIES)))


def next_token(context: Context, seed: int, choice: int, salt: int) -> int:
    """Return what the node with this salt says."""
    digest = ((context.digest ^ (seed * 7 + choice * 3 + salt)) * _MIX) & _MASK
    return (digest >> 17) % VOCAB


def rank_of(context: Context, token: int, salt: int) -> int:
    """Return what the node with this salt says of a prompt's token after `context`."""
    return next_token(context, token, 0, salt)


class WrongStep(Exception):
    """A step would have computed with blocks of another sequence."""


def _anything(_token: int) -> bool:
    return True


class CheckedModel:
    """Computes plans; `says` returns the token of a choice after a context and with a seed.

    With `masks`, it follows the rules of requests. With `has_two_orders`, a token of a response has
    another context than an equal one of a prompt.
    """

    def __init__(
        self,
        num_blocks: int,
        root: Context,
        says: Callable[[Context, int, int], int],
        masks: "SimMasks | None" = None,
        *,
        has_two_orders: bool = False,
    ) -> None:
        self._has_two_orders = has_two_orders
        self.slots: list[list[Context | int | None]] = [
            [None] * (NUM_HEADS * BLOCK_SIZE) for _ in range(num_blocks)
        ]
        self._root = root
        self.says = says
        self._masks = masks
        self.failed: dict[Key, str] = {}  # why nothing may come, in the last step
        self._sampled: dict[tuple[Key, int], int] = {}

    def run(self, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        for source, target in plan.copies:
            self.slots[target] = list(self.slots[source])
        self.failed.clear()
        if self._masks is not None:
            self._masks.begin_step()
        return tuple(self._compute(part) for part in plan.slices)

    def write(self, block: int, offset: int, context: Context) -> None:
        self.slots[block][offset::BLOCK_SIZE] = context, context.digest

    def write_state(self, block: int, context: Context) -> None:
        rest = [None] * (NUM_HEADS * BLOCK_SIZE - 2)
        self.slots[block] = [context, *rest, context.digest]

    def _compute(self, part: Slice) -> tuple[int, ...]:
        context = self._before(part)
        kept = context
        sampled = []
        allows = self._rule_of(part)
        for position in range(part.start, part.start + part.length):
            if part.token_ids:
                token = part.token_ids[position - part.start]
            else:
                token = self._sampled[part.key, position]
            context = self._then(context, token, part)
            self.write(
                part.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE, context
            )
            num_after = part.start + part.length - part.num_guesses - position - 1
            if num_after >= 0:
                kept = context
            if num_after > 0:
                continue
            for choice in part.samples if allows is not None else ():
                assert part.sampling is not None
                says = partial(self.says, context)
                seed = part.sampling.seed
                token = first_allowed(lambda i: says(seed + i, choice), allows)  # noqa: B023
                self._sampled[part.key.of_choice(choice), position + 1] = token
                sampled.append(token)
        for block in part.state:
            self.write_state(block, kept)  # without guesses
        return tuple(sampled)

    def _then(self, context: Context, token: int, part: Slice) -> Context:
        is_output = context.length >= part.num_prompt_tokens - 1
        return context.then(token + VOCAB * (self._has_two_orders and is_output))

    def _rule_of(self, part: Slice) -> Callable[[int], bool] | None:
        """Return what says of a token whether it may come; None if that is not known yet."""
        masks = self._masks
        sampling = part.sampling
        if masks is None or sampling is None:
            return _anything
        if not part.samples or not sampling.depends_on_output:
            masks.prepare(sampling.grammar)
            return _anything
        tokens = part.token_ids or (self._sampled[part.key, part.start],)
        allowed = masks.allowed(part, tokens)
        if callable(allowed):
            return allowed
        if allowed.problem:
            self.failed[part.key] = allowed.problem
        return None

    def _before(self, part: Slice) -> Context:
        """Return the context before a slice, from the slots, which must all be of one sequence."""
        found = self._before_slots(part)
        if part.state and part.start + part.num_held:
            held = found
            if part.num_held:  # its last token is computed again
                assert part.num_held == part.length == 1
                held = self._then(found, part.token_ids[0], part)
            for block in part.state:
                if (
                    self.slots[block][0] is not held
                    or self.slots[block][-1] != held.digest
                ):
                    raise WrongStep(
                        f"{part.key}: the state before {part.start} is another one"
                    )
        return found

    def _before_slots(self, part: Slice) -> Context:
        if not part.start:
            return self._root
        found = self.slot(part, part.start - 1)
        if found is None or found.length != part.start:
            raise WrongStep(
                f"{part.key}: the slot before {part.start} is of another sequence"
            )
        is_whole = part.length > 1 or part.start % FULL_CHECK_EVERY == 0
        context = found
        position = part.start - 1
        while context.before is not None and context.length > 1:
            if not is_whole and found.length - context.length >= BLOCK_SIZE:
                break
            context = context.before
            position = position - 1
            if self.slot(part, position) is not context:
                raise WrongStep(
                    f"{part.key}: position {position} is of another sequence"
                )
        return found

    def slot(self, part: Slice, position: int) -> Context | None:
        block = self.slots[part.block_table[position // BLOCK_SIZE]]
        context, digest = block[position % BLOCK_SIZE :: BLOCK_SIZE]
        is_whole = isinstance(context, Context) and context.digest == digest
        return context if is_whole else None  # type: ignore[return-value]


class SimExecutor:
    """Computes on a process's time: `step_s` returns the seconds of a step."""

    def __init__(
        self,
        process: Process,
        num_blocks: int,
        salt: int,
        root: Context,
        step_s: Callable[[], float],
        masks: "SimMasks",
    ) -> None:
        self.model = CheckedModel(
            num_blocks, root, partial(next_token, salt=salt), masks
        )
        self.ports: tuple[TransferPort, ...] = ()
        self.generations = [0] * num_blocks
        self._process = process
        self._salt = salt
        self._step_s = step_s
        self.wake: Callable[[], None] = lambda: None
        # The next `poll` raises it.
        self.error: WrongStep | LookupError | NodeError | None = None
        self._is_broken = False  # a rank has died, so no step ends
        self._queue: deque[StepPlan] = deque()
        self._done: deque[StepResult] = deque()

    def fileno(self) -> int:
        return -1

    def submit(self, plan: StepPlan) -> None:
        self._queue.append(plan)
        if len(self._queue) == 1:
            self._begin()

    def poll(self) -> StepResult | None:
        if self.error is not None:
            raise self.error
        return self._done.popleft() if self._done else None

    def _begin(self) -> None:
        for block, generation in self._queue[0].generations:
            self.generations[block] = generation
        self._process.loop.call_later(self._step_s(), self._end)

    def break_rank(self, rank: int) -> None:
        """Let a rank die, which `poll` may notice from `notice_death` on."""
        self._is_broken = True
        self._rank = rank

    def notice_death(self) -> None:
        self.error = NodeError(f"rank {self._rank} was killed", code=RANK_KILLED)
        self.wake()

    def _end(self) -> None:
        if self._is_broken:
            return
        plan = self._queue.popleft()
        try:
            tokens = self.model.run(plan)
        except (WrongStep, LookupError) as error:
            self.error = error
            self.wake()
            return
        now_s = self._process.clock()
        scores = tuple(
            (i, self._scores(part))
            for i, part in enumerate(plan.slices)
            if part.targets
        )
        why = self.model.failed
        failed = tuple(
            (i, why[part.key]) for i, part in enumerate(plan.slices) if part.key in why
        )
        result = StepResult(
            plan.step_id, tokens, now_s - 0.01, now_s, failed, prompt_logprobs=scores
        )
        self._done.append(result)
        if self._queue:
            self._begin()
        self.wake()

    def _scores(self, part: Slice) -> bytes:
        contexts = (
            self.model.slot(part, part.start + row) for row in range(len(part.targets))
        )
        pairs = zip(contexts, part.targets, strict=True)
        ranks = (
            rank_of(context, token, self._salt) for context, token in pairs if context
        )
        return b"".join(struct.pack("<if", rank, 0.0) for rank in ranks)
