"""The tokens of ended sequences, which are kept for a while for clients whose stream broke.

This file is pure; only the decode scheduler calls it. A router may die before it has passed on the
last tokens of a stream, so a node keeps them after the sequence has ended. It keeps no KV blocks
for them. The tokens are bounded in time, in number and in bytes; the oldest are dropped first.
"""

from array import array
from dataclasses import dataclass

from baton.engine.by_request import ByRequest
from baton.engine.sequence import Sequence
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import Decode, FinishReason, FirstToken, HeldChoice, Kept
from baton.protocol.sampling import Sampling

MAX_ENDED = 8_192
MAX_BYTES = 32 << 20
# About the memory that CPython takes for a sequence besides its tokens and its form.
OVERHEAD_BYTES = 1_024


@dataclass(slots=True)
class Ended:
    """One choice of a request. Without a finish reason, it can be continued from its tokens."""

    key: Key
    kept: Kept
    tokens: "array[int]"  # prompt and output
    num_prompt_tokens: int
    sampling: Sampling
    reason: FinishReason | None = None
    until_s: float = 0.0

    @classmethod
    def of(cls, sequence: Sequence, kept: Kept, reason: FinishReason | None) -> "Ended":
        """Return the record of a sequence that ran."""
        tokens = array("i", sequence.token_ids)
        num_prompt = sequence.num_prompt_tokens
        return cls(sequence.key, kept, tokens, num_prompt, sequence.sampling, reason)

    @classmethod
    def before_it_ran(cls, message: Decode, choice: int, first: FirstToken | None) -> "Ended":
        """Return the record of a choice that ends with `first`, or that has yet to begin."""
        assert message.kept is not None
        token_ids = message.token_ids if first is None else [*message.token_ids, first.token_id]
        return cls(
            message.key.of_choice(choice),
            message.kept,
            array("i", token_ids),
            message.num_prompt_tokens,
            message.sampling,
            None if first is None else first.finish_reason,
        )

    @property
    def num_bytes(self) -> int:
        return OVERHEAD_BYTES + len(self.kept.form) + self.tokens.itemsize * len(self.tokens)

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self.tokens[: self.num_prompt_tokens])

    @property
    def held(self) -> HeldChoice:
        return HeldChoice(self.key, list(self.tokens[self.num_prompt_tokens :]), self.reason)


class EndedChoices:
    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._all: dict[Key, Ended] = {}  # in order of their ends
        self._by_request: ByRequest[Ended] = ByRequest()  # the same
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def add(self, now_s: float, ended: Ended) -> None:
        """Keep the tokens of a choice, which replace those of its lower attempts."""
        key = ended.key
        for older in self._by_request.of(key.request_id):
            if older.key.choice == key.choice:
                self._drop(older)
        ended.until_s = now_s + self._keep_s
        self._all[key] = ended
        self._by_request.add(key, ended)
        self.num_bytes += ended.num_bytes
        while len(self._all) > MAX_ENDED or self.num_bytes > MAX_BYTES:
            self._drop(next(iter(self._all.values())))

    def of(self, request_id: RequestId) -> list[Ended]:
        return self._by_request.of(request_id)

    def expire(self, now_s: float) -> None:
        while self._all and (oldest := next(iter(self._all.values()))).until_s <= now_s:
            self._drop(oldest)

    def _drop(self, ended: Ended) -> None:
        del self._all[ended.key]
        self._by_request.remove(ended.key)
        self.num_bytes -= ended.num_bytes
