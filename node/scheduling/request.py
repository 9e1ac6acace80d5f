"""One request on a node: what is asked for, its prompt, and a sequence for each choice that runs.

Tokens are *planned* when a step that computes them was launched and *computed* when that step is
settled. Blocks may be given back only when nothing is in flight.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec

from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import NOT_FINITE, Origin, Slice
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.blocks import THIS_NODE, BlockHash, Makers, block_hashes
from baton.protocol.errors import Failure, RequestError
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import (
    Decode,
    FinishReason,
    FirstToken,
    Prefill,
    StageTimes,
    TokenEntry,
    TokenLogprobs,
)
from baton.protocol.pooling import Pooling
from baton.protocol.sampling import Sampling

# Stands for rules that the runner has, because they may be long.
KNOWN_GRAMMAR = " "
# States are kept at multiples of it, and go through so many tokens of a prompt at once on GPUs.
UNIT_TOKENS = 64


def _makers(message: Prefill | Decode, *, has_two_orders: bool) -> Makers:
    """Return what computes the tokens of a message's sequences.

    The last token of a prompt counts as one of the response: it may be computed beside those.
    """
    first_output = message.num_prompt_tokens - 1
    if isinstance(message, Decode) and message.prompt_compute:
        borders = (first_output, len(message.token_ids))
        return Makers(message.prompt_compute, borders)
    return Makers(borders=(first_output,)) if has_two_orders else THIS_NODE


@dataclass(slots=True)
class PrefixRead:
    """A prompt's read of its first tokens' blocks."""

    source: NodeId  # or the name of the slowest tier
    num_held_blocks: int  # that were here, so they are not read
    num_wanted_blocks: int
    began_s: float
    # Read into; empty until they are offered.
    landing: list[int] = field(default_factory=list)
    is_of_tier: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One `Prefill` or `Decode` message, until nobody needs the blocks that it has here."""

    key: Key  # of its lowest choice
    origin: Origin
    sampling: Sampling
    num_prompt_tokens: int
    every: tuple[int, ...]  # its choices
    live: set[int]  # those that are wanted and have not ended
    peer: NodeId | None  # at the other end of its handoff, if there is one
    is_computed_here: bool  # and not received
    arrived_s: float
    prefix_node: NodeId | None = None  # probably has blocks of its first tokens
    max_uncached_tokens: int | None = None  # None means no limit
    makers: Makers = THIS_NODE
    queued_s: float = 0.0
    admitted_s: float = 0.0  # when it got its blocks
    read: PrefixRead | None = None  # until it has ended
    num_cached_tokens: int = 0
    num_read_tokens: int = 0
    prefix_read_s: float = 0.0
    pooled: bytes = b""  # of the rows that are computed, as `pooling` makes it
    num_announced_blocks: int = 0
    has_handoff: bool = False  # at the connector, which has not ended it
    is_ended: bool = False  # its blocks follow when no step, read or peer needs them
    # Blocks for the copies of a partial last block and of the state that further choices get.
    tails: list[int] = field(default_factory=list)
    prompt: "Sequence" = field(init=False)
    # Those that run, by choice.
    sequences: "dict[int, Sequence]" = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        message: Prefill | Decode,
        origin: Origin,
        now_s: float,
        *,
        has_two_orders: bool = False,
    ) -> "Request":
        first = message.key.choice
        every = tuple(range(first, first + message.num_choices))
        request = cls(
            message.key,
            origin,
            message.sampling,
            message.num_prompt_tokens,
            every,
            set(every),
            peer=None,
            is_computed_here=True,
            arrived_s=now_s,
        )
        match message:
            case Prefill():
                request.peer = message.decode_node
                request.prefix_node = message.prefix_node
            case Decode():
                request.peer = message.prefill_node
                request.is_computed_here = message.prefill_node is None
                request.max_uncached_tokens = message.max_uncached_tokens
        request.makers = _makers(message, has_two_orders=has_two_orders)
        request.prompt = Sequence(request, message.key, message.token_ids)
        return request

    @property
    def is_ready(self) -> bool:
        """Return whether the next step may compute some of the prompt."""
        return self.read is None and self.prompt.num_unplanned_tokens > 0

    @property
    def is_pooled(self) -> bool:
        """Return whether all rows that are wanted instead of tokens are there."""
        is_computed = self.prompt.num_computed_tokens == self.prompt.num_tokens
        return self.sampling.pooling is not None and is_computed

    @property
    def is_idle(self) -> bool:
        """Return whether no step, read or peer needs the blocks of the prompt."""
        return self.prompt.is_idle and self.read is None and not self.has_handoff

    def uses(self, message: Prefill | Decode) -> bool:
        """Return whether a sequence of this request has a key that the message is to have."""
        if not self._is_same_attempt(message.key):
            return False
        first = message.key.choice
        wanted = range(first, first + message.num_choices)
        return any(choice in wanted for choice in self.sequences or self.every)

    def cancel(self, keys: Iterable[Key]) -> set[int]:
        """Remove the choices that `keys` name, and return those that were live."""
        return self._remove({key.choice for key in keys if self._is_same_attempt(key)})

    def supersede(self, newer: "Request") -> set[int]:
        """Remove the choices that have a higher attempt, and return those that were live."""
        is_newer = newer.key.request_id == self.key.request_id
        if not is_newer or newer.key.attempt <= self.key.attempt:
            return set()
        return self._remove(set(newer.every))

    def times(self, now_s: float) -> StageTimes:
        """Return how long the stages of a prompt took that is computed now."""
        return StageTimes(
            queue_s=self.admitted_s - self.arrived_s,
            prefill_s=now_s - self.admitted_s - self.prefix_read_s,
            num_cached_tokens=self.num_cached_tokens,
            num_read_tokens=self.num_read_tokens,
            prefix_read_s=self.prefix_read_s,
        )

    def _is_same_attempt(self, key: Key) -> bool:
        return key.request_id == self.key.request_id and key.attempt == self.key.attempt

    def _remove(self, choices: set[int]) -> set[int]:
        gone = self.live & choices
        self.live -= gone
        return gone


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens and blocks of a prompt, or of one choice, and how much of it is computed."""

    request: Request
    key: Key
    token_ids: list[int]  # prompt and output
    block_table: list[int] = field(default_factory=list)
    # The blocks of its state, if the model has any.
    state: list[int] = field(default_factory=list)
    # Of the state that it begins with.
    checkpoint_blocks: list[int] = field(default_factory=list)
    # After so many tokens, the cache should keep its state.
    checkpoints: tuple[int, ...] = ()
    # Of the full blocks hashed so far: those of the tokens alone, and those of their makers, too.
    chain: list[BlockHash] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0
    num_state_tokens: int = 0  # that the state has after the steps that are launched
    num_unsettled: int = 0  # launched steps that name this sequence
    sampled_in: int = -1  # the last plan with a sample of it
    has_sampled: bool = False  # on this node
    num_repeated: int = 0  # tokens before the next slice that it computes again
    # Of a choice that runs:
    limit: int = 0  # no token stands at this position or beyond
    num_sent_tokens: int = 0
    joined_s: float = 0.0
    times: StageTimes | None = None  # until they are sent with the first entry
    # Of the tokens that are not yet sent.
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    is_ended: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_unplanned_tokens(self) -> int:
        return len(self.token_ids) - self.num_planned_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Return how many of its first tokens need not be computed where blocks hold them.

        The last token always is, for its logits, and so is every token of a prompt whose rows are
        all needed.
        """
        return 0 if self.request.sampling.needs_all_rows else self.num_tokens - 1

    @property
    def blocks(self) -> list[int]:
        """Return its own blocks: those of its tokens, then those of its state."""
        return [*self.block_table, *self.state]

    @property
    def is_idle(self) -> bool:
        return self.num_unsettled == 0

    @property
    def may_repeat(self) -> bool:
        """Return whether the step that is launched may have to sample again."""
        is_first = self.num_unsettled > 0 and not self.has_sampled
        return is_first and bool(self.request.sampling.grammar)

    @property
    def wants_step(self) -> bool:
        """Return whether a choice that runs may take the next step."""
        if self.is_ended or self.may_repeat:
            return False
        return self.num_planned_tokens + 1 < self.limit

    def hash_blocks(self, block_size: int, num_tokens: int) -> list[BlockHash]:
        """Return the hashes of the full blocks among the first `num_tokens`, extending `hashes`."""
        num_blocks = num_tokens // block_size
        if num_blocks > len(self.hashes):
            known = self.token_ids[:num_tokens]
            root = self.request.sampling.cache_root
            self.chain = block_hashes(known, block_size, self.chain, root)
            first = len(self.hashes)
            self.hashes += self.request.makers.hashes(
                self.chain[first:], first, block_size
            )
        return self.hashes[:num_blocks]

    def start_at(self, position: int, *, repeats_last: bool = False) -> None:
        """Count the tokens before `position` as computed, because blocks hold them already.

        With `repeats_last`, the last of them is computed again, for its hidden state.
        """
        self.num_repeated = 1 if repeats_last and position else 0
        self.num_computed_tokens = self.num_planned_tokens = self.num_state_tokens = (
            position
        )

    def slice(
        self,
        length: int,
        samples: tuple[int, ...],
        step_id: int,
        guesses: tuple[int, ...] = (),
        num_drafts: int | None = None,
    ) -> Slice:
        """Return the next `length` tokens as a slice, which counts as launched until it settles.

        `guesses` of the tokens after them are computed too, and `num_drafts` tokens drafted.
        """
        num_repeated = self.num_repeated
        self.num_repeated = 0
        start = self.num_planned_tokens - num_repeated
        end = self.num_planned_tokens + length
        self.num_planned_tokens = end + len(guesses)
        num_held = self._advance_state(start, end)
        self.num_unsettled += 1
        sampling = self.request.sampling
        past = None
        num_top = sampling.prompt_logprobs
        targets: tuple[int, ...] = ()
        if num_top is not None:
            targets = tuple(
                self.token_ids[start + 1 : min(end + 1, self.request.num_prompt_tokens)]
            )
        if samples and sampling.depends_on_output:
            if self.sampled_in == step_id - 1:
                sampling = msgspec.structs.replace(
                    sampling,
                    grammar=KNOWN_GRAMMAR,
                    allowed_token_ids=(),
                    bad_words=(),
                    penalties=None,
                )
            else:
                first = 0 if sampling.needs_prompt else self.request.num_prompt_tokens
                past = tuple(self.token_ids[first:start])
            self.sampled_in = step_id
        return Slice(
            key=self.key,
            start=start,
            length=end - start + len(guesses),
            token_ids=(*self.token_ids[start:end], *guesses),
            block_table=tuple(self.block_table),
            samples=samples,
            sampling=sampling if samples or sampling.grammar else None,
            num_prompt_tokens=self.request.num_prompt_tokens,
            past=past,
            targets=targets,
            num_top=num_top or 0,
            num_guesses=len(guesses),
            lora=self.request.sampling.lora,
            pooling=self._pooling_of(start, end),
            state=tuple(self.state),
            num_held=num_held,
            num_repeated=num_repeated,
            following=self.token_ids[end]
            if not guesses and end < self.num_tokens
            else None,
            num_drafts=num_drafts,
        )

    def _pooling_of(self, start: int, end: int) -> Pooling | None:
        """Return what is wanted of the rows of these tokens."""
        pooling = self.request.sampling.pooling
        is_wanted = start == 0 if pooling == "cls" else end == self.num_tokens
        return pooling if is_wanted or pooling == "mean" else None

    def _advance_state(self, start: int, end: int) -> int:
        """Return how many tokens of a slice the state has, and let it have those before `end`.

        It has some if a sample was refused or the last token is computed again.
        """
        if not self.state:
            return 0
        num_held = self.num_state_tokens - start
        self.num_state_tokens = end
        return num_held

    def cuts_unit(self, budget: int) -> bool:
        """Return whether the next chunk of so few tokens would cut a unit of its state."""
        end = self.num_planned_tokens + budget - self.num_repeated
        return (
            bool(self.state)
            and end < self.num_tokens
            and end // UNIT_TOKENS <= self.num_planned_tokens // UNIT_TOKENS
        )

    def chunk(self, budget: int, samples: tuple[int, ...], step_id: int) -> Slice:
        """Return at most `budget` next tokens as a slice. The last chunk samples or pools.

        A chunk does not go beyond a checkpoint. Where there is a state, it ends at a multiple of
        `UNIT_TOKENS` if that leaves anything of it.
        """
        start = self.num_planned_tokens
        end = next((one for one in self.checkpoints if one > start), self.num_tokens)
        length = max(1, min(budget - self.num_repeated, end - start))
        if self.state and start + length < end:
            last_cut = (start + length) // UNIT_TOKENS * UNIT_TOKENS
            if last_cut > start:
                length = last_cut - start
        is_last = (
            length == self.num_unplanned_tokens
            and self.request.sampling.pooling is None
        )
        return self.slice(length, samples if is_last else (), step_id)

    def settle(self, done: Slice, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Count a slice as computed, and return those of the sampled tokens that it keeps."""
        tokens = done.kept(sampled)
        self.num_unsettled -= 1
        self.num_computed_tokens = done.start + done.length
        if done.num_guesses:  # what was computed for wrong ones is computed again
            num_wrong = 1 + done.num_guesses - len(tokens)
            self.num_computed_tokens -= num_wrong
            self.num_planned_tokens = self.num_computed_tokens
            if self.state:  # it has no guesses, and goes through the right ones again
                self.num_repeated = self.num_computed_tokens - self.num_state_tokens
        self.has_sampled = bool(tokens)
        # Its last token is computed again for its logits.
        if done.samples and not tokens:
            last = self.num_computed_tokens - 1
            self.num_computed_tokens = self.num_planned_tokens = min(
                last, self.num_planned_tokens
            )
            self.sampled_in = -1
        return tokens

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """Drop blocks that are quarantined."""
        gone = set(blocks)
        self.block_table = [block for block in self.block_table if block not in gone]
        self.state = [block for block in self.state if block not in gone]

    def store_prefix(self, pool: BlockPool) -> None:
        """Offer every whole block that is computed to the prefix cache.

        A step that was launched before a cancel computes one token more than `token_ids` has.
        """
        hashes = self.hash_blocks(
            pool.block_size, min(self.num_computed_tokens, len(self.token_ids))
        )
        pool.store(hashes, self.block_table[: len(hashes)])

    def entry(self, finish_reason: FinishReason | None) -> TokenEntry:
        """Return the tokens that are not yet sent, and count them as sent."""
        entry = TokenEntry(
            self.key,
            self.num_sent_tokens,
            self.token_ids[self.num_sent_tokens :],
            finish_reason,
            self.times,
            self.logprobs,
            self.num_draft_tokens,
            self.num_accepted_tokens,
        )
        self.num_sent_tokens = len(self.token_ids)
        self.times = None
        self.logprobs = ()
        self.num_draft_tokens = self.num_accepted_tokens = 0
        return entry

    def first_tokens(
        self,
        token_ids: Iterable[int],
        limits: NodeLimits,
        logprobs: Iterable[TokenLogprobs],
    ) -> tuple[FirstToken, ...]:
        """Return each choice's first token, with a finish reason if it ends the sequence."""
        return tuple(
            FirstToken(token_id, self.finish_reason(token_id, limits), scores)
            for token_id, scores in zip_longest(token_ids, logprobs)
        )

    def finish_reason(self, token_id: int, limits: NodeLimits) -> FinishReason | None:
        """Return why `token_id`, which is not appended yet, ends this sequence, or None."""
        num_tokens = self.num_tokens + 1
        num_output_tokens = num_tokens - self.request.num_prompt_tokens
        if num_output_tokens > self.request.sampling.min_tokens:
            if token_id in self.request.sampling.stop_token_ids:
                return "stop"
            if (
                not self.request.sampling.ignore_eos
                and token_id in limits.eos_token_ids
            ):
                return "stop"
        if (
            num_output_tokens >= self.request.sampling.max_tokens
            or num_tokens >= limits.max_model_len
        ):
            return "length"
        if num_output_tokens >= self.request.sampling.min_tokens and self._repeats(
            token_id
        ):
            return "repetition"
        return None

    def _repeats(self, token_id: int) -> bool:
        """Return whether the output ends with a repetition once it has `token_id`."""
        wanted = self.request.sampling.repetition_detection
        if wanted is None or not wanted.max_pattern_size:
            return False
        known = self.token_ids
        end = len(known)
        num_output_tokens = end + 1 - self.request.num_prompt_tokens
        largest = min(wanted.max_pattern_size, num_output_tokens // wanted.min_count)
        stop = end + 1 - max(wanted.min_pattern_size, 1)
        position = end - largest
        while position < stop:
            try:  # a pattern ends with the same token
                position = known.index(token_id, position, stop)
            except ValueError:
                return False
            size = end - position
            start = end + 1 - size * wanted.min_count
            # All tokens but the first pattern equal those that are one pattern before them.
            if known[start + size : end] == known[start : end - size]:
                return True
            position += 1
        return False


def no_token(reason: str) -> Failure:
    """Return how a request ends that gets no next token.

    No rule of its form allows one, or the model computed no numbers to choose it by.
    """
    if reason == NOT_FINITE:
        text = "the model computed NaN or infinity"
        return Failure("not_finite", text, http_status=500)
    text = f"the output cannot go on in the form that was asked for: {reason}"
    error = RequestError(
        text, code="no_token_allowed", param="structured_outputs", http_status=422
    )
    return error.to_failure()
