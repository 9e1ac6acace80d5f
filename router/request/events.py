"""What happens to a request (`RequestEvent`) and what its lifecycle wants done (`RequestCommand`).

`core` feeds the first and carries out the second; `lifecycle` is a pure function between them.
They are Structs, so that a run can be recorded and replayed.
"""

import msgspec

from baton.protocol.errors import Failure
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import (
    Accepted,
    Cancel,
    CancelDone,
    Decode,
    Failed,
    FinishReason,
    FirstTokens,
    Prefill,
    StageTimes,
    TokenEntry,
)


class RequestMessage(msgspec.Struct, frozen=True, tag=True):
    """Root of events and commands of one request."""


# --- events -------------------------------------------------------------------------------------


class Begun(RequestMessage, frozen=True):
    """The caller is there. The first event of every request."""


class Placed(RequestMessage, frozen=True):
    """The answer to `Place`: these nodes, already charged. At least one of them is set."""

    key: Key
    prefill_node: NodeId | None
    decode_node: NodeId | None


class NotPlaced(RequestMessage, frozen=True):
    """The other answer to `Place`: no node could take the leg in time."""

    key: Key
    failure: Failure


class NodeLost(RequestMessage, frozen=True):
    """That process is gone, or counts as gone: nothing it says from here on reaches a request."""

    node: NodeId
    failure: Failure


class ChoiceStopped(RequestMessage, frozen=True):
    """The text of this choice ended with a stop string, which only the router knows."""

    choice: int


class CallerGone(RequestMessage, frozen=True):
    reason: str = "client"


class Tick(RequestMessage, frozen=True):
    """Time has passed."""


# What nodes say of a request is an event as it stands.
NodeMessage = Accepted | FirstTokens | TokenEntry | Failed | CancelDone
RequestEvent = (
    NodeMessage | Begun | Placed | NotPlaced | NodeLost | ChoiceStopped | CallerGone | Tick
)  # fmt: skip


# --- commands -----------------------------------------------------------------------------------


class Place(RequestMessage, frozen=True):
    """Find nodes for this leg and charge them. Placed or NotPlaced answers, unless `Unplace`."""

    key: Key
    num_tokens: int
    num_choices: int
    wants_decode: bool
    num_final_tokens: int  # the longest that a sequence of it can become
    avoid: frozenset[NodeId] = frozenset()


class Unplace(RequestMessage, frozen=True):
    key: Key


class Send(RequestMessage, frozen=True):
    node: NodeId
    message: Prefill | Decode | Cancel


class Release(RequestMessage, frozen=True):
    """Take this leg's charge off the node. Exactly once per leg and node that was placed."""

    node: NodeId
    key: Key


class Deliver(RequestMessage, frozen=True):
    """Tokens in order, none missing, none twice. A finish reason ends the choice."""

    choice: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None


class Timed(RequestMessage, frozen=True):
    """Stage times as one node knows them; `of_prompt`: the one that computed the prompt."""

    times: StageTimes
    of_prompt: bool


class Resumed(RequestMessage, frozen=True):
    """A choice goes on elsewhere although the caller has tokens of it."""

    choice: int


class Outcome(RequestMessage, frozen=True):
    """How the request ended; exactly one. None: all its choices finished."""

    failure: Failure | None = None


class Closed(RequestMessage, frozen=True):
    """The last command: no node owes anything to this request any more."""


RequestCommand = (
    Place | Unplace | Send | Release | Deliver | Timed | Resumed | Outcome | Closed
)  # fmt: skip
