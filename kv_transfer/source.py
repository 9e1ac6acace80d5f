"""One handoff as prefill holds it: announced blocks under a lease, until nobody reads them.

The connector feeds it scheduler events and decode's messages. Blocks that were announced are given
back only after decode's word (Done, Declined) or the end of the lease: a lost channel does not
prove that a reader is gone. `Landing` and `Renew` extend the lease and are confirmed by `Started`,
because a renewal that arrives too late must not be believed by the one who sent it.
"""

from dataclasses import dataclass
from enum import Enum, auto

from baton.kv_transfer.effects import Effects, PeerName
from baton.kv_transfer.interfaces import Complete, Offer, Publish, Released, Withdraw
from baton.kv_transfer.state_table import StateTable, rule
from baton.protocol.errors import Failure, InvariantBroken, TransferError
from baton.protocol.messages import (
    Declined,
    Done,
    End,
    Landing,
    Renew,
    Span,
    Started,
    Withdrawn,
)


class SourceState(Enum):
    OFFERED = auto()  # Started is sent; decode has no blocks for it yet
    CLAIMED = auto()  # decode has its landing blocks and reads
    COMPLETE = auto()  # End is sent
    LEAVING = auto()  # given up, but announced blocks may still be read
    RELEASED = auto()


@dataclass(slots=True, frozen=True)
class LeaseEnded:
    """Nobody renewed in time."""


@dataclass(slots=True, frozen=True)
class ChannelLost:
    """There is no channel to that process any more, or it was refused."""

    failure: Failure


@dataclass(slots=True, frozen=True)
class Reconnected:
    """There is a new channel to the process that this handoff was offered to."""


SourceEvent = (
    Publish | Complete | Withdraw | Landing | Renew | Done | Declined
    | ChannelLost | Reconnected | LeaseEnded
)  # fmt: skip

LIVE = "OFFERED CLAIMED COMPLETE"
LEASE = "the lease: `lease_s` after Started, Landing or the last Renew"
TABLE = StateTable(
    "source",
    {
        "OFFERED": LEASE,
        "CLAIMED": LEASE,
        "COMPLETE": LEASE,
        "LEAVING": "the lease, which nothing extends any more",
    },
    (
        rule("OFFERED CLAIMED", "Publish", "=", "sends Span"),
        rule("OFFERED CLAIMED", "Complete", "COMPLETE", "sends End"),
        rule("COMPLETE", "Publish", "", "cannot be"),
        rule("COMPLETE", "Complete", "", "cannot be"),
        rule("LEAVING", "Publish", "=", "nothing: nobody needs it any more"),
        rule("LEAVING", "Complete", "=", "nothing: nobody needs it any more"),
        rule("OFFERED", "Landing", "CLAIMED", "extends the lease, confirms with Started"),
        rule("CLAIMED COMPLETE", "Landing", "=", "extends the lease, confirms with Started"),
        rule(LIVE, "Renew", "=", "extends the lease, confirms with Started"),
        rule("LEAVING", "Landing", "=", "sends Withdrawn"),
        rule("LEAVING", "Renew", "=", "sends Withdrawn"),
        rule("OFFERED CLAIMED", "Done", "RELEASED", "reports a failure: nothing can be done yet"),
        rule("COMPLETE", "Done", "RELEASED", "reports success"),
        rule("LEAVING", "Done", "RELEASED", "reports why it was given up, or success after End"),
        rule(LIVE, "Declined", "RELEASED", "reports decode's failure"),
        rule("LEAVING", "Declined", "RELEASED", "reports why it was given up"),
        rule(
            LIVE,
            "Withdraw",
            "LEAVING RELEASED",
            "sends Withdrawn; released at once if no block was announced",
        ),
        rule("LEAVING", "Withdraw", "=", "nothing"),
        rule(LIVE, "ChannelLost", "LEAVING RELEASED", "released at once if no block was announced"),
        rule("LEAVING", "ChannelLost", "=", "nothing: the reader may live on"),
        rule(LIVE, "Reconnected", "=", "nothing"),
        rule("LEAVING", "Reconnected", "=", "sends Withdrawn again"),
        rule(LIVE, "LeaseEnded", "RELEASED", "sends Withdrawn, reports that the lease ended"),
        rule("LEAVING", "LeaseEnded", "RELEASED", "reports why it was given up"),
    ),
)


