"""One handoff on the prefill side, which holds announced blocks under a lease until decode is done.

The connector feeds it the scheduler's events and decode's messages. Announced blocks are given back
only after decode's answer (Done, Declined) or at the end of the lease: a lost channel does not
prove that the reader is gone. Renew extends the lease and is confirmed by Renewed, because decode
must not rely on a renewal that came too late.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import assert_never

from baton.kv_transfer.effects import Effects
from baton.kv_transfer.interfaces import LEASE_EXPIRED, Offer, PeerName, Released
from baton.protocol.errors import Failure, InvariantBroken, TransferError
from baton.protocol.messages import (
    Declined,
    Done,
    End,
    Offered,
    Renew,
    Renewed,
    Span,
    Withdrawn,
)


class SourceState(Enum):
    OFFERED = auto()  # Offered is sent, spans follow
    COMPLETE = auto()  # End is sent
    LEAVING = auto()  # given up, but decode may still read announced blocks
    RELEASED = auto()


@dataclass(slots=True, frozen=True)
class LeaseEnded:
    """Decode did not renew in time."""


@dataclass(slots=True, frozen=True)
class ChannelLost:
    """The channel to the decode process is gone, or the process was refused."""

    failure: Failure


@dataclass(slots=True, frozen=True)
class Reconnected:
    """There is a new channel to the process to which this handoff was offered."""


SourceEvent = (
    Span | End | Withdrawn | Renew | Done | Declined | ChannelLost | Reconnected | LeaseEnded
)


class SourceHandoff:
    """The constructor sends Offered. `deadline_s` is the end of the lease in every state."""

    def __init__(
        self, now_s: float, offer: Offer, peer: PeerName, lease_s: float, out: Effects
    ) -> None:
        self.key = offer.key
        self.peer = peer
        self.state = SourceState.OFFERED
        self.lease_s = lease_s
        self.deadline_s = now_s + lease_s
        self.failure: Failure | None = None
        self._num_blocks = offer.num_blocks
        self._num_announced_blocks = 0
        self._is_complete = False
        out.tell(peer, Offered(offer.key, offer.num_tokens, offer.num_blocks, lease_s))

    def on(self, now_s: float, event: SourceEvent, out: Effects) -> None:
        match self.state:
            case SourceState.OFFERED | SourceState.COMPLETE:
                self._on_live(now_s, event, out)
            case SourceState.LEAVING:
                self._on_leaving(event, out)
            case SourceState.RELEASED:
                raise InvariantBroken(f"{self.key} was released before {type(event).__name__}")
            case _:
                assert_never(self.state)

    # --- inside --------------------------------------------------------------------------------

    def _on_live(self, now_s: float, event: SourceEvent, out: Effects) -> None:
        match event:
            case Span():
                self._announce(event, out)
            case End():
                self._complete(event, out)
            case Renew():
                self.deadline_s = now_s + self.lease_s
                out.tell(self.peer, Renewed(self.key))
            case Done():
                error = TransferError("decode reported Done for a prompt that had not ended")
                self._release(None if self._is_complete else error.to_failure(), out)
            case Declined(failure=failure):
                self._release(failure, out)
            case Withdrawn(failure=failure):
                out.tell(self.peer, event)
                self._leave(failure, out)
            case ChannelLost(failure=failure):
                self._leave(failure, out)
            case LeaseEnded():
                text = f"decode node {self.peer[0]} let the lease of {self.lease_s:g} s end"
                failure = TransferError(text, code=LEASE_EXPIRED).to_failure()
                out.tell(self.peer, Withdrawn(self.key, failure))
                self._release(failure, out)
            case Reconnected():
                pass
            case _:
                assert_never(event)

    def _on_leaving(self, event: SourceEvent, out: Effects) -> None:
        match event:
            case Renew() | Reconnected():
                assert self.failure is not None
                out.tell(self.peer, Withdrawn(self.key, self.failure))
            case Done():
                self._release(None if self._is_complete else self.failure, out)
            case Declined() | LeaseEnded():
                self._release(self.failure, out)
            case Span() | End() | Withdrawn() | ChannelLost():
                pass
            case _:
                assert_never(event)

    def _announce(self, span: Span, out: Effects) -> None:
        if self._is_complete or span.first_block != self._num_announced_blocks:
            raise InvariantBroken(f"{self.key} announces block {span.first_block} out of order")
        self._num_announced_blocks += len(span.block_ids)
        out.tell(self.peer, span)

    def _complete(self, end: End, out: Effects) -> None:
        if self._is_complete or self._num_announced_blocks != self._num_blocks:
            raise InvariantBroken(f"{self.key} ends twice or without all of its blocks")
        self.state, self._is_complete = SourceState.COMPLETE, True
        out.tell(self.peer, end)

    def _leave(self, failure: Failure, out: Effects) -> None:
        self.failure = failure
        if self._num_announced_blocks == 0:
            self._release(failure, out)
        else:
            self.state = SourceState.LEAVING

    def _release(self, failure: Failure | None, out: Effects) -> None:
        self.state = SourceState.RELEASED
        self.failure = failure
        out.reports.append(Released(self.key, failure))
