"""What concerns one request: its events, the commands that follow, and its attempts on nodes.

An attempt that is no longer wanted is kept until every node has confirmed that nothing more will
come, because its blocks count as used until then.
"""

from collections.abc import Container, Iterable, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

import msgspec

from baton.protocol.blocks import BlockKey
from baton.protocol.errors import (
    Cancelled,
    Failure,
    NodeError,
    RequestError,
    TransferError,
)
from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import (
    NOT_CACHED,
    Accepted,
    Cancel,
    CancelDone,
    Crashed,
    Decode,
    Failed,
    FinishReason,
    FirstToken,
    FirstTokens,
    InProgress,
    Pooled,
    Prefill,
    PromptLogprobs,
    Role,
    StageTimes,
    TokenEntry,
    TokenLogprobs,
)
from baton.protocol.sampling import EVERYONE, Sampling, Scope

# How a request was served: by a pair of nodes, by a decode node alone, which computed the prompt
# itself, or by a prefill node alone, for a single token.
ServedBy = Literal["disaggregated", "local_prefill", "prefill_only"]
# One node process. A node id with another epoch is another process.
NodeProcess = tuple[NodeId, Epoch]


class Tenant(msgspec.Struct, frozen=True):
    """Whoever a request counts for where clients share nodes and the queue."""

    name: str = ""
    weight: float = 1.0  # its share is in proportion to this
    cache_salt: str = ""  # it shares cached blocks only with those that have the same


ANYONE = Tenant()


class Caller(msgspec.Struct, frozen=True):
    """For whom a request is computed: who shares its cached blocks, and whose share it takes."""

    scope: Scope = EVERYONE
    tenant: Tenant = ANYONE

    @classmethod
    def of(cls, scope: Scope, tenant: Tenant) -> "Caller":
        """Return the caller of a request that asks for a scope."""
        return cls(
            msgspec.structs.replace(scope, tenant_salt=tenant.cache_salt), tenant
        )


NO_CALLER = Caller()


class Begun(msgspec.Struct, frozen=True):
    """The request has been accepted. This is its first event."""


class NodesSelected(msgspec.Struct, frozen=True):
    """An attempt has got its nodes, where its load is reserved."""

    attempt: "Attempt"


class NodesNotSelected(msgspec.Struct, frozen=True):
    """No node was able to take the attempt in time."""

    key: Key
    failure: Failure


class NodeLost(msgspec.Struct, frozen=True):
    """This node is gone or counts as gone. Its later messages are ignored."""

    node: NodeId
    failure: Failure


class ChoiceStopped(msgspec.Struct, frozen=True):
    """The text of this choice has reached a stop string, which only the router can see."""

    choice: int


class CallerGone(msgspec.Struct, frozen=True):
    reason: str = "client"


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


# A node's message about a request is itself an event.
NodeMessage = (
    Accepted
    | FirstTokens
    | PromptLogprobs
    | Pooled
    | TokenEntry
    | Failed
    | CancelDone
    | Crashed
    | InProgress
)
RequestEvent = (
    NodeMessage
    | Begun
    | NodesSelected
    | NodesNotSelected
    | NodeLost
    | ChoiceStopped
    | CallerGone
    | Tick
)


class SelectNodes(msgspec.Struct, frozen=True):
    """Asks for nodes and for the reservation of an attempt's load there.

    `NodesSelected` or `NodesNotSelected` follows. After `CancelSelection`, neither may come.
    """

    attempt: "Attempt"


class CancelSelection(msgspec.Struct, frozen=True):
    key: Key


class Send(msgspec.Struct, frozen=True):
    node: NodeId
    message: Prefill | Decode | Cancel


class Release(msgspec.Struct, frozen=True):
    """Release the load of an attempt at a node, exactly once for each selected node."""

    node: NodeId
    key: Key


class HandoffEnded(msgspec.Struct, frozen=True):
    """Records whether the decode process could take over from the prefill process."""

    prefill: NodeProcess
    decode: NodeProcess
    failure: Failure | None = None
    times: StageTimes | None = None  # of the decode node, if it could


