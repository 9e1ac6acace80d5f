"""Log probabilities in the forms of OpenAI and vLLM, and what an answer says of its prompt."""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

import msgspec

from baton.router.outputs import Logprob, PromptScores

LEAST_LOGPROB = -9999.0  # JSON has no infinity
Found = dict[int, Logprob]


class Columns(msgspec.Struct):
    """The log probabilities of a completion: an entry of each for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # None for the first token of a prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def followed_by(self, other: "Columns") -> "Columns":
        return Columns(
            self.tokens + other.tokens,
            self.token_logprobs + other.token_logprobs,
            self.top_logprobs + other.top_logprobs,
            self.text_offset + other.text_offset,
        )


class ShownPrompt(msgspec.Struct, frozen=True):
    """One prompt in its answer."""

    text: str = ""  # before each choice
    logprobs: Columns | None = None  # of the same
    num_chars: int = 0  # of the tokens that have them
    scores: msgspec.Raw | None = None  # the field `prompt_logprobs`


class LogprobForms(msgspec.Struct, frozen=True):
    """Writes those of up to `num_top` likeliest tokens, with a token's id if it `names_ids`."""

    num_top: int
    names_ids: bool = False

    def of_chat(self, rows: Iterable[tuple[int, Found]]) -> dict[str, object]:
        content = [
            {
                **self._shown(token_id, found[token_id]),
                "top_logprobs": [
                    self._shown(other, one)
                    for other, one in found.items()
                    if one.rank <= self.num_top
                ],
            }
            for token_id, found in rows
        ]
        return {"content": content, "refusal": None}

    def columns(self, rows: Iterable[tuple[int, Found]], offset: int = 0) -> Columns:
        """Return the columns of tokens whose text begins at `offset`."""
        rows = list(rows)
        lengths = [len(found[token_id].decoded_token) for token_id, found in rows]
        return Columns(
            [self._name(token_id, found[token_id]) for token_id, found in rows],
            [_finite(found[token_id]) for token_id, found in rows],
            [self._top(token_id, found) for token_id, found in rows],
            list(accumulate(lengths, initial=offset))[:-1],
        )

    def of_echo(
        self, text: str, token_ids: list[int], scores: PromptScores, spell: Callable[[int], str]
    ) -> ShownPrompt:
        """Return a prompt with the columns of its tokens."""
        first = Logprob(0.0, 0, spell(token_ids[0]))
        rows = [(one, found) for one, found in zip(token_ids, scores, strict=True) if found]
        num_first = len(first.decoded_token)
        rest = self.columns(rows, num_first)
        columns = Columns([self._name(token_ids[0], first)], [None], [None], [0]).followed_by(rest)
        num_chars = num_first + sum(len(found[one].decoded_token) for one, found in rows)
        return ShownPrompt(text, columns, num_chars)

    def of_prompt(self, token_ids: list[int], scores: PromptScores) -> msgspec.Raw:
        """Return the field `prompt_logprobs` of vLLM, encoded."""
        shown = [
            {other: _row(one) for other, one in self._kept(token_id, found)} if found else None
            for token_id, found in zip(token_ids, scores, strict=True)
        ]
        return msgspec.Raw(msgspec.json.encode(shown))

    def _top(self, token_id: int, found: Found) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, one in self._kept(token_id, found):
            name = self._name(other, one)  # tokens may share their text
            top[name] = max(top.get(name, LEAST_LOGPROB), _finite(one))
        return top

    def _kept(self, token_id: int, found: Found) -> Iterator[tuple[int, Logprob]]:
        for other, one in found.items():
            if other == token_id or one.rank <= self.num_top:
                yield other, one

    def _shown(self, token_id: int, one: Logprob) -> dict[str, object]:
        token, data = self._name(token_id, one), list(one.decoded_token.encode())
        return {"token": token, "logprob": _finite(one), "bytes": data}

    def _name(self, token_id: int, one: Logprob) -> str:
        return f"token_id:{token_id}" if self.names_ids else one.decoded_token


def _row(one: Logprob) -> dict[str, object]:
    return {"logprob": _finite(one), "rank": one.rank, "decoded_token": one.decoded_token}


def _finite(one: Logprob) -> float:
    return max(one.logprob, LEAST_LOGPROB)
