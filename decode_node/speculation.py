"""Guesses of the next tokens of sequences: speculative decoding."""

from array import array
from collections.abc import Iterable
from typing import Protocol

from baton.node.scheduling.request import Sequence
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.ids import Key

TOKEN_BYTES = 4
MAX_PAUSE = 32  # tokens without a guess, after guesses that did not pay
FORGETTING = 0.9  # of what is known of earlier drafts, with each step that has some
PRIOR_DRAFTS = 1.5, 2.0  # as if so many had been right of so many


class Speculation:
    """The guessers of the sequences that run, one each."""

    def __init__(self, limits: NodeLimits) -> None:
        self._limits = limits
        self._guessers: dict[Key, Guesser] = {}
        self._awaiting: set[Key] = set()  # sequences that a launched step drafts for

    def begin(self, sequence: Sequence) -> None:
        """Guess for a sequence, if this node does and its sampling allows it."""
        if not self._limits.engine.num_speculative_tokens:
            return
        if not sequence.request.sampling.depends_on_output:
            kind = HeadDrafts if self._limits.engine.has_draft_head else PromptLookup
            self._guessers[sequence.key] = kind(self._limits)

    def end(self, sequence: Sequence) -> None:
        self._guessers.pop(sequence.key, None)
        self._awaiting.discard(sequence.key)

    def is_ahead(self, running: Iterable[Sequence]) -> bool:
        """Return whether a sequence has guesses, or will get some from a step that is launched."""
        if not self._guessers:
            return False
        return bool(self._awaiting) or any(
            self.guesses(sequence) for sequence in running
        )

    def guesses(self, sequence: Sequence) -> tuple[int, ...]:
        """Return what may follow the tokens so far, as far as the sequence may go."""
        guesser = self._guessers.get(sequence.key)
        if guesser is None:
            return ()
        num_left = sequence.limit - sequence.num_tokens - 1
        return guesser.guesses(sequence.token_ids)[: max(0, num_left)]

    def num_drafts(self, sequence: Sequence) -> int:
        """Return how many tokens the next step should draft after the one that it samples."""
        guesser = self._guessers.get(sequence.key)
        if guesser is None:
            return 0
        return guesser.num_drafts(sequence.num_tokens, len(self._guessers))

    def expect(self, sequence: Sequence, num_drafts: int) -> None:
        """Note that a launched step drafts so many tokens."""
        if num_drafts:
            self._awaiting.add(sequence.key)

    def take(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Take what a settled step has drafted to follow the last token that it sampled."""
        self._awaiting.discard(sequence.key)
        guesser = self._guessers.get(sequence.key)
        if guesser is not None:
            guesser.take(drafts)

    def learn(self, sequence: Sequence, num_guesses: int, num_right: int) -> None:
        """Note how many guesses of a step were right."""
        guesser = self._guessers.get(sequence.key)
        if guesser is not None:
            guesser.learn(num_guesses, num_right, sequence.num_tokens)


class Guesser(Protocol):
    """Guesses the next tokens of one sequence: speculative decoding.

    A step that computes the guesses samples after each of them, and keeps what was guessed right,
    so the tokens are those of a node that does not guess.
    """

    def guesses(self, token_ids: list[int]) -> tuple[int, ...]:
        """Return what may follow these tokens, which begin with those of the last call."""
        ...

    def num_drafts(self, num_tokens: int, num_guessing: int) -> int:
        """Return how many tokens a step should draft that makes a sequence of `num_tokens`.

        So many sequences of this node are guessing.
        """
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
        self._most = limits.engine.num_speculative_tokens
        self._pause = Pause()
        self._cost = limits.draft_cost
        self._num_guessing = 1
        self._right, self._tried = PRIOR_DRAFTS
        # What may follow the tokens that are known now.
        self._drafts: tuple[int, ...] = ()

    def guesses(self, token_ids: list[int]) -> tuple[int, ...]:
        return self._drafts if self._pause.is_over(len(token_ids)) else ()

    def num_drafts(self, num_tokens: int, num_guessing: int) -> int:
        self._num_guessing = num_guessing
        if not self._pause.is_over(num_tokens):
            return 0
        # After a pause, one finds out whether drafts pay again.
        return max(1, self._best())

    def take(self, drafts: tuple[int, ...]) -> None:
        self._drafts = drafts

    def learn(self, num_guesses: int, num_right: int, num_tokens: int) -> None:
        # Those after the first wrong one say nothing.
        was_wrong = num_right < num_guesses
        self._right = FORGETTING * self._right + num_right
        self._tried = FORGETTING * self._tried + num_right + was_wrong
        self._pause.learn(self._best(), num_tokens)

    def _best(self) -> int:
        """Return how many drafts give the most tokens for the time of a step without any."""
        share = self._right / self._tried
        cost = self._cost.of(self._num_guessing)
        gains = [
            sum(share**right for right in range(count + 1)) / (1 + cost * count)
            for count in range(self._most + 1)
        ]
        return gains.index(max(gains))


class PromptLookup:
    """Guesses what followed the last tokens when they stood in the prompt or the output before.

    After wrong guesses it pauses, so that text which repeats nothing costs next to nothing.
    """

    def __init__(self, limits: NodeLimits) -> None:
        self._num_guesses = limits.engine.num_speculative_tokens
        self._sizes = range(
            limits.engine.prompt_lookup_max, limits.engine.prompt_lookup_min - 1, -1
        )
        self._text = bytearray()  # of all tokens, each in `TOKEN_BYTES`
        self._guesses: tuple[int, ...] = ()
        self._pause = Pause()

    def guesses(self, token_ids: list[int]) -> tuple[int, ...]:
        num_known = len(self._text) // TOKEN_BYTES
        if num_known < len(token_ids):
            self._text += array("I", token_ids[num_known:]).tobytes()
            self._guesses = self._found() if self._pause.is_over(len(token_ids)) else ()
        return self._guesses

    def num_drafts(self, num_tokens: int, num_guessing: int) -> int:
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
                follows = array(
                    "I", bytes(text[start : start + TOKEN_BYTES * self._num_guesses])
                )
                # A text that repeats itself up to its end goes on so.
                return tuple(
                    follows[i % len(follows)] for i in range(self._num_guesses)
                )
        return ()
