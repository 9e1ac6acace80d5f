"""What a handoff's two ends do with messages that are late, early, out of order or wrong.

A peer that breaks the protocol ends its own handoff and nothing else; a scheduler must not.
"""

import pytest

from baton.kv_transfer.bookkeeping import Parking, ReaderLease, Tombstones
from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    LEASE_EXPIRED,
    Abandon,
    BeginReceive,
    CancelRead,
    Expect,
    FromRank,
    PeerLost,
    PeerRank,
    PeerUp,
    Read,
    ReadEnded,
    ReceiveEnded,
    Released,
    ToPeer,
    ToRank,
)
from baton.kv_transfer.receive import SHUTDOWN_TIMEOUT_S, WAIT_S
from baton.protocol.errors import InvariantBroken
from baton.protocol.ids import Epoch
from baton.protocol.messages import (
    BlockRange,
    Declined,
    Done,
    End,
    FirstToken,
    Offered,
    PeerMessage,
    Renew,
    Renewed,
    Withdrawn,
)
from tests.support import connectors
from tests.support.connectors import (
    DECODE,
    FAILURE,
    PREFILL,
    D,
    P,
    heard,
    hello,
    key,
    node,
    offer,
    offered,
    said,
)

BLOCK_RANGE = BlockRange(key(), 0, (1, 2), (0, 0))
END = End(key(), (FirstToken(1),))
UP = FromRank(0, PeerUp(PeerRank(PREFILL.epoch), "shm"))
WITHDRAWN = Withdrawn(key(), FAILURE)
DECLINED = Declined(key(), FAILURE)


def decode() -> NodeConnector:
    return connectors.decode(*heard(PREFILL, hello(PREFILL)))


def prefill() -> NodeConnector:
    return connectors.prefill(offer(), *heard(DECODE, hello(DECODE)))


def test_an_offer_whose_request_never_comes_is_declined_for_good():
    connector = decode()
    connector.step(1.0, heard(PREFILL, offered()))
    [declined] = said(connector.step(6.0, []))
    assert isinstance(declined, Declined)
    assert declined.failure.code == "not_expected"
    step = connector.step(7.0, [Expect(key(), P)])
    assert step.reports == [ReceiveEnded(key(), declined.failure)]


def test_an_abandoned_key_declines_what_still_comes_for_it():
    connector = decode()
    step = connector.step(1.0, [Expect(key(), P), Abandon(key(), FAILURE)])
    assert (step.reports, said(step)) == ([ReceiveEnded(key(), FAILURE)], [])
    for late in (offered(), END, WITHDRAWN):
        assert said(connector.step(2.0, heard(PREFILL, late))) == [DECLINED]
    assert said(connector.step(3.0, heard(PREFILL, BLOCK_RANGE, Renewed(key())))) == []


def test_a_landed_key_says_done_again():
    connector = decode()
    connector.step(
        1.0, [Expect(key(), P), *heard(PREFILL, offered(), BLOCK_RANGE, END)]
    )
    assert said(connector.step(2.0, [BeginReceive(key(), 2, ())])) == [
        Renew((key(),)),
        Done(key()),
    ]
    assert said(connector.step(3.0, heard(PREFILL, WITHDRAWN))) == [Done(key())]


def test_a_reader_that_renews_what_prefill_has_given_back_is_told_so():
    connector = prefill()
    connector.step(1.0, [WITHDRAWN])
    step = connector.step(
        2.0, heard(DECODE, Renew((key(),)), Renew((key(), key("unknown"))))
    )
    withdrawn = said(step)
    assert withdrawn[:2] == [WITHDRAWN] * 2
    assert isinstance(withdrawn[2], Withdrawn)
    assert withdrawn[2].key == key("unknown")
    assert step.reports == []


def test_a_newer_attempt_ends_the_older_one_on_both_sides():
    step = prefill().step(1.0, [offer(attempt=1)])
    assert [report.key for report in step.reports] == [key()]
    target = decode()
    target.step(1.0, [Expect(key(), P)])
    step = target.step(2.0, [Expect(key(attempt=1), P)])
    assert [report.key for report in step.reports] == [key()]


def test_an_older_attempt_that_comes_late_is_refused_on_both_sides():
    source = prefill()
    source.step(1.0, [offer("x", attempt=1)])
    [released] = source.step(2.0, [offer("x")]).reports
    assert isinstance(released, Released)
    assert released.failure is not None
    target = decode()
    target.step(1.0, [Expect(key(attempt=1), P)])
    [declined] = said(target.step(2.0, heard(PREFILL, offered())))
    assert isinstance(declined, Declined)
    assert isinstance(target.step(3.0, [Expect(key(), P)]).reports[0], ReceiveEnded)


