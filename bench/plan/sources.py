"""Where requests come from: drawn prompts, a trace, or a file; one kind of source for each.

`workloads.py` makes one source per plan and asks it for arrivals in their order. A source knows
what is asked and, where it was recorded, when; it places nothing in time itself.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from baton.bench.plan.lengths import Lengths
from baton.bench.plan.prompt_files import PromptRow
from baton.bench.plan.prompts import Key, Prompts
from baton.bench.plan.replay import TraceOptions, Vocabulary, prefix_tokens, replay
from baton.bench.plan.trace_files import TraceRow
from baton.bench.records import Message
from baton.protocol.errors import ConfigError

Form = Literal["tokens", "text", "chat"]
MAX_PLAN_TOKENS = 20_000_000

# The first part of every key: warm-up requests never share a draw with measured ones.
_MEASURED, _WARM_UP = 0, 1
# Keep the draws of a seed apart from those of arrivals and prompts.
_INPUT_STREAM, _OUTPUT_STREAM = 5, 6


@dataclass(slots=True, frozen=True)
class Draft:
    """A request without its place in the plan."""

    output_tokens: int
    prompt_ids: tuple[int, ...] = ()
    prompt: str = ""
    messages: tuple[Message, ...] = ()


class Source(Protocol):
    """What a plan is made of.

    `num_rows` is None where there is no end. `times` are those of the rows, in order, if recorded.
    """

    num_rows: int | None
    times: Sequence[float] | None

    def draw(self, place: int) -> list[Draft]:
        """The requests of an arrival, in turn; places are asked for once each, in order."""

    def warm_up(self, place: int) -> Draft:
        """A request that resembles the others and has another prompt."""

    def notes(self, num_arrivals: int) -> list[str]:
        """What a reader of the figures must know of the first so many arrivals."""


class Draws:
    """Prompts and lengths of one seed. A draw depends on its key, not on those before it."""

    def __init__(self, seed: int, vocabulary: Vocabulary, inputs: Lengths, outputs: Lengths):
        self.seed, self.vocabulary = seed, vocabulary
        self.prompts = Prompts(vocabulary, seed)
        self._inputs, self._outputs = inputs, outputs
        self._num_tokens = 0

    def spend(self, num_tokens: int) -> None:
        """To be called before a prompt is drawn: a plan is held in memory as a whole."""
        self._num_tokens += num_tokens
        if self._num_tokens > MAX_PLAN_TOKENS:
            raise ConfigError(
                f"the plan holds over {MAX_PLAN_TOKENS} prompt tokens: ask for fewer requests, or "
                "for shorter prompts (traces: clamp or scale them)"
            )

    def input_tokens(self, key: Key) -> int:
        return self._inputs.draw(np.random.default_rng([self.seed, _INPUT_STREAM, *key]))

    def output_tokens(self, key: Key) -> int:
        return self._outputs.draw(np.random.default_rng([self.seed, _OUTPUT_STREAM, *key]))


@dataclass(slots=True, frozen=True)
class Shape:
    """Of drawn prompts: `shared` tokens of one of `num_prefixes` starts, then the prompt's own."""

    form: Form
    turns: int
    shared: int
    num_prefixes: int


class DrawnSource:
    """Random prompts; several turns make a conversation, whose start alone has the prefix."""

    def __init__(self, shape: Shape, draws: Draws) -> None:
        self.num_rows: int | None = None
        self.times: Sequence[float] | None = None
        self._shape, self._draws = shape, draws

    def draw(self, place: int) -> list[Draft]:
        prefix = (_MEASURED, place % self._shape.num_prefixes)
        return [
            self._draft((_MEASURED, place, turn), prefix if turn == 0 else None)
            for turn in range(self._shape.turns)
        ]

    def warm_up(self, place: int) -> Draft:
        return self._draft((_WARM_UP, place, 0), (_WARM_UP, place))

    def _draft(self, key: Key, prefix: Key | None) -> Draft:
        prompts = self._draws.prompts
        outputs, own = self._draws.output_tokens(key), self._draws.input_tokens(key)
        shared = self._shape.shared if prefix is not None else 0
        self._draws.spend(shared + own)
        if self._shape.form == "tokens":
            common = prompts.shared_ids(prefix or (), shared)
            return Draft(outputs, prompt_ids=common + prompts.ids(key, own))
        start, rest = prompts.shared_words(prefix or (), shared), prompts.words(key, own)
        if self._shape.form == "text":
            return Draft(outputs, prompt=f"{start} {rest}" if start else rest)
        system = (Message("system", start),) if start else ()
        return Draft(outputs, messages=(*system, Message("user", rest)))

    def notes(self, num_arrivals: int) -> list[str]:
        shape = self._shape
        notes = []
        if shape.turns > 1:
            requests = num_arrivals * shape.turns
            notes.append(
                f"{num_arrivals} conversations of {shape.turns} turns: {requests} requests"
            )
        if shape.shared:
            starts = "one start" if shape.num_prefixes == 1 else f"{shape.num_prefixes} starts"
            notes.append(f"prompts share {starts} of {shape.shared} tokens")
        if shape.form != "tokens":
            notes.append("a word counts as a token in prompts: the server's usage is exact")
        return notes


