"""One generating sequence, its guesses, and the fork of one prompt into several sequences.

Only the decode scheduler holds streams. All choices share the prompt's whole blocks. Its partial
last block and its state are copied for each choice but the first, because a shared block is never
written.
"""

from array import array
from dataclasses import dataclass
from typing import Protocol

from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.requests import Origin
from baton.node.scheduling.scheduler import NodeLimits
from baton.node.scheduling.sequence import Sequence
from baton.protocol.ids import Key
from baton.protocol.messages import (
    FinishReason,
    StageTimes,
    TokenEntry,
    TokenLogprobs,
)

TOKEN_BYTES = 4
MAX_PAUSE = 32  # tokens without a guess, after guesses that did not pay
FORGETTING = 0.9  # of what is known of earlier drafts, with each step that has some
PRIOR_DRAFTS = 1.5, 2.0  # as if so many had been right of so many


class Guesser(Protocol):
    """Guesses the next tokens of one sequence: speculative decoding.

    A step that computes the guesses samples after each of them, and keeps what was guessed right,
    so the tokens are those of a node that does not guess.
    """

    def guesses(self, token_ids: list[int]) -> tuple[int, ...]:
        """Return what may follow these tokens, which begin with those of the last call."""
        ...

    def num_drafts(self, num_tokens: int) -> int:
        """Return how many tokens a step should draft that makes a sequence of `num_tokens`."""
        ...

    def take(self, drafts: tuple[int, ...]) -> None:
        """Take what a head has drafted to follow the last token."""
        ...

    def learn(self, num_guesses: int, num_right: int, num_tokens: int) -> None:
        """Note how many guesses were right. The sequence has `num_tokens` tokens now."""
        ...


class Pause:
    """How long to guess nothing after wrong guesses: twice as long each time."""

    def __init__(self) -> None:
        self._until = 0  # this many tokens
        self._length = 0

    def learn(self, num_paying: int, num_tokens: int) -> None:
        """Note how many guesses have paid, or would pay, where the sequence has `num_tokens`."""
        self._length = 0 if num_paying else min(2 * self._length + 1, MAX_PAUSE)
        self._until = num_tokens + self._length

    def is_over(self, num_tokens: int) -> bool:
        return num_tokens >= self._until


class HeadDrafts:
    """Guesses what a head has drafted in the step before.

    It asks for as many drafts as should give the most tokens for the time that they take, by how
    many were right lately, and for none for a while where none pays.
    """

    def __init__(self, limits: NodeLimits) -> None:
        self._most = limits.num_speculative_tokens
        self._pause = Pause()
        self._cost = limits.draft_cost
        self._right, self._tried = PRIOR_DRAFTS
        self._drafts: tuple[int, ...] = ()  # what may follow the tokens that are known now

    def guesses(self, token_ids: list[int]) -> tuple[int, ...]:
        return self._drafts if self._pause.is_over(len(token_ids)) else ()

    def num_drafts(self, num_tokens: int) -> int:
        if not self._pause.is_over(num_tokens):
            return 0
        return max(1, self._best())  # after a pause, one finds out whether drafts pay again

    def take(self, drafts: tuple[int, ...]) -> None:
        self._drafts = drafts

    def learn(self, num_guesses: int, num_right: int, num_tokens: int) -> None:
        was_wrong = num_right < num_guesses  # those after the first wrong one say nothing
        self._right = FORGETTING * self._right + num_right
        self._tried = FORGETTING * self._tried + num_right + was_wrong
        self._pause.learn(self._best(), num_tokens)

    def _best(self) -> int:
        """Return how many drafts give the most tokens for the time of a step without any."""
        share = self._right / self._tried
        gains = [
            sum(share**right for right in range(count + 1)) / (1 + self._cost * count)
            for count in range(self._most + 1)
        ]
        return gains.index(max(gains))