class Deliver(msgspec.Struct, frozen=True):
    """Passes on the next tokens of a choice: in order, none missing, none twice.

    A finish reason ends the choice.
    """

    choice: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if they were asked for


class DeliverPrompt(msgspec.Struct, frozen=True):
    """Passes on the log probabilities of the prompt, once, before any token."""

    rows: bytes  # of `PromptLogprobs`


class DeliverPooled(msgspec.Struct, frozen=True):
    """Passes on what was made of a prompt of which no token is wanted, which ends the choice."""

    numbers: bytes  # of `Pooled`


class Outcome(msgspec.Struct, frozen=True):
    """Ends the request for its caller, exactly once. Without a failure, all choices finished."""

    failure: Failure | None = None


class Closed(msgspec.Struct, frozen=True):
    """Forgets the request. This is the last command, after all nodes have confirmed."""


RequestCommand = (
    SelectNodes
    | CancelSelection
    | Send
    | Release
    | HandoffEnded
    | Deliver
    | DeliverPrompt
    | DeliverPooled
    | Outcome
    | Closed
)


# How long a request avoids a process that failed it, if there is another one.
AVOID_S = 30.0
# After two losses in a row, an attempt waits so long before it goes to nodes that failed the
# request: what cuts them off may be over then, or is known.
PAUSE_S = 2.0
DRAINING = "draining"  # the failure of a draining node that sends an attempt elsewhere


class AttemptState(Enum):
    WAITING = auto()  # no nodes have been chosen yet
    LIVE = auto()  # the nodes have been asked to start
    LEAVING = auto()  # no output is wanted, and nodes have yet to confirm their cancels
    CLOSED = auto()


