"""The events and the commands of one request's lifecycle.

A `RequestEvent` is something that happens to a request; a `RequestCommand` is what must be done.
`active_requests` feeds events in and carries commands out. Both are Structs, so a run can be
recorded and replayed.
"""

import msgspec

from baton.protocol.blocks import BlockKey
from baton.protocol.errors import Failure
from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import (
    Accepted,
    Cancel,
    CancelDone,
    Crashed,
    Decode,
    Failed,
    FinishReason,
    FirstTokens,
    Prefill,
    StageTimes,
    TokenEntry,
)

# One node process. A node id with another epoch is another process.
NodeProcess = tuple[NodeId, Epoch]


class RequestMessage(msgspec.Struct, frozen=True, tag=True):
    """The root of all events and commands of one request."""


# --- events -------------------------------------------------------------------------------------


class Begun(RequestMessage, frozen=True):
    """The request has been accepted. This is its first event."""


class AdoptedChoice(msgspec.Struct, frozen=True):
    """A choice with its output so far. The caller already has `num_received` of these tokens.

    If `process` is set, the choice runs there. Otherwise it has ended, or it must be continued.
    """

    key: Key
    token_ids: list[int]
    num_received: int = 0  # one more if the node has not received the first token from prefill yet
    has_ended: bool = False  # the caller has the choice's end too
    finish_reason: FinishReason | None = None
    process: NodeProcess | None = None


class Adopted(RequestMessage, frozen=True):
    """Another router began this request. This is its first event here instead of `Begun`."""

    choices: tuple[AdoptedChoice, ...]
    first_attempt: int = 0  # the first attempt that this router may make


class Placed(RequestMessage, frozen=True):
    """The answer to `Place`: these nodes have been charged. At least one of them is set."""

    key: Key
    prefill_node: NodeId | None
    decode_node: NodeId | None
    epochs: dict[NodeId, Epoch] = {}  # of both nodes
    max_uncached_tokens: int | None = None  # tokens that decode may compute if it is alone


class NotPlaced(RequestMessage, frozen=True):
    """The other answer to `Place`: no node was able to take the leg in time."""

    key: Key
    failure: Failure


class NodeLost(RequestMessage, frozen=True):
    """This node is gone or counts as gone. Its later messages are ignored."""

    node: NodeId
    failure: Failure


class ChoiceStopped(RequestMessage, frozen=True):
    """The text of this choice has reached a stop string, which only the router can see."""

    choice: int


class CallerGone(RequestMessage, frozen=True):
    reason: str = "client"


class Tick(RequestMessage, frozen=True):
    """Time has passed."""


# A node's message about a request is itself an event.
NodeMessage = Accepted | FirstTokens | TokenEntry | Failed | CancelDone | Crashed
RequestEvent = (
    NodeMessage | Begun | Adopted | Placed | NotPlaced | NodeLost | ChoiceStopped | CallerGone
    | Tick
)  # fmt: skip


# --- commands -----------------------------------------------------------------------------------


class Place(RequestMessage, frozen=True):
    """Finds nodes for this leg and charges them. `Placed` or `NotPlaced` is the answer.

    `Unplace` withdraws it, and then there may be no answer.
    """

    key: Key
    num_tokens: int
    num_choices: int
    wants_decode: bool
    num_final_tokens: int  # the greatest length that one of its sequences can reach
    avoid: frozenset[NodeProcess] = frozenset()  # processes that failed this request recently
    is_resume: bool = False  # the caller has tokens already
    is_suspect: bool = False  # a node has died of an error in one of its steps
    is_remote_only: bool = False  # a decode node had less of the prompt cached than expected
    block_keys: tuple[BlockKey, ...] = ()  # keys of the prompt's blocks, if caches are watched


class Unplace(RequestMessage, frozen=True):
    key: Key


class Send(RequestMessage, frozen=True):
    node: NodeId
    message: Prefill | Decode | Cancel


class Release(RequestMessage, frozen=True):
    """Removes this leg's charge from the node. Comes exactly once per leg and placed node."""

    node: NodeId
    key: Key


class HandoffEnded(RequestMessage, frozen=True):
    """Records whether the decode process could take over from the prefill process."""

    prefill: NodeProcess
    decode: NodeProcess
    failure: Failure | None = None


class Deliver(RequestMessage, frozen=True):
    """Passes on the next tokens of a choice: in order, none missing, none twice.

    A finish reason ends the choice.
    """

    choice: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None


class Timed(RequestMessage, frozen=True):
    """Records the stage times of one node. `of_prompt` marks the node that computed the prompt."""

    key: Key  # of the leg
    times: StageTimes
    of_prompt: bool


class TriedAgain(RequestMessage, frozen=True):
    """Records another attempt at choices. `is_resume` says that the caller has tokens of them."""

    key: Key  # of the leg that was lost
    failure: Failure
    is_resume: bool


class Outcome(RequestMessage, frozen=True):
    """Ends the request for its caller, exactly once. Without a failure, all choices finished."""

    failure: Failure | None = None


class Closed(RequestMessage, frozen=True):
    """Forgets the request. This is the last command, after all nodes have confirmed."""


RequestCommand = (
    Place | Unplace | Send | Release | HandoffEnded | Deliver | Timed | TriedAgain | Outcome
    | Closed
)  # fmt: skip