class TraceSource:
    """Prompts of recorded lengths, with the prefixes that the trace's hash ids say."""

    def __init__(self, rows: Sequence[TraceRow], options: TraceOptions, draws: Draws) -> None:
        self._recorded, self._options, self._draws = rows, options, draws
        self._replay = replay(rows, options)
        self.num_rows: int | None = len(self._replay.rows)
        self.times: Sequence[float] | None = [row.at_s for row in self._replay.rows]

    def draw(self, place: int) -> list[Draft]:
        row = self._row(place)
        self._draws.spend(row.input_tokens)
        if not row.hash_ids:
            ids = self._draws.prompts.ids((_MEASURED, place, 0), row.input_tokens)
        else:
            ids = prefix_tokens(
                row.hash_ids,
                row.input_tokens,
                self._draws.vocabulary,
                block_tokens=self._replay.block_tokens,
                seed=self._draws.seed,
            )
        return [Draft(row.output_tokens, prompt_ids=ids)]

    def warm_up(self, place: int) -> Draft:
        row = self._row(place)
        self._draws.spend(row.input_tokens)
        ids = self._draws.prompts.ids((_WARM_UP, place, 0), row.input_tokens)
        return Draft(row.output_tokens, prompt_ids=ids)

    def _row(self, place: int) -> TraceRow:
        return self._replay.rows[place % len(self._replay.rows)]

    def notes(self, num_arrivals: int) -> list[str]:
        notes = replay(self._recorded, self._options, limit=num_arrivals).notes
        again = range(len(self._replay.rows), num_arrivals)
        if repeated := sum(bool(self._row(place).hash_ids) for place in again):
            shown = f"{repeated} of {num_arrivals} prompts come again, as a prefix cache knows them"
            notes.append(f"the trace starts over: {shown}")
        return notes


class FileSource:
    """Prompts as a file has them; an output length that a row does not say is drawn."""

    def __init__(self, rows: Sequence[PromptRow], draws: Draws) -> None:
        self._rows, self._draws = rows, draws
        self.num_rows: int | None = len(rows)
        at = [row.at_s for row in rows if row.at_s is not None]
        self.times: Sequence[float] | None = at or None

    def draw(self, place: int) -> list[Draft]:
        row = self._rows[place % len(self._rows)]
        outputs = row.output_tokens or self._draws.output_tokens((_MEASURED, place, 0))
        if isinstance(row.prompt, tuple):
            return [Draft(outputs, prompt_ids=row.prompt)]
        return [Draft(outputs, prompt=row.prompt, messages=row.messages)]

    def warm_up(self, place: int) -> Draft:
        """As long and of the same form as the file's row, by words if it is text."""
        row, key = self._rows[place % len(self._rows)], (_WARM_UP, place, 0)
        outputs = row.output_tokens or self._draws.output_tokens(key)
        if isinstance(row.prompt, tuple):
            return Draft(outputs, prompt_ids=self._draws.prompts.ids(key, len(row.prompt)))
        text = row.prompt or " ".join(message.content for message in row.messages)
        words = self._draws.prompts.words(key, max(1, len(text.split())))
        if row.prompt:
            return Draft(outputs, prompt=words)
        return Draft(outputs, messages=(Message("user", words),))

    def notes(self, num_arrivals: int) -> list[str]:
        asked = (self._rows[place % len(self._rows)] for place in range(num_arrivals))
        counts = collections.Counter((row.prompt, row.messages) for row in asked)
        repeated = num_arrivals - len(counts)
        return [f"{repeated} of {num_arrivals} prompts repeat an earlier one"] if repeated else []
