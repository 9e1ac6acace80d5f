"""Messages of keys that have ended, have not begun, or were overtaken."""

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    Abandon,
    Complete,
    ConnectorEvent,
    ConnectorStep,
    Expect,
    FromPeer,
    Land,
    LandingEnded,
    Offer,
    Offered,
    PeersChanged,
    Publish,
    Released,
    ToPeer,
    Withdraw,
)
from baton.kv_transfer.tombstones import Parking, Tombstones
from baton.protocol.config import TransferConfig
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import (
    PROTOCOL_VERSION,
    Declined,
    Done,
    End,
    FirstToken,
    Landing,
    PeerHello,
    Renew,
    Span,
    Started,
    ToDecode,
    ToPrefill,
    Withdrawn,
)
from tests.support.transfer_world import FAILURE, key, node

PREFILL, DECODE = node("p", "prefill"), node("d", "decode")
P, D = NodeId("p"), NodeId("d")
STARTED = Started(key(), 8, 2, 30.0)


def from_prefill(*messages: ToDecode) -> list[ConnectorEvent]:
    return [FromPeer(P, PREFILL.epoch, message) for message in messages]


def from_decode(*messages: ToPrefill) -> list[ConnectorEvent]:
    return [FromPeer(D, DECODE.epoch, message) for message in messages]


def decode() -> NodeConnector:
    connector = NodeConnector(DECODE, TransferConfig())
    hello = PeerHello(PROTOCOL_VERSION, P, PREFILL.epoch, "model", "layout")
    connector.step(0.0, [PeersChanged((PREFILL,)), *from_prefill(hello)])
    return connector


def prefill() -> NodeConnector:
    connector = NodeConnector(PREFILL, TransferConfig())
    hello = PeerHello(PROTOCOL_VERSION, D, DECODE.epoch, "model", "layout")
    connector.step(0.0, [PeersChanged((DECODE,)), Offer(key(), D, 8, 2), *from_decode(hello)])
    return connector


def said(step: ConnectorStep) -> list[ToDecode | ToPrefill]:
    return [command.message for command in step.commands if isinstance(command, ToPeer)]


def test_an_offer_that_comes_first_waits_for_its_request() -> None:
    connector = decode()
    step = connector.step(1.0, from_prefill(STARTED))
    assert (step.reports, said(step), step.wake_at_s) == ([], [], 6.0)
    step = connector.step(3.0, [Expect(key(), P)])
    assert step.reports == [Offered(key(), 8, 2)]
    assert step.wake_at_s == 11.0  # a third of a lease after it came


def test_an_offer_whose_request_never_comes_is_declined_for_good() -> None:
    connector = decode()
    connector.step(1.0, from_prefill(STARTED))
    [declined] = said(connector.step(6.0, []))
    assert isinstance(declined, Declined)
    assert declined.failure.code == "not_expected"
    step = connector.step(7.0, [Expect(key(), P)])
    assert step.reports == [LandingEnded(key(), declined.failure)]


def test_a_withdrawal_that_comes_first_ends_the_request_when_it_comes() -> None:
    connector = decode()
    step = connector.step(1.0, from_prefill(STARTED, Withdrawn(key(), FAILURE)))
    assert said(step) == [Declined(key(), FAILURE)]
    assert connector.step(2.0, [Expect(key(), P)]).reports == [LandingEnded(key(), FAILURE)]


def test_an_abandoned_key_declines_what_still_comes_for_it() -> None:
    connector = decode()
    step = connector.step(1.0, [Expect(key(), P), Abandon(key(), FAILURE)])
    assert (step.reports, said(step)) == ([LandingEnded(key(), FAILURE)], [])
    assert said(connector.step(2.0, from_prefill(STARTED))) == [Declined(key(), FAILURE)]
    assert said(connector.step(3.0, from_prefill(Withdrawn(key(), FAILURE)))) == [
        Declined(key(), FAILURE)
    ]


def test_a_landed_key_says_done_again() -> None:
    connector = decode()
    end = End(key(), 1, (FirstToken(1),))
    span = Span(key(), 0, 0, (1, 2), (0, 0), 8)
    connector.step(1.0, [Expect(key(), P), *from_prefill(STARTED, span, end)])
    assert said(connector.step(2.0, [Land(key(), 2, ())])) == [Landing(key(), 2), Done(key())]
    assert said(connector.step(3.0, from_prefill(Withdrawn(key(), FAILURE)))) == [Done(key())]


def test_what_prefill_has_given_back_is_withdrawn_from_whoever_still_asks() -> None:
    connector = prefill()
    connector.step(1.0, [Withdraw(key(), FAILURE)])
    step = connector.step(2.0, from_decode(Landing(key(), 0), Renew((key(), key("unknown")))))
    withdrawn = said(step)
    assert withdrawn[:2] == [Withdrawn(key(), FAILURE)] * 2
    assert isinstance(withdrawn[2], Withdrawn)
    assert withdrawn[2].key == key("unknown")
    assert step.reports == []


def test_events_that_crossed_the_end_mean_nothing() -> None:
    connector = prefill()
    step = connector.step(1.0, from_decode(Declined(key(), FAILURE)))
    assert step.reports == [Released(key(), FAILURE)]
    late = [
        Publish(key(), 0, (1, 2), (0, 0), 8),
        Complete(key(), (FirstToken(1),)),
        Withdraw(key(), FAILURE),
        *from_decode(Done(key()), Declined(key(), FAILURE)),
    ]
    step = connector.step(2.0, late)
    assert (step.reports, step.commands) == ([], [])


def test_a_newer_attempt_ends_the_older_one_on_both_sides() -> None:
    source = prefill()
    step = source.step(1.0, [Offer(key(attempt=1), D, 8, 2)])
    assert [report.key for report in step.reports] == [key()]
    target = decode()
    target.step(1.0, [Expect(key(), P)])
    step = target.step(2.0, [Expect(key(attempt=1), P)])
    assert [report.key for report in step.reports] == [key()]


def test_an_older_attempt_that_comes_late_is_refused_on_both_sides() -> None:
    source = prefill()
    source.step(1.0, [Offer(key("x", attempt=1), D, 8, 2)])
    [released] = source.step(2.0, [Offer(key("x"), D, 8, 2)]).reports
    assert isinstance(released, Released)
    assert released.failure is not None
    target = decode()
    target.step(1.0, [Expect(key(attempt=1), P)])
    [declined] = said(target.step(2.0, from_prefill(STARTED)))
    assert isinstance(declined, Declined)
    assert isinstance(target.step(3.0, [Expect(key(), P)]).reports[0], LandingEnded)


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    stones: Tombstones[int] = Tombstones(max_keys=2)
    for number, name in enumerate("abc"):
        stones.bury(key(name), number)
        stones.note_attempt(key(name, attempt=1))
    assert [stones.answer(key(name)) for name in "abc"] == [None, 1, 2]
    assert [stones.is_superseded(key(name)) for name in "abc"] == [False, True, True]


def test_parking_is_bounded_in_keys_and_messages() -> None:
    peer = (P, Epoch("e"))
    parking = Parking(max_keys=1, max_messages=2)
    assert parking.park(0.0, peer, STARTED)
    assert not parking.park(0.0, peer, Started(key("other"), 8, 2, 30.0))
    assert parking.park(0.0, peer, Span(key(), 0, 0, (1,), (1,), 4))
    assert not parking.park(0.0, peer, Span(key(), 1, 1, (1,), (1,), 8))
    assert parking.take(key()) is not None
    assert parking.park(0.0, peer, Started(key("other"), 8, 2, 30.0))