def test_tombstones_are_bounded_and_the_oldest_goes_first():
    stones: Tombstones[int] = Tombstones(max_keys=2)
    for number, name in enumerate("abc"):
        stones.bury(key(name), number)
        stones.note_attempt(key(name, attempt=1))
    assert [stones.answer(key(name)) for name in "abc"] == [None, 1, 2]
    assert [stones.is_superseded(key(name)) for name in "abc"] == [False, True, True]


def test_parking_is_bounded_and_needs_an_offer_of_the_same_peer_first():
    peer = (D, Epoch("e"))
    parking = Parking(max_messages=2)
    assert not parking.park(0.0, peer, BLOCK_RANGE)
    assert parking.park(0.0, peer, offered())
    assert not parking.park(0.0, (D, Epoch("f")), BLOCK_RANGE)
    assert parking.park(0.0, peer, BLOCK_RANGE)
    other = Offered(key("other"), 8, 2, 30.0)
    assert not parking.park(0.0, peer, other)
    assert parking.take(key()) is not None
    assert parking.park(0.0, peer, other)


def test_a_renewal_proves_from_its_sending_once_it_is_confirmed():
    lease = ReaderLease(now_s=0.0, lease_s=30.0)
    assert (lease.renew_at_s, lease.limit_s) == (10.0, 30.0)
    lease.renewed(5.0)
    lease.renewed(11.0)
    assert lease.renew_at_s == 21.0
    assert lease.limit_s == 30.0, "a source that confirms nothing is given up"
    assert (lease.covers(6.0), lease.may_cover(6.0)) == (False, True)
    assert lease.confirmed()
    assert (lease.covers(35.0), lease.covers(35.1), lease.limit_s) == (
        True,
        False,
        35.0,
    )
    assert lease.confirmed()
    assert lease.limit_s == 41.0
    assert not lease.confirmed()


def expecting(*messages: PeerMessage) -> NodeConnector:
    greeted = heard(PREFILL, hello(PREFILL), *messages)
    return connectors.decode(Expect(key(), P), UP, *greeted)


def announcing() -> NodeConnector:
    """One that has announced the first of two blocks."""
    greeted = heard(DECODE, hello(DECODE))
    return connectors.prefill(offer(), *greeted, BlockRange(key(), 0, (1,), (0,)))


@pytest.mark.parametrize(
    "messages",
    [
        (BLOCK_RANGE,),
        (END,),
        (Renewed(key()),),
        (offered(num_blocks=65),),
        (offered(lease_s=0.0),),
        (offered(), offered()),
        (offered(), Renewed(key())),
        (offered(), END),
        (offered(), BlockRange(key(), 1, (1,), (0,))),
        (offered(), BlockRange(key(), 0, (1, 2), (0,))),
        (offered(), BlockRange(key(), 0, (), ())),
        (offered(), BlockRange(key(), 0, (1, 2, 3), (0, 0, 0))),
        (offered(), BlockRange(key(), 0, (1,), (0,)), END),
        (offered(), BLOCK_RANGE, BLOCK_RANGE),
        (offered(), BLOCK_RANGE, END, END),
    ],
)
def test_what_makes_no_sense_ends_the_receive_and_is_declined(messages):
    step = expecting(*messages[:-1]).step(1.0, heard(PREFILL, messages[-1]))
    [ended] = step.reports
    assert isinstance(ended, ReceiveEnded)
    declined = step.commands[-1]
    assert isinstance(declined, ToPeer)
    assert declined.message == Declined(key(), ended.failure)


def test_blocks_that_the_source_does_not_have_are_not_read():
    connector = expecting(offered(), BlockRange(key(), 0, (1, 64), (0, 0)))
    step = connector.step(1.0, [BeginReceive(key(), 0, (20, 21))])
    assert isinstance(step.reports[0], ReceiveEnded)
    assert not [
        c
        for c in step.commands
        if isinstance(c, ToRank) and isinstance(c.command, Read)
    ]


def test_a_prompt_of_another_length_than_decode_has_is_not_landed():
    [ended] = (
        expecting(offered()).step(1.0, [BeginReceive(key(), 0, (20, 21, 22))]).reports
    )
    assert isinstance(ended, ReceiveEnded)


def test_another_node_cannot_offer_or_end_what_was_expected_of_the_first():
    other = node("q", "prefill")
    connector = expecting()
    messages = (hello(other), offered(), BLOCK_RANGE, Renewed(key()))
    step = connector.step(1.0, heard(other, *messages))
    assert step.reports == []
    assert [type(message) for message in said(step)][1:] == [Declined]
    assert connector.step(2.0, heard(PREFILL, offered())).reports == [offered()]


def reading() -> NodeConnector:
    """One that reads two block ranges, under tickets 1 and 2."""
    ranges = (BlockRange(key(), index, (1 + index,), (0,)) for index in range(2))
    connector = expecting(offered(), *ranges, END)
    connector.step(1.0, [BeginReceive(key(), 0, (20, 21))])
    return connector


