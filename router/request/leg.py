"""One attempt at choices of a request: its nodes, and what they have yet to confirm.

Only `lifecycle` makes and changes legs. An unwanted leg is kept until every node has confirmed that
nothing more will come, because its blocks count as used until then.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from baton.protocol.blocks import BlockKey
from baton.protocol.errors import Cancelled, Failure, NodeError, RequestError, TransferError
from baton.protocol.ids import Epoch, Key, NodeId, RequestId
from baton.protocol.messages import (
    NOT_CACHED,
    Decode,
    FinishReason,
    FirstToken,
    Kept,
    Prefill,
)
from baton.protocol.sampling import Sampling
from baton.router.request.events import NodeProcess, Place, Release, Send

# How long a request avoids a process that failed it, if there is another one.
AVOID_S = 30.0
DRAINING = "draining"  # the failure of a draining node that sends a leg elsewhere


class Request(msgspec.Struct, frozen=True):
    """The work of a request. The seed is set, `max_tokens` fits, and choices count from 0."""

    request_id: RequestId
    token_ids: list[int]
    sampling: Sampling
    num_choices: int = 1
    max_attempts: int = 3  # attempts in a row that bring no token
    kept: Kept | None = None  # for another router, if the client can resume the stream there
    block_keys: tuple[BlockKey, ...] = ()  # keys of the prompt's blocks, if caches are watched


class LegState(Enum):
    WAITING = auto()  # no nodes have been chosen yet
    LIVE = auto()  # the nodes have been told to start
    LEAVING = auto()  # no output is wanted, and nodes have yet to confirm their cancels
    CLOSED = auto()


class Avoided:
    """The processes that failed a request, each until the request may be given to it again."""

    __slots__ = ("_until_s",)

    def __init__(self) -> None:
        self._until_s: dict[NodeProcess, float] = {}

    def add(self, now_s: float, process: NodeProcess) -> None:
        self._until_s[process] = now_s + AVOID_S

    def at(self, now_s: float) -> frozenset[NodeProcess]:
        return frozenset(process for process, at_s in self._until_s.items() if now_s < at_s)


@dataclass(slots=True, frozen=True)
class Loss:
    """Why a leg or some of its sequences were lost, and the nodes that the next attempt avoids."""

    failure: Failure
    blamed: frozenset[NodeId] = frozenset()
    is_death: bool = False  # a node is gone or counts as gone
    is_of_handoff: bool = False  # decode could not take over from prefill

    @classmethod
    def broken(cls, message: str, *blamed: NodeId) -> "Loss":
        return cls(NodeError(message, code="stream_broken").to_failure(), frozenset(blamed))

    def is_free(self, num_new_tokens: int) -> bool:
        """Return whether the loss of an attempt that brought that many tokens is free.

        A free loss uses up no attempt. The first token of an attempt is computed with its prompt. A
        sequence that kills every node in its first decode step gets one token per attempt, so a
        loss by a node's death is free only from two tokens on.
        """
        if self.failure.code == DRAINING or (self.failure.code == NOT_CACHED and not self.blamed):
            return True
        return num_new_tokens > (1 if self.is_death else 0)


@dataclass(slots=True, eq=False)
class Leg:
    """`open` holds the choices that still get their tokens from this leg."""

    key: Key  # the key of its lowest choice
    choices: tuple[int, ...]
    num_tokens: int  # tokens that were sent with it, which is the position of its first new token
    state: LegState = LegState.WAITING
    prefill: NodeId | None = None
    decode: NodeId | None = None
    epochs: dict[NodeId, Epoch] = field(default_factory=dict)  # of both
    max_uncached_tokens: int | None = None
    open: set[int] = field(default_factory=set)
    accepted: bool = False  # decode has reserved what it needs
    streaming: bool = False  # decode has sent tokens, so it no longer needs prefill
    first_tokens: tuple[FirstToken, ...] | None = None
    charged: set[NodeId] = field(default_factory=set)
    unconfirmed: dict[NodeId, set[Key]] = field(default_factory=dict)  # keys of unconfirmed cancels
    heard_s: float = 0.0
    leave_by_s: float = 0.0

    @classmethod
    def running(cls, now_s: float, key: Key, num_tokens: int, process: NodeProcess) -> "Leg":
        """Return the leg of a sequence that a decode node already runs."""
        return cls(
            key,
            (key.choice,),
            num_tokens,
            LegState.LIVE,
            decode=process[0],
            epochs=dict([process]),
            open={key.choice},
            accepted=True,
            streaming=True,
            charged={process[0]},
            heard_s=now_s,
        )

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(self.key.of_choice(choice) for choice in self.choices)

    def assured_firsts(self) -> list[tuple[int, int, FinishReason | None]]:
        """Return (choice, first token, end) of all choices once they may be delivered.

        No token may go to the caller before the rest of the output is assured.
        """
        firsts = self.first_tokens or ()
        is_whole = all(first.finish_reason is not None for first in firsts)
        if self.decode is not None and not self.accepted and not is_whole:
            return []
        # A leg without a decode node has to generate only one token.
        last: FinishReason | None = "length" if self.decode is None else None
        return [
            (choice, first.token_id, first.finish_reason or last)
            for choice, first in zip(self.choices, firsts, strict=bool(firsts))
        ]

    @property
    def pair(self) -> tuple[NodeProcess, NodeProcess] | None:
        """Return the processes of a handoff, prefill first; None if this leg has no handoff."""
        if self.prefill is None or self.decode is None:
            return None
        return self.process(self.prefill), self.process(self.decode)

    def process(self, node: NodeId) -> NodeProcess:
        return node, self.epochs.get(node, Epoch(""))

    def is_named(self, node: NodeId, keys: Iterable[Key]) -> bool:
        """Return whether `node` works for this leg and some of `keys` belong to it."""
        works = self.state is LegState.LIVE and node in (self.prefill, self.decode)
        return works and not set(keys).isdisjoint(self.keys)

    def loss_of(self, node: NodeId, failure: Failure) -> Loss:
        """Return the loss that a failure at `node` means while this leg is wanted."""
        if failure.code == Cancelled.code:
            # This router cancelled nothing, so the node or its peer has lost its channel to this
            # router.
            text = f"{node} gave up the request because a channel to this router broke"
            return Loss(NodeError(text).to_failure(), frozenset({node}), is_death=True)
        if failure.code == NOT_CACHED and self.max_uncached_tokens is not None:
            # The router's expectation was wrong, and the node is not at fault.
            return Loss(failure)
        if self.pair is None or self.streaming or failure.http_status != TransferError.http_status:
            return Loss(failure, frozenset({node}))
        # A single failure does not show which end is at fault, so the request avoids both.
        return Loss(failure, frozenset(name for name, _ in self.pair), is_of_handoff=True)

    def wish(
        self,
        request: Request,
        output: list[int],
        avoid: frozenset[NodeProcess],
        *,
        is_suspect: bool,
        is_remote_only: bool,
    ) -> Place:
        """Return the command that asks for nodes for this leg."""
        num_prompt, max_tokens = len(request.token_ids), request.sampling.max_tokens
        return Place(
            self.key,
            self.num_tokens,
            len(self.choices),
            wants_decode=max_tokens - len(output) > 1,
            num_final_tokens=num_prompt + max_tokens,
            avoid=avoid,
            is_resume=bool(output),
            is_suspect=is_suspect,
            is_remote_only=is_remote_only,
            block_keys=request.block_keys,
        )

    def orders(self, request: Request, output: list[int]) -> list[Send]:
        """Return the messages that start this leg. They are sent at the same time."""
        token_ids = [*request.token_ids, *output]
        num_prompt, num_choices = len(request.token_ids), len(self.choices)
        sends: list[Send] = []
        if self.decode is not None:
            decode = Decode(
                self.key,
                token_ids,
                num_prompt,
                request.sampling,
                num_choices,
                self.prefill,
                request.kept,
                self.max_uncached_tokens,
            )
            sends.append(Send(self.decode, decode))
        if self.prefill is not None:
            prefill = Prefill(
                self.key, token_ids, num_prompt, request.sampling, num_choices, self.decode
            )
            sends.append(Send(self.prefill, prefill))
        return sends

    def releases(self, nodes: Set[NodeId]) -> list[Release]:
        """Return commands that remove this leg's charge from `nodes` that still have it."""
        given = sorted(self.charged & nodes)
        self.charged.difference_update(given)
        return [Release(node, self.key) for node in given]

    def confirm(self, node: NodeId, keys: tuple[Key, ...]) -> None:
        """Note that `node` will send nothing more for `keys`."""
        if (unconfirmed := self.unconfirmed.get(node)) is not None:
            unconfirmed.difference_update(keys)
            if not unconfirmed:
                del self.unconfirmed[node]


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of the answer, over all attempts. `leg` is None once the choice has ended."""

    index: int
    leg: Leg | None = None
    attempt: int = 0
    num_losses: int = 0  # attempts in a row without progress
    output: list[int] = field(default_factory=list)  # all tokens that the caller has got
    # How many of them another router delivered; one of them may still arrive here.
    num_received: int = 0


def kills_nodes(num_nodes: int) -> Failure:
    """Return why a request gets no more nodes. Clients would repeat it if it were a 5xx status."""
    text = f"{num_nodes} nodes died of an error in a step of this request"
    return RequestError(text, code="request_kills_nodes", http_status=422).to_failure()