@dataclass(slots=True, frozen=True)
class Loss:
    """Why an attempt or some of its sequences were lost, and the nodes that the next one avoids."""

    failure: Failure
    blamed: frozenset[NodeId] = frozenset()
    is_death: bool = False  # a node is gone or counts as gone
    is_of_handoff: bool = False  # decode could not take over from prefill

    @classmethod
    def broken(cls, message: str, *blamed: NodeId) -> "Loss":
        return cls(
            NodeError(message, code="stream_broken").to_failure(), frozenset(blamed)
        )

    def is_free(self, num_new_tokens: int) -> bool:
        """Return whether the loss of an attempt that brought that many tokens is free.

        A free loss uses up no attempt. The first token of an attempt is computed with its prompt. A
        sequence that kills every node in its first decode step gets one token per attempt, so a
        loss by a node's death is free only from two tokens on.
        """
        if self.failure.code == DRAINING or (
            self.failure.code == NOT_CACHED and not self.blamed
        ):
            return True
        return num_new_tokens > (1 if self.is_death else 0)


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at choices: what its nodes are selected by, which they are, and how it goes.

    Times `..._at_s` are seconds since the arrival of its request, on the router's clock. Nodes
    measured the durations on clocks of their own.
    """

    key: Key  # the key of its lowest choice
    choices: tuple[int, ...]
    # Tokens that are sent with it, which is the position of its first new token.
    num_tokens: int
    # What its nodes are selected by.
    wants_decode: bool = True
    num_final_tokens: int = 0  # the greatest length that one of its sequences can reach
    # Processes that failed this request recently.
    avoid: frozenset[NodeProcess] = frozenset()
    avoid_until_s: float = 0.0  # until then, it rather waits than goes to one of those
    is_resume: bool = False  # the caller has tokens already
    is_suspect: bool = False  # a node has died of an error in one of its steps
    # A decode node had less of the prompt cached than expected.
    is_remote_only: bool = False
    is_pooled: bool = False  # no token is wanted, so a prefill node alone computes it
    lora: str = ""  # an adapter of run time, which not all nodes may have
    # Keys of the prompt's blocks, if caches are watched.
    block_keys: tuple[BlockKey, ...] = ()
    tenant: Tenant = ANYONE
    # Those of the queue in which it waits.
    since_s: float = 0.0  # when it began to wait
    work: float = 1.0  # in tokens, per weight of its tenant
    # The version of the registry at which no node could take it.
    unplaceable_at: int = -1
    # The roles whose nodes were full when it was looked at last; None before that.
    waits_for: frozenset[Role] | None = None
    # The nodes that are best for it, of which at least one is set, and its load there.
    prefill_node: NodeId | None = None
    decode_node: NodeId | None = None
    epochs: dict[NodeId, Epoch] = field(default_factory=dict)  # of both, prefill first
    # Tokens that decode may compute if it is alone.
    max_uncached_tokens: int | None = None
    # From which prefill may read its first tokens' blocks.
    prefix_node: NodeId | None = None
    prompt_compute: str = ""  # of prefill, if its bits are told apart from decode's
    num_uncached_tokens: int = 0  # that the prefill node will compute
    # That its sequences will probably take at the decode node.
    num_decode_blocks: int = 0
    is_fallback: bool = False  # decode computes the prompt because no pair works
    full: tuple[NodeId, ...] = ()  # those of the nodes that have no room for it now
    # At the node that computes the prompt, as far as is known.
    num_cached_tokens: int = 0
    state: AttemptState = AttemptState.WAITING
    open: set[int] = field(default_factory=set)  # choices that still get tokens from it
    accepted: bool = False  # decode has reserved what it needs
    streaming: bool = False  # decode has sent tokens, so it no longer needs prefill
    first_tokens: tuple[FirstToken, ...] | None = None
    prompt_rows: bytearray = field(default_factory=bytearray)  # of `PromptLogprobs`
    # Decode's, which came before these.
    early: list[TokenEntry] = field(default_factory=list)
    reserved: set[NodeId] = field(default_factory=set)
    # Keys of unconfirmed cancels.
    unconfirmed: dict[NodeId, set[Key]] = field(default_factory=dict)
    heard_s: float = 0.0
    leave_by_s: float = 0.0
    asked_at_s: float = 0.0  # when nodes were asked for
    placed_at_s: float | None = None
    prefilled_at_s: float | None = None  # when the prefill node's first tokens came
    decoding_at_s: float | None = None  # when the decode node's first tokens came
    lost_at_s: float | None = None
    failure: str = ""  # the code of its loss
    queue_s: float = 0.0
    prefix_read_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    decode_queue_s: float = 0.0
    first_step_s: float = 0.0

    @property
    def num_choices(self) -> int:
        return len(self.choices)

    @property
    def path(self) -> ServedBy:
        if self.prefill_node is None:
            return "local_prefill"
        return "prefill_only" if self.decode_node is None else "disaggregated"

    def goes_to(self, processes: Container[NodeProcess]) -> bool:
        """Return whether one of the nodes is among these processes."""
        return any(process in processes for process in self.epochs.items())

    def forget_nodes(self) -> None:
        """Drop the nodes, which were the best for it but could not take it."""
        self.prefill_node = None
        self.decode_node = None
        self.epochs = {}

    def timed(self, at_s: float, times: StageTimes, *, of_prompt: bool) -> None:
        """Add what one of its nodes measured. That node's first tokens came at `at_s`."""
        if of_prompt:
            self.queue_s = times.queue_s
            self.prefill_s = times.prefill_s
            self.prefix_read_s = times.prefix_read_s
        if of_prompt and self.prefill_node is not None:
            self.prefilled_at_s = at_s
            return
        if not of_prompt or times.prefill_s:  # otherwise decode has only accepted
            self.decoding_at_s = at_s
        self.transfer_s = times.transfer_s
        self.exposed_s = times.exposed_s
        self.decode_queue_s = times.decode_queue_s
        self.first_step_s = times.first_step_s

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(self.key.of_choice(choice) for choice in self.choices)

    def assured_firsts(self) -> list[tuple[int, FirstToken]]:
        """Return the first token of all choices, by choice, once they may be delivered.

        No token may go to the caller before the rest of the output is assured.
        """
        firsts = self.first_tokens or ()
        is_whole = all(first.finish_reason is not None for first in firsts)
        if self.decode_node is not None and not self.accepted and not is_whole:
            return []
        # Without a decode node, only one token has to be generated.
        if self.decode_node is None:
            firsts = tuple(
                first
                if first.finish_reason is not None
                else msgspec.structs.replace(first, finish_reason="length")
                for first in firsts
            )
        return list(zip(self.choices, firsts, strict=bool(firsts)))

    @property
    def pair(self) -> tuple[NodeProcess, NodeProcess] | None:
        """Return the processes of a handoff, prefill first; None without a handoff."""
        if self.prefill_node is None or self.decode_node is None:
            return None
        return self.process(self.prefill_node), self.process(self.decode_node)

    def process(self, node: NodeId) -> NodeProcess:
        return node, self.epochs.get(node, Epoch(""))

    def is_named(self, node: NodeId, keys: Iterable[Key]) -> bool:
        """Return whether `node` works for this attempt and some of `keys` belong to it."""
        works = self.state is AttemptState.LIVE and node in (
            self.prefill_node,
            self.decode_node,
        )
        return works and not set(keys).isdisjoint(self.keys)

    def loss_of(self, node: NodeId, failure: Failure) -> Loss:
        """Return the loss that a failure at `node` means while this attempt is wanted."""
        if failure.code == Cancelled.code:
            # This router cancelled nothing, so the node or its peer has lost its channel to this
            # router.
            text = f"{node} gave up the request because a channel to this router broke"
            return Loss(NodeError(text).to_failure(), frozenset({node}), is_death=True)
        if failure.code == NOT_CACHED and self.max_uncached_tokens is not None:
            # The router's expectation was wrong, and the node is not at fault.
            return Loss(failure)
        if failure.http_status != TransferError.http_status:
            return Loss(failure, frozenset({node}))
        return self.loss_of_handoff(failure, node)

    def loss_of_handoff(self, failure: Failure, *blamed: NodeId) -> Loss:
        """Return the loss of a handoff that failed, or of `blamed` if there is none to wait for."""
        if self.pair is None or self.streaming:
            return Loss(failure, frozenset(blamed))
        # A single failure does not show which end is at fault, so the request avoids both.
        return Loss(
            failure, frozenset(name for name, _ in self.pair), is_of_handoff=True
        )

    def start_commands(
        self, prompt: list[int], output: list[int], sampling: Sampling
    ) -> list[Send]:
        """Return the messages that start this attempt. They are sent at the same time."""
        token_ids = [*prompt, *output]
        num_prompt = len(prompt)
        num_choices = self.num_choices
        sends: list[Send] = []
        if self.decode_node is not None:
            decode = Decode(
                self.key,
                token_ids,
                num_prompt,
                sampling,
                num_choices,
                self.prefill_node,
                self.max_uncached_tokens,
                self.prompt_compute,
            )
            sends.append(Send(self.decode_node, decode))
        if self.prefill_node is not None:
            prefill = Prefill(
                self.key,
                token_ids,
                num_prompt,
                sampling,
                num_choices,
                self.decode_node,
                self.prefix_node,
            )
            sends.append(Send(self.prefill_node, prefill))
        return sends

    def releases(self, nodes: Set[NodeId]) -> list[Release]:
        """Return commands that release this attempt's load at `nodes` that still have it."""
        given = sorted(self.reserved & nodes)
        self.reserved.difference_update(given)
        return [Release(node, self.key) for node in given]

    def confirm(self, node: NodeId, keys: tuple[Key, ...]) -> None:
        """Note that `node` will send nothing more for `keys`."""
        if (unconfirmed := self.unconfirmed.get(node)) is not None:
            unconfirmed.difference_update(keys)
            if not unconfirmed:
                del self.unconfirmed[node]


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of the response. `attempt` is None once the choice has ended."""

    index: int
    attempt: "Attempt | None" = None
    number: int = 0  # of the attempt; 0 is the first
    num_losses: int = 0  # attempts in a row without progress
    # All tokens that the caller has got.
    output: list[int] = field(default_factory=list)


def kills_nodes(num_nodes: int) -> Failure:
    """Return why a request gets no more nodes. Clients would repeat it if it were a 5xx status."""
    text = f"{num_nodes} nodes died of an error in a step of this request"
    return RequestError(text, code="request_kills_nodes", http_status=422).to_failure()
