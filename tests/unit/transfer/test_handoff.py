"""Messages of keys that have ended, have not begun, or were overtaken; the reader's lease."""

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.handoff import Parking, ReaderLease, Tombstones
from baton.kv_transfer.interfaces import Abandon, BeginReceive, Expect, ReceiveEnded, Released
from baton.protocol.ids import Epoch
from baton.protocol.messages import (
    BlockRange,
    Declined,
    Done,
    End,
    FirstToken,
    Offered,
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
    offer,
    offered,
    said,
)

WITHDRAWN, DECLINED = Withdrawn(key(), FAILURE), Declined(key(), FAILURE)
BLOCK_RANGE, END = BlockRange(key(), 0, (1, 2), (0, 0)), End(key(), (FirstToken(1),))


def decode() -> NodeConnector:
    return connectors.decode(*heard(PREFILL, hello(PREFILL)))


def prefill() -> NodeConnector:
    return connectors.prefill(offer(), *heard(DECODE, hello(DECODE)))


def test_an_offer_that_comes_first_waits_for_its_request() -> None:
    connector = decode()
    step = connector.step(1.0, heard(PREFILL, offered()))
    assert (step.reports, said(step), step.wake_at_s) == ([], [], 6.0)
    step = connector.step(3.0, [Expect(key(), P)])
    assert step.reports == [offered()]
    assert step.wake_at_s == 11.0  # a third of a lease after it came


def test_an_offer_whose_request_never_comes_is_declined_for_good() -> None:
    connector = decode()
    connector.step(1.0, heard(PREFILL, offered()))
    [declined] = said(connector.step(6.0, []))
    assert isinstance(declined, Declined)
    assert declined.failure.code == "not_expected"
    step = connector.step(7.0, [Expect(key(), P)])
    assert step.reports == [ReceiveEnded(key(), declined.failure)]


def test_an_abandoned_key_declines_what_still_comes_for_it() -> None:
    connector = decode()
    step = connector.step(1.0, [Expect(key(), P), Abandon(key(), FAILURE)])
    assert (step.reports, said(step)) == ([ReceiveEnded(key(), FAILURE)], [])
    for late in (offered(), END, WITHDRAWN):
        assert said(connector.step(2.0, heard(PREFILL, late))) == [DECLINED]
    assert said(connector.step(3.0, heard(PREFILL, BLOCK_RANGE, Renewed(key())))) == []


def test_a_landed_key_says_done_again() -> None:
    connector = decode()
    connector.step(1.0, [Expect(key(), P), *heard(PREFILL, offered(), BLOCK_RANGE, END)])
    assert said(connector.step(2.0, [BeginReceive(key(), 2, ())])) == [Renew((key(),)), Done(key())]
    assert said(connector.step(3.0, heard(PREFILL, WITHDRAWN))) == [Done(key())]


def test_a_reader_that_renews_what_prefill_has_given_back_is_told_so() -> None:
    connector = prefill()
    connector.step(1.0, [WITHDRAWN])
    step = connector.step(2.0, heard(DECODE, Renew((key(),)), Renew((key(), key("unknown")))))
    withdrawn = said(step)
    assert withdrawn[:2] == [WITHDRAWN] * 2
    assert isinstance(withdrawn[2], Withdrawn)
    assert withdrawn[2].key == key("unknown")
    assert step.reports == []


def test_events_that_crossed_the_end_mean_nothing() -> None:
    connector = prefill()
    step = connector.step(1.0, heard(DECODE, DECLINED))
    assert step.reports == [Released(key(), FAILURE)]
    step = connector.step(2.0, [BLOCK_RANGE, END, WITHDRAWN, *heard(DECODE, Done(key()), DECLINED)])
    assert (step.reports, step.commands) == ([], [])


def test_a_newer_attempt_ends_the_older_one_on_both_sides() -> None:
    step = prefill().step(1.0, [offer(attempt=1)])
    assert [report.key for report in step.reports] == [key()]
    target = decode()
    target.step(1.0, [Expect(key(), P)])
    step = target.step(2.0, [Expect(key(attempt=1), P)])
    assert [report.key for report in step.reports] == [key()]


def test_an_older_attempt_that_comes_late_is_refused_on_both_sides() -> None:
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


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    stones: Tombstones[int] = Tombstones(max_keys=2)
    for number, name in enumerate("abc"):
        stones.bury(key(name), number)
        stones.note_attempt(key(name, attempt=1))
    assert [stones.answer(key(name)) for name in "abc"] == [None, 1, 2]
    assert [stones.is_superseded(key(name)) for name in "abc"] == [False, True, True]


def test_parking_is_bounded_in_keys_and_messages() -> None:
    peer = (D, Epoch("e"))
    parking = Parking(max_keys=1, max_messages=2)
    other = Offered(key("other"), 8, 2, 30.0)
    assert parking.park(0.0, peer, offered())
    assert not parking.park(0.0, peer, other)
    assert parking.park(0.0, peer, BLOCK_RANGE)
    assert not parking.park(0.0, peer, END)
    assert parking.take(key()) is not None
    assert parking.park(0.0, peer, other)


def test_a_renewal_proves_from_its_sending_once_it_is_confirmed() -> None:
    lease = ReaderLease(now_s=0.0, lease_s=30.0)
    assert (lease.renew_at_s, lease.limit_s) == (10.0, 30.0)
    lease.renewed(5.0)
    lease.renewed(11.0)
    assert lease.renew_at_s == 21.0
    assert lease.limit_s == 30.0, "a source that confirms nothing is given up"
    assert (lease.covers(6.0), lease.may_cover(6.0)) == (False, True)
    assert lease.confirmed()
    assert (lease.covers(35.0), lease.covers(35.1), lease.limit_s) == (True, False, 35.0)
    assert lease.confirmed()
    assert lease.limit_s == 41.0
    assert not lease.confirmed()
