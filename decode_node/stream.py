"""One generating sequence, and the fork of one prompt into several sequences.

Only the decode scheduler holds streams. All choices share the prompt's whole blocks; its partial
last block is copied for each choice but the first, because a shared block is never written.
"""

from dataclasses import dataclass

from baton.decode_node.speculation import PromptLookup
from baton.engine.scheduling.block_pool import BlockPool
from baton.engine.scheduling.outputs import NO_ROUTER, Origin
from baton.engine.scheduling.sequence import Sequence
from baton.protocol.ids import Key
from baton.protocol.messages import (
    FinishReason,
    HeldChoice,
    ResumeState,
    StageTimes,
    TokenEntry,
    TokenLogprobs,
)


@dataclass(slots=True, eq=False)
class Stream:
    sequence: Sequence
    asked_by: Key  # the message that asked for it, which all of its choices share
    origin: Origin
    next_position: int  # position of the first token that is not yet sent
    limit: int  # no token stands at this position or beyond
    joined_s: float
    times: StageTimes | None  # until they are sent with the first entry
    kept: ResumeState | None = None  # for another router, if this one is lost
    left_by: Origin = NO_ROUTER  # the lost router, while no other router has the stream
    is_ended: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens that are not yet sent
    lookup: PromptLookup | None = None

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
        if self.lookup is None:
            return ()
        num_tokens = self.sequence.num_tokens
        return self.lookup.guesses(self.sequence.token_ids)[: max(0, self.limit - num_tokens - 1)]

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
        self.times, self.logprobs = None, ()
        return entry

    def detach(self) -> None:
        """Continue without a router."""
        self.origin, self.left_by = NO_ROUTER, self.origin

    def attach(self, origin: Origin) -> HeldChoice:
        """Send all further tokens to another router. Return the tokens so far."""
        sequence, self.origin, self.left_by = self.sequence, origin, NO_ROUTER
        self.next_position = sequence.num_tokens
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        return HeldChoice(sequence.key, output, is_running=True)


@dataclass(slots=True)
class Fork:
    """One sequence per live choice, and the copies to make before their first step.

    Source and target of each copy have one more reference until the copy is settled.
    """

    sequences: list[Sequence]
    copies: list[tuple[int, int]]


def fork_prompt(
    pool: BlockPool, prompt: Sequence, tails: list[int], first_tokens: dict[int, int]
) -> Fork:
    """Split a computed prompt into its choices. The references of prompt and tails are consumed.

    `first_tokens` maps each choice that goes on to its first token; `tails` are blocks, perhaps
    more than needed, that are reserved for copies of a partial last block.
    """
    num_whole = prompt.num_tokens // pool.block_size
    whole, tail = prompt.block_table[:num_whole], prompt.block_table[num_whole:]
    sequences: list[Sequence] = []
    copies: list[tuple[int, int]] = []
    for index, (choice, token_id) in enumerate(first_tokens.items()):
        pool.retain(whole)
        own_tail = tail
        if index > 0 and tail:
            own_tail = [tails.pop()]
            copies.append((tail[0], own_tail[0]))
            pool.retain((tail[0], own_tail[0]))
        elif tail:
            pool.retain(tail)
        sequences.append(
            Sequence(
                prompt.key.of_choice(choice),
                [*prompt.token_ids, token_id],
                prompt.num_prompt_tokens,
                prompt.sampling,
                [*whole, *own_tail],
                list(prompt.hashes),
                num_computed_tokens=prompt.num_tokens,
                num_planned_tokens=prompt.num_tokens,
            )
        )
    pool.release(prompt.block_table)
    pool.release(tails)
    return Fork(sequences, copies)
