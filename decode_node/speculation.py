"""Guess the next tokens of a sequence from its own text: speculative decoding by prompt look-up.

What followed the last tokens when they stood in the prompt or the output before is guessed to
follow again. A step that computes the guesses samples after each of them, and keeps what was
guessed right, so the tokens are those of a node that does not guess.
"""

from array import array

from baton.engine.scheduling.scheduler import NodeLimits

TOKEN_BYTES = 4
MAX_PAUSE = 32  # tokens without a guess, after guesses that were all wrong


class PromptLookup:
    """Guesses for one sequence.

    After wrong guesses it pauses, for twice as many tokens each time, so that text which repeats
    nothing costs next to nothing.
    """

    def __init__(self, limits: NodeLimits) -> None:
        self._num_guesses = limits.num_speculative_tokens
        self._sizes = range(limits.prompt_lookup_max, limits.prompt_lookup_min - 1, -1)
        self._text = bytearray()  # of all tokens, each in `TOKEN_BYTES`
        self._guesses: tuple[int, ...] = ()
        self._paused_until = 0  # this many tokens
        self._pause = 0

    def guesses(self, token_ids: list[int]) -> tuple[int, ...]:
        """Return what may follow these tokens, which begin with those of the last call."""
        num_known = len(self._text) // TOKEN_BYTES
        if num_known < len(token_ids):
            self._text += array("I", token_ids[num_known:]).tobytes()
            self._guesses = () if len(token_ids) < self._paused_until else self._found()
        return self._guesses

    def learn(self, num_right: int, num_tokens: int) -> None:
        """Note how many guesses were right. The sequence has `num_tokens` tokens now."""
        self._pause = 0 if num_right else min(2 * self._pause + 1, MAX_PAUSE)
        self._paused_until = num_tokens + self._pause

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
