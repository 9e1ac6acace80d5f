"""One sequence on a node: its tokens, its blocks, and how much of it is computed.

Tokens are *planned* when a step that computes them was launched and *computed* when that step is
settled. Blocks may be given back only when nothing is in flight. A prompt reserves all its blocks
before its first chunk, so a prompt that has started never waits for blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec

from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import NOT_FINITE, Slice
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.blocks import BlockHash, block_hashes
from baton.protocol.errors import Failure, RequestError
from baton.protocol.ids import Key
from baton.protocol.messages import Decode, FinishReason, FirstToken, Prefill, TokenLogprobs
from baton.protocol.pooling import Pooling
from baton.protocol.sampling import Sampling

# Stands for rules that the runner has, because they may be long.
KNOWN_GRAMMAR = " "


@dataclass(slots=True)
class Sequence:
    key: Key
    token_ids: list[int]  # prompt and output
    num_prompt_tokens: int
    sampling: Sampling
    block_table: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)  # the blocks of its state, if the model has any
    checkpoint_blocks: list[int] = field(default_factory=list)  # of the state that it begins with
    checkpoints: tuple[int, ...] = ()  # after so many tokens, the cache should keep its state
    hashes: list[BlockHash] = field(default_factory=list)  # of the full blocks hashed so far
    num_computed_tokens: int = 0
    num_planned_tokens: int = 0
    num_state_tokens: int = 0  # that the state has after the steps that are launched
    num_unsettled: int = 0  # launched steps that name this sequence
    sampled_in: int = -1  # the last plan with a sample of it
    has_sampled: bool = False  # on this node
    num_repeated: int = 0  # tokens before the next slice that it computes again

    @classmethod
    def of(cls, message: Prefill | Decode) -> "Sequence":
        """Return the sequence of a prompt of which nothing is computed yet."""
        return cls(message.key, message.token_ids, message.num_prompt_tokens, message.sampling)

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
        return 0 if self.sampling.needs_all_rows else self.num_tokens - 1

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
        return is_first and bool(self.sampling.grammar)

    def hash_blocks(self, block_size: int, num_tokens: int) -> list[BlockHash]:
        """Return the hashes of the full blocks among the first `num_tokens`, extending `hashes`."""
        num_blocks = num_tokens // block_size
        if num_blocks > len(self.hashes):
            known = self.token_ids[:num_tokens]
            root = self.sampling.cache_root
            self.hashes = block_hashes(known, block_size, self.hashes, root)
        return self.hashes[:num_blocks]

    def start_at(self, position: int, *, repeats_last: bool = False) -> None:
        """Count the tokens before `position` as computed, because blocks hold them already.

        With `repeats_last`, the last of them is computed again, for its hidden state.
        """
        self.num_repeated = 1 if repeats_last and position else 0
        self.num_computed_tokens = self.num_planned_tokens = self.num_state_tokens = position

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
        sampling = self.sampling
        past = None
        num_top = sampling.prompt_logprobs
        targets: tuple[int, ...] = ()
        if num_top is not None:
            targets = tuple(self.token_ids[start + 1 : min(end + 1, self.num_prompt_tokens)])
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
                first = 0 if sampling.needs_prompt else self.num_prompt_tokens
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
            num_prompt_tokens=self.num_prompt_tokens,
            past=past,
            targets=targets,
            num_top=num_top or 0,
            num_guesses=len(guesses),
            lora=self.sampling.lora,
            pooling=self._pooling_of(start, end),
            state=tuple(self.state),
            num_held=num_held,
            num_repeated=num_repeated,
            following=self.token_ids[end] if not guesses and end < self.num_tokens else None,
            num_drafts=num_drafts,
        )

    def _pooling_of(self, start: int, end: int) -> Pooling | None:
        """Return what is wanted of the rows of these tokens."""
        pooling = self.sampling.pooling
        is_wanted = start == 0 if pooling == "cls" else end == self.num_tokens
        return pooling if is_wanted or pooling == "mean" else None

    def _advance_state(self, start: int, end: int) -> int:
        """Return how many tokens of a slice the state has, because a sample was refused."""
        if not self.state:
            return 0
        num_held = self.num_state_tokens - start
        self.num_state_tokens = end
        return num_held

    def chunk(self, budget: int, samples: tuple[int, ...], step_id: int) -> Slice:
        """Return at most `budget` next tokens as a slice. The last chunk samples or pools.

        A chunk does not go beyond a checkpoint.
        """
        start = self.num_planned_tokens
        end = next((one for one in self.checkpoints if one > start), self.num_tokens)
        length = max(1, min(budget - self.num_repeated, end - start))
        is_last = length == self.num_unplanned_tokens and self.sampling.pooling is None
        return self.slice(length, samples if is_last else (), step_id)

    def settle(self, done: Slice, tokens: tuple[int, ...]) -> None:
        """Count a slice as computed. `tokens` are those that `done` keeps."""
        self.num_unsettled -= 1
        self.num_computed_tokens = done.start + done.length
        if done.num_guesses:  # what was computed for wrong ones is computed again
            num_wrong = 1 + done.num_guesses - len(tokens)
            self.num_computed_tokens -= num_wrong
            self.num_planned_tokens = self.num_computed_tokens
        self.has_sampled = bool(tokens)
        if done.samples and not tokens:  # its last token is computed again for its logits
            last = self.num_computed_tokens - 1
            self.num_computed_tokens = self.num_planned_tokens = min(last, self.num_planned_tokens)
            self.sampled_in = -1

    def store_prefix(self, pool: BlockPool) -> None:
        """Offer every whole block that is computed to the prefix cache.

        A step that was launched before a cancel computes one token more than `token_ids` has.
        """
        hashes = self.hash_blocks(
            pool.block_size, min(self.num_computed_tokens, len(self.token_ids))
        )
        pool.store(hashes, self.block_table[: len(hashes)])

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
        num_output_tokens = num_tokens - self.num_prompt_tokens
        if num_output_tokens > self.sampling.min_tokens:
            if token_id in self.sampling.stop_token_ids:
                return "stop"
            if not self.sampling.ignore_eos and token_id in limits.eos_token_ids:
                return "stop"
        if num_output_tokens >= self.sampling.max_tokens or num_tokens >= limits.max_model_len:
            return "length"
        return None


def no_token(reason: str) -> Failure:
    """Return how a request ends that gets no next token.

    No rule of its form allows one, or the model computed no numbers to choose it by.
    """
    if reason == NOT_FINITE:
        text = "the model computed NaN or infinity"
        return Failure("not_finite", text, http_status=500)
    text = f"the output cannot go on in the form that was asked for: {reason}"
    error = RequestError(text, code="no_token_allowed", param="structured_outputs", http_status=422)
    return error.to_failure()