class PromptLookup:
    """Guesses what followed the last tokens when they stood in the prompt or the output before.

    After wrong guesses it pauses, so that text which repeats nothing costs next to nothing.
    """

    def __init__(self, limits: NodeLimits) -> None:
        self._num_guesses = limits.num_speculative_tokens
        self._sizes = range(limits.prompt_lookup_max, limits.prompt_lookup_min - 1, -1)
        self._text = bytearray()  # of all tokens, each in `TOKEN_BYTES`
        self._guesses: tuple[int, ...] = ()
        self._pause = Pause()

    def guesses(self, token_ids: list[int]) -> tuple[int, ...]:
        num_known = len(self._text) // TOKEN_BYTES
        if num_known < len(token_ids):
            self._text += array("I", token_ids[num_known:]).tobytes()
            self._guesses = self._found() if self._pause.is_over(len(token_ids)) else ()
        return self._guesses

    def num_drafts(self, num_tokens: int) -> int:
        return 0

    def take(self, drafts: tuple[int, ...]) -> None:
        pass  # its model has no head

    def learn(self, num_guesses: int, num_right: int, num_tokens: int) -> None:
        self._pause.learn(num_right, num_tokens)

    def _found(self) -> tuple[int, ...]:
        """Return what followed the longest run of last tokens where it stood last."""
        text = self._text
        for size in self._sizes:
            run = text[-size * TOKEN_BYTES :]
            end = len(text) - TOKEN_BYTES  # something must follow
            while (at := text.rfind(run, 0, end)) % TOKEN_BYTES and at >= 0:
                end = at + len(run) - 1  # it began inside of a token
            if at >= 0:
                start = at + len(run)
                follows = array("I", bytes(text[start : start + TOKEN_BYTES * self._num_guesses]))
                # A text that repeats itself up to its end goes on so.
                return tuple(follows[i % len(follows)] for i in range(self._num_guesses))
        return ()


@dataclass(slots=True, eq=False)
class Stream:
    sequence: Sequence
    asked_by: Key  # the message that asked for it, which all of its choices share
    origin: Origin
    next_position: int  # position of the first token that is not yet sent
    limit: int  # no token stands at this position or beyond
    joined_s: float
    times: StageTimes | None  # until they are sent with the first entry
    is_ended: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens that are not yet sent
    guesser: Guesser | None = None
    awaits_drafts: bool = False  # of the step that is launched

    @property
    def keys(self) -> list[Key]:
        return [self.sequence.key]

    @property
    def wants_step(self) -> bool:
        sequence = self.sequence
        if self.is_ended or sequence.may_repeat:
            return False
        return sequence.num_planned_tokens + 1 < self.limit

    def guesses(self) -> tuple[int, ...]:
        """Return what may follow the tokens so far, as far as the sequence may go."""
        if self.guesser is None:
            return ()
        num_tokens = self.sequence.num_tokens
        return self.guesser.guesses(self.sequence.token_ids)[: max(0, self.limit - num_tokens - 1)]

    def take_drafts(self, drafts: tuple[int, ...]) -> None:
        """Take what a settled step has drafted to follow the last token that it sampled."""
        self.awaits_drafts = False
        if self.guesser is not None:
            self.guesser.take(drafts)

    def entry(self, finish_reason: FinishReason | None) -> TokenEntry:
        """Return the tokens that are not yet sent, and count them as sent."""
        tokens = self.sequence.token_ids
        entry = TokenEntry(
            self.sequence.key,
            self.next_position,
            tokens[self.next_position :],
            finish_reason,
            self.times,
            self.logprobs,
        )
        self.next_position = len(tokens)
        self.times = None
        self.logprobs = ()
        return entry


def fork_prompt(
    pool: BlockPool,
    prompt: Sequence,
    tails: list[int],
    first_tokens: dict[int, int],
    *,
    repeats_last: bool = False,
) -> tuple[list[Sequence], list[tuple[int, int]]]:
    """Split a computed prompt into its choices. The references of prompt and tails are consumed.

    `first_tokens` maps each choice that goes on to its first token; `tails` are blocks, perhaps
    more than needed, that are reserved for copies of a partial last block and of the state. Return
    the sequences, and the copies to make before their first step, whose source and target each
    have one more reference until the copy is settled. With `repeats_last`, their first step
    computes the last token of the prompt again, for its hidden state.
    """
    num_whole = prompt.num_tokens // pool.block_size
    whole = prompt.block_table[:num_whole]
    tail = prompt.block_table[num_whole:]
    written = [*tail, *prompt.state]
    sequences: list[Sequence] = []
    copies: list[tuple[int, int]] = []
    for index, (choice, token_id) in enumerate(first_tokens.items()):
        pool.retain(whole)
        own = written
        if index > 0:
            own = [tails.pop() for _ in written]
            copies.extend(zip(written, own, strict=True))
            pool.retain(own)
        pool.retain(written)
        sequences.append(
            Sequence(
                prompt.key.of_choice(choice),
                [*prompt.token_ids, token_id],
                prompt.num_prompt_tokens,
                prompt.sampling,
                block_table=[*whole, *own[: len(tail)]],
                state=own[len(tail) :],
                hashes=list(prompt.hashes),
                num_computed_tokens=prompt.num_tokens,
                num_planned_tokens=prompt.num_tokens,
                num_state_tokens=prompt.num_tokens,
                num_repeated=1 if repeats_last else 0,
            )
        )
    pool.release(prompt.blocks)
    pool.release(tails)
    return sequences, copies
