"""The states of a landing, how long each may last, and what each event may do in it.

Used by the landing machine, which checks every transition here, and printed in `docs/transfer.md`.
An event that "cannot be" is a bug of this process and ends it; what a peer sends wrongly only ends
the handoff.
"""

from dataclasses import dataclass
from enum import Enum, auto

from baton.kv_transfer.state_table import StateTable, rule
from baton.protocol.errors import Failure

WAIT_S = 600.0  # the router cancels long before; this only bounds what it forgot
STALL_S = 60.0  # without any end of a read while reads are wanted
DRAIN_S = 60.0  # longer than agents take to tell whether a read is quiet


class LandingState(Enum):
    EXPECTED = auto()  # prefill has not offered it
    OFFERED = auto()  # prefill holds it, the scheduler has no blocks for it yet
    LANDING = auto()  # blocks are there, spans are read
    DRAINING = auto()  # it failed; reads may still write
    LANDED = auto()
    ENDED = auto()


@dataclass(slots=True, frozen=True)
class Broken:
    """The connector says why this landing cannot go on: peer, rank or a newer attempt."""

    failure: Failure


@dataclass(slots=True, frozen=True)
class TimeUp:
    """`deadline_s` has come."""


TABLE = StateTable(
    "landing",
    {
        "EXPECTED": f"{WAIT_S:g} s",
        "OFFERED": f"the proven lease (the first: `lease_s` from Started), {WAIT_S:g} s in all",
        "LANDING": f"the proven lease, {STALL_S:g} s without an end of a read that is wanted, "
        f"{WAIT_S:g} s in all",
        "DRAINING": f"{DRAIN_S:g} s, then the blocks of reads that have not ended are quarantined",
    },
    (
        rule("EXPECTED", "Started", "OFFERED ENDED", "reports Offered; ends if it cannot fit"),
        rule("OFFERED", "Started", "= ENDED", "takes it as the confirmation of a renewal"),
        rule(
            "LANDING",
            "Started",
            "= LANDED DRAINING ENDED",
            "takes it as the confirmation of a renewal, which may be the last thing missing",
        ),
        rule("EXPECTED", "Span", "ENDED", "refuses: it was not offered"),
        rule("OFFERED", "Span", "= ENDED", "keeps it; ends if it does not follow the last one"),
        rule("LANDING", "Span", "= DRAINING ENDED", "reads what is missing here on every rank"),
        rule("EXPECTED", "End", "ENDED", "refuses: it was not offered"),
        rule("OFFERED", "End", "= ENDED", "keeps it; ends if spans are missing"),
        rule("LANDING", "End", "= LANDED DRAINING ENDED", "lands if all is read and proven"),
        rule(
            "OFFERED",
            "Land",
            "LANDING LANDED DRAINING ENDED",
            "sends Landing and reads; lands at once if End is there and nothing is missing",
        ),
        rule("EXPECTED LANDING DRAINING", "Land", "", "cannot be"),
        rule("EXPECTED", "PeerUp", "", "cannot be"),
        rule("OFFERED", "PeerUp", "=", "nothing"),
        rule("LANDING", "PeerUp", "= DRAINING ENDED", "reads what waited for this rank"),
        rule("EXPECTED OFFERED", "ReadEnded", "", "cannot be"),
        rule(
            "LANDING",
            "ReadEnded",
            "= LANDED DRAINING ENDED",
            "counts it; after the last, sends Done and reports Landed; drains if it failed",
        ),
        rule("EXPECTED OFFERED", "Withdrawn", "ENDED", "sends Declined, reports LandingEnded"),
        rule("EXPECTED OFFERED", "Abandon", "ENDED", "sends Declined, reports LandingEnded"),
        rule("EXPECTED OFFERED", "Broken", "ENDED", "sends Declined, reports LandingEnded"),
        rule("EXPECTED OFFERED", "TimeUp", "ENDED", "sends Declined, reports LandingEnded"),
        rule("LANDING", "Withdrawn", "DRAINING ENDED", "cancels its reads"),
        rule("LANDING", "Abandon", "DRAINING ENDED", "cancels its reads"),
        rule("LANDING", "Broken", "DRAINING ENDED", "cancels its reads"),
        rule("LANDING", "TimeUp", "DRAINING ENDED", "cancels its reads"),
        rule(
            "DRAINING",
            "ReadEnded",
            "= ENDED",
            "after the last, sends Declined and reports LandingEnded",
        ),
        rule("DRAINING", "TimeUp", "ENDED", "sends Declined, reports LandingEnded, quarantines"),
        *(
            rule("DRAINING", name, "=", "nothing: it ends anyway")
            for name in ("Started", "Span", "End", "Withdrawn", "Abandon", "Broken", "PeerUp")
        ),
    ),
)
