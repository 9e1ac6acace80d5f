"""What a scheduler says: steps to its executor, and messages to routers and to the connector.

A plan is host-only data and is sent to worker processes as msgpack. A decode step is a slice of
length one; a chunk of a prompt is a longer slice; one plan mixes both. A plan contains everything
that a cost model needs.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from baton.kv_transfer.interfaces import ConnectorEvent
from baton.protocol.ids import Key
from baton.protocol.messages import TokenEntry, TokenLogprobs, Tokens, ToRouter
from baton.protocol.pooling import Pooling
from baton.protocol.sampling import Sampling


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, start + length) of one sequence.

    Empty `token_ids` stand for the token that was sampled last for this key (length 1), so a step
    can be planned while the step before it still runs. `block_table` covers every position below
    start + length. The last position is sampled once per entry of `samples`, a choice index each;
    with no entry, no token is wanted.
    """

    key: Key
    start: int
    length: int
    token_ids: tuple[int, ...]
    block_table: tuple[int, ...]
    samples: tuple[int, ...] = ()
    sampling: Sampling | None = None  # set whenever samples is not empty
    num_prompt_tokens: int = 0  # the position where output begins, for min_tokens
    # The output before start, which a runner needs if `sampling.depends_on_output`, and before it
    # the prompt if it `needs_prompt`. None if the plan before this one has a sample of this
    # sequence.
    past: tuple[int, ...] | None = None
    # The tokens after the first rows, whose log probabilities are wanted, and of how many of the
    # likeliest ones.
    targets: tuple[int, ...] = ()
    num_top: int = 0
    # The last of `token_ids` are guesses. The position before each is sampled too, so a sample has
    # one token more than there are guesses.
    num_guesses: int = 0
    lora: str = ""  # the adapter's name
    pooling: Pooling | None = None  # which of its rows are wanted, if they are
    # The blocks of the sequence's state, if the model has any. It is that of the positions below
    # start + num_held, and the step makes it that of all positions but the guesses'.
    state: tuple[int, ...] = ()
    num_held: int = 0
    # Where the model has a head that drafts: the first rows, whose keys and values the blocks have
    # already and whose hidden states the head needs; the token after those of a prompt's chunk; and
    # how many tokens to draft after the last sampled one, for which `block_table` has room. None:
    # the sampled token is not a part of this sequence yet.
    num_repeated: int = 0
    following: int | None = None
    num_drafts: int | None = None

    @property
    def num_sampled(self) -> int:
        return len(self.samples) * (1 + self.num_guesses)

    def kept(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sampled tokens up to the first that a guess after it does not have."""
        if not self.num_guesses:
            return tokens
        num_right = 0
        for guess, token_id in zip(
            self.token_ids[-self.num_guesses :], tokens, strict=False
        ):
            if guess != token_id:
                break
            num_right += 1
        return tokens[: num_right + 1]


class StepPlan(msgspec.Struct, frozen=True):
    """One step. `copies` (source block, target block) are made before any slice is computed.

    `generations` are (block, generation) of the blocks that got a new owner since the last plan;
    they are written to the pool's generation table before anything is stored, so that a reader
    notices a stale block.
    """

    step_id: int
    slices: tuple[Slice, ...]
    copies: tuple[tuple[int, int], ...] = ()
    generations: tuple[tuple[int, int], ...] = ()


# Why nothing can be sampled for a slice whose hidden state has NaN or infinity.
NOT_FINITE = "not finite"


class StepResult(msgspec.Struct, frozen=True):
    """The result of a plan: `tokens[i]` holds `num_sampled` token ids of slice i.

    It holds none if a grammar was not compiled in time, so that the sample has to be repeated, and
    if slice i is in `failed`, with the reason why nothing can be sampled for it. `logprobs` has the
    slices that ask for them, by number, `prompt_logprobs` those of targets, in the form of
    `PromptLogprobs`, and `pooled` what `pooling.pooled_with` takes. `drafts` has what may follow
    the last token that each slice keeps, if the slice asks for drafts.
    `started_s` and `ended_s` are seconds since this host's boot. A result is delivered after every
    store of its step is finished and visible to transports.
    """

    step_id: int
    tokens: tuple[tuple[int, ...], ...]
    started_s: float
    ended_s: float
    failed: tuple[tuple[int, str], ...] = ()
    logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()
    prompt_logprobs: tuple[tuple[int, bytes], ...] = ()
    pooled: tuple[tuple[int, bytes], ...] = ()
    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()


class DraftCost(NamedTuple):
    """What a draft and its row in the next step take, as a share of a step without any.

    With few sequences, reading weights is most of a step, and rows cost little.
    """

    one_sequence: float = 0.0
    doubling: float = 0.0  # what it is more for twice as many sequences

    def of(self, num_sequences: int) -> float:
        return self.one_sequence + self.doubling * math.log2(max(1, num_sequences))


# The loop's number of the router that sent a request, which says nothing else to a scheduler.
Origin = int
# Stands for a router that is gone; messages to it are dropped.
NO_ROUTER: Origin = -1


@dataclass(slots=True)
class Outputs:
    """The messages to routers and to the connector, until the loop takes them."""

    to_routers: list[tuple[Origin, ToRouter]] = field(default_factory=list)
    to_connector: list[ConnectorEvent] = field(default_factory=list)
    _entries: dict[Origin, list[TokenEntry]] = field(default_factory=dict)

    def send(self, origin: Origin, message: ToRouter) -> None:
        if origin != NO_ROUTER:
            self.flush(origin)
            self.to_routers.append((origin, message))

    def emit(self, origin: Origin, entry: TokenEntry) -> None:
        """Add tokens. All tokens of one step for one router leave in one message."""
        if origin != NO_ROUTER:
            self._entries.setdefault(origin, []).append(entry)

    def flush(self, origin: Origin) -> None:
        if entries := self._entries.pop(origin, None):
            self.to_routers.append((origin, Tokens(entries)))

    def drop(self, origin: Origin) -> None:
        """Forget what is queued for a router whose session ended; the next one must not get it."""
        self._entries.pop(origin, None)
        self.to_routers = [queued for queued in self.to_routers if queued[0] != origin]

    def take_router_messages(self) -> list[tuple[Origin, ToRouter]]:
        for origin in list(self._entries):
            self.flush(origin)
        taken = self.to_routers
        self.to_routers = []
        return taken

    def take_connector_events(self) -> list[ConnectorEvent]:
        taken = self.to_connector
        self.to_connector = []
        return taken