def ended(ticket: int, *, quiesced: bool = True) -> FromRank:
    return FromRank(0, ReadEnded(ticket, 1.0, 2.0, 64, FAILURE, quiesced))


@pytest.mark.parametrize(
    "cause", [Abandon(key(), FAILURE), PeerLost(P, PREFILL.epoch), ended(1)]
)
def test_a_failed_receive_ends_once_its_last_read_has_ended(cause):
    connector = reading()
    step = connector.step(2.0, [cause])
    cancelled = [c.command for c in step.commands if isinstance(c, ToRank)]
    assert cancelled == [CancelRead(t) for t in ((2,) if cause == ended(1) else (1, 2))]
    late = heard(PREFILL, hello(PREFILL), BLOCK_RANGE, END, Renewed(key()), WITHDRAWN)
    rest = [] if cause == ended(1) else [ended(1)]
    assert (
        connector.step(3.0, [UP, *late, *rest, Abandon(key(), FAILURE)]).reports == []
    )
    [report] = connector.step(4.0, [ended(2)]).reports
    assert isinstance(report, ReceiveEnded)
    assert report.quarantined == ()


def test_blocks_of_reads_that_never_end_are_quarantined():
    connector = reading()
    connector.step(2.0, [ended(1, quiesced=False)])
    step = connector.step(2.0 + SHUTDOWN_TIMEOUT_S, [])
    assert step.reports == [ReceiveEnded(key(), FAILURE, quarantined=(20, 21))]


def test_a_lease_is_renewed_thrice_while_it_lasts():
    connector = expecting(offered())
    connector.step(10.0, [])
    assert said(connector.step(20.0, heard(PREFILL, Renewed(key())))) == [
        Renew((key(),))
    ]
    assert connector.step(21.0, heard(PREFILL, Renewed(key()))).wake_at_s == 30.0


def test_what_never_comes_ends_the_wait():
    [report] = expecting().step(WAIT_S, []).reports
    assert isinstance(report, ReceiveEnded)
    assert report.failure.code == "transfer_timeout"
    [released] = announcing().step(30.0, []).reports
    assert isinstance(released, Released)
    assert released.failure is not None
    assert released.failure.code == LEASE_EXPIRED


def test_announced_blocks_that_are_given_up_are_held_until_decode_or_the_lease_ends_that():
    ignored = (BlockRange(key(), 1, (2,), (0,)), END, PeerLost(D, DECODE.epoch))
    for at_s, end in (
        (3.0, Done(key())),
        (3.0, Declined(key(), FAILURE)),
        (30.0, None),
    ):
        connector = announcing()
        step = connector.step(1.0, [WITHDRAWN])
        assert (step.reports, said(step)) == ([], [WITHDRAWN])
        assert said(connector.step(2.0, heard(DECODE, Renew((key(),))))) == [WITHDRAWN]
        assert connector.step(2.0, ignored[: 2 if end else 3]).reports == []
        step = connector.step(at_s, heard(DECODE, end) if end else [])
        assert step.reports == [Released(key(), FAILURE)]


def test_done_before_the_end_releases_with_a_failure():
    for early in ((), (Renew((key(),)),)):
        [released] = announcing().step(1.0, heard(DECODE, *early, Done(key()))).reports
        assert isinstance(released, Released)
        assert released.failure is not None


def test_another_node_cannot_release_what_was_offered_to_the_first():
    other = node("e", "decode")
    messages = (hello(other), Done(key()), Declined(key(), FAILURE))
    assert announcing().step(1.0, heard(other, *messages)).reports == []


def test_a_decode_node_that_greets_again_has_lost_what_it_had():
    connector = announcing()
    connector.step(1.0, heard(DECODE, Renew((key(),))))
    step = connector.step(2.0, heard(DECODE, hello(DECODE)))
    assert [type(message) for message in said(step)] == [Withdrawn]


@pytest.mark.parametrize(
    ("connector", "events"),
    [
        (announcing, [offer()]),
        (announcing, [BlockRange(key(), 0, (1,), (0,))]),
        (announcing, [END]),
        (announcing, [BlockRange(key(), 1, (2,), (0,)), END, END]),
        (
            announcing,
            [BlockRange(key(), 1, (2,), (0,)), END, BlockRange(key(), 2, (3,), (0,))],
        ),
        (expecting, [Expect(key(), P)]),
        (expecting, [BeginReceive(key(), 0, (20, 21))]),
        (
            expecting,
            [*heard(PREFILL, offered()), *[BeginReceive(key(), 0, (20, 21))] * 2],
        ),
    ],
)
def test_a_scheduler_that_breaks_the_contract_ends_the_process(connector, events):
    with pytest.raises(InvariantBroken):
        connector().step(1.0, events)
