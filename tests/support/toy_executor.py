"""An executor whose "KV" can be checked: each slot holds a digest of every token up to it.

It runs plans in the caller's thread. Before computing a slice it compares every slot below the
slice with what the sequence's tokens say, so a wrong block table, a block that was reused too soon
or a lost copy fails at once. The next token is a pure function of the tokens so far.
"""

import hashlib
from collections.abc import Callable

from baton.engine.scheduling.plan import Slice, StepPlan, StepResult
from baton.protocol.ids import Key

VOCAB = 1000


def next_token(token_ids: list[int], choice: int = 0) -> int:
    """What the toy model says after `token_ids`."""
    text = f"{choice}:{token_ids}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) % VOCAB


def continuation(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    """The toy model's greedy answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, choice))
    return tokens[len(prompt) :]


class ToyExecutor:
    """`slots[block][offset]` is the tuple of tokens that the slot stands for."""

    def __init__(
        self, num_blocks: int, block_size: int, says: Callable[[list[int], int], int] = next_token
    ) -> None:
        self.block_size = block_size
        self.says = says
        self.slots: list[list[tuple[int, ...] | None]] = [
            [None] * block_size for _ in range(num_blocks)
        ]
        self._last: dict[tuple[Key, int], int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for source, target in plan.copies:
            self.slots[target] = list(self.slots[source])
        tokens = tuple(self._compute(part) for part in plan.slices)
        return StepResult(plan.step_id, tokens, 0.0, 0.001)

    def _compute(self, part: Slice) -> tuple[int, ...]:
        history = self._history(part)
        given = part.token_ids or (self._last[(part.key, part.start)],)
        assert len(given) == part.length
        drawn: list[int] = []
        for position, token in enumerate(given, part.start):
            history.append(token)
            block = part.block_table[position // self.block_size]
            self.slots[block][position % self.block_size] = tuple(history)
            if position + 1 < part.start + part.length - part.num_guesses:
                continue
            for choice in part.samples:
                drawn.append(self.says(history, choice))
                self._last[(part.key.of_choice(choice), position + 1)] = drawn[-1]
        return tuple(drawn)

    def _history(self, part: Slice) -> list[int]:
        """The tokens before the slice, from the slots themselves, all checked to be one chain."""
        if part.start == 0:
            return []
        last = part.start - 1
        chain = self.slots[part.block_table[last // self.block_size]][last % self.block_size]
        assert chain is not None, f"{part.key}: slot {last} was never written"
        assert len(chain) == part.start, f"{part.key}: slot {last} belongs to another sequence"
        for position in range(part.start):
            slot = self.slots[part.block_table[position // self.block_size]]
            assert slot[position % self.block_size] == chain[: position + 1], (
                f"{part.key}: position {position} is not of this sequence"
            )
        return list(chain)