class SourceHandoff:
    """Sends Started when made. `deadline_s` is the end of the lease."""

    def __init__(
        self, now_s: float, offer: Offer, peer: PeerName, lease_s: float, out: Effects
    ) -> None:
        self.key = offer.key
        self.peer = peer
        self.state = SourceState.OFFERED
        self.lease_s = lease_s
        self.deadline_s = now_s + lease_s
        self._started = Started(offer.key, offer.num_tokens, offer.num_blocks, lease_s)
        self._num_announced_blocks = 0
        self._num_spans = 0
        self._is_complete = False
        self.failure: Failure | None = None
        out.tell(peer, self._started)

    def on(self, now_s: float, event: SourceEvent, out: Effects) -> None:
        before = self.state
        if before is SourceState.RELEASED:
            raise InvariantBroken(f"{self.key} was released before {type(event).__name__}")
        if before is SourceState.LEAVING:
            self._on_leaving(event, out)
        else:
            self._on_live(now_s, event, out)
        TABLE.check(before, event, self.state)

    # --- inside --------------------------------------------------------------------------------

    def _on_live(self, now_s: float, event: SourceEvent, out: Effects) -> None:
        match event:
            case Publish() | Complete() if self.state is SourceState.COMPLETE:
                raise InvariantBroken(f"{self.key} was complete before {type(event).__name__}")
            case Publish():
                self._announce(event, out)
            case Complete(tokens=tokens):
                if self._num_announced_blocks != self._started.num_blocks:
                    raise InvariantBroken(f"{self.key} is complete without all of its blocks")
                self.state, self._is_complete = SourceState.COMPLETE, True
                out.tell(self.peer, End(self.key, self._num_spans, tokens))
            case Landing() | Renew():
                self.deadline_s = now_s + self.lease_s
                out.tell(self.peer, self._started)
                if self.state is SourceState.OFFERED and isinstance(event, Landing):
                    self.state = SourceState.CLAIMED
            case Done() if self.state is SourceState.COMPLETE:
                self._release(None, out)
            case Done():
                error = TransferError("decode was done with a prompt that had not ended")
                self._release(error.to_failure(), out)
            case Declined(failure=failure):
                self._release(failure, out)
            case Withdraw(failure=failure):
                out.tell(self.peer, Withdrawn(self.key, failure))
                self._leave(failure, out)
            case ChannelLost(failure=failure):
                self._leave(failure, out)
            case LeaseEnded():
                text = f"decode node {self.peer[0]} let the lease of {self.lease_s:g} s end"
                failure = TransferError(text, code="lease_expired").to_failure()
                out.tell(self.peer, Withdrawn(self.key, failure))
                self._release(failure, out)
            case Reconnected():
                pass

    def _on_leaving(self, event: SourceEvent, out: Effects) -> None:
        match event:
            case Landing() | Renew() | Reconnected():
                assert self.failure is not None
                out.tell(self.peer, Withdrawn(self.key, self.failure))
            case Done():
                self._release(None if self._is_complete else self.failure, out)
            case Declined() | LeaseEnded():
                self._release(self.failure, out)
            case Publish() | Complete() | Withdraw() | ChannelLost():
                pass

    def _announce(self, event: Publish, out: Effects) -> None:
        if event.first_block != self._num_announced_blocks:
            raise InvariantBroken(f"{self.key} publishes block {event.first_block} out of order")
        span = Span(
            self.key,
            self._num_spans,
            event.first_block,
            event.block_ids,
            event.generations,
            event.valid_tokens,
        )
        self._num_spans += 1
        self._num_announced_blocks += len(event.block_ids)
        out.tell(self.peer, span)

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
