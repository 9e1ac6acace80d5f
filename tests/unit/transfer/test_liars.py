"""Peers that break the protocol end their own handoff, and nothing else."""

import pytest

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    Expect,
    FromPeer,
    FromRank,
    Land,
    LandingEnded,
    Offer,
    Offered,
    PeersChanged,
    PeerUp,
    Publish,
    Read,
    Released,
    ToPeer,
    ToRank,
)
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
    Span,
    Started,
    ToDecode,
)
from tests.support.transfer_world import FAILURE, key, node

PREFILL, DECODE = node("p", "prefill"), node("d", "decode")
P, D = NodeId("p"), NodeId("d")
STARTED = Started(key(), 8, 2, 30.0)
SPAN = Span(key(), 0, 0, (1, 2), (0, 0), 8)
END = End(key(), 1, (FirstToken(1),))


def decode(*messages: ToDecode) -> NodeConnector:
    connector = NodeConnector(DECODE, TransferConfig())
    hello = PeerHello(PROTOCOL_VERSION, P, PREFILL.epoch, "model", "layout")
    said = [FromPeer(P, PREFILL.epoch, message) for message in (hello, *messages)]
    up = FromRank(0, PeerUp(PREFILL.epoch, "shm"))
    connector.step(0.0, [PeersChanged((PREFILL,)), Expect(key(), P), up, *said])
    return connector


def prefill() -> NodeConnector:
    connector = NodeConnector(PREFILL, TransferConfig())
    hello = FromPeer(D, DECODE.epoch, PeerHello(1, D, DECODE.epoch, "model", "layout"))
    publish = Publish(key(), 0, (1,), (0,), 4)
    connector.step(0.0, [PeersChanged((DECODE,)), Offer(key(), D, 8, 2), hello, publish])
    return connector


@pytest.mark.parametrize(
    "messages",
    [
        (SPAN,),
        (END,),
        (Started(key(), 8, 65, 30.0),),
        (Started(key(), 8, 2, 0.0),),
        (STARTED, STARTED),
        (STARTED, END),
        (STARTED, Span(key(), 1, 0, (1, 2), (0, 0), 8)),
        (STARTED, Span(key(), 0, 1, (1,), (0,), 8)),
        (STARTED, Span(key(), 0, 0, (1, 2), (0,), 8)),
        (STARTED, Span(key(), 0, 0, (), (), 0)),
        (STARTED, Span(key(), 0, 0, (1, 2, 3), (0, 0, 0), 8)),
        (STARTED, SPAN, End(key(), 2, ())),
        (STARTED, SPAN, END, END),
    ],
)
def test_what_makes_no_sense_ends_the_landing_and_is_declined(messages: tuple[ToDecode]) -> None:
    connector = decode(*messages[:-1])
    step = connector.step(1.0, [FromPeer(P, PREFILL.epoch, messages[-1])])
    [ended] = step.reports
    assert isinstance(ended, LandingEnded)
    declined = step.commands[-1]
    assert isinstance(declined, ToPeer)
    assert declined.message == Declined(key(), ended.failure)


def test_blocks_that_the_source_does_not_have_are_not_read() -> None:
    connector = decode(STARTED, Span(key(), 0, 0, (1, 64), (0, 0), 8))
    step = connector.step(1.0, [Land(key(), 0, (20, 21))])
    assert isinstance(step.reports[0], LandingEnded)
    assert not [c for c in step.commands if isinstance(c, ToRank) and isinstance(c.command, Read)]


def test_a_prompt_of_another_length_than_decode_has_is_not_landed() -> None:
    [ended] = decode(STARTED).step(1.0, [Land(key(), 0, (20, 21, 22))]).reports
    assert isinstance(ended, LandingEnded)


def test_another_node_cannot_offer_or_end_what_was_expected_of_the_first() -> None:
    other = node("q", "prefill")
    hello = PeerHello(PROTOCOL_VERSION, NodeId("q"), other.epoch, "model", "layout")
    connector = decode()
    step = connector.step(
        1.0, [FromPeer(NodeId("q"), other.epoch, message) for message in (hello, STARTED)]
    )
    assert step.reports == []
    assert isinstance(step.commands[-1], ToPeer)
    assert isinstance(step.commands[-1].message, Declined)
    step = connector.step(2.0, [FromPeer(P, PREFILL.epoch, STARTED)])
    assert step.reports == [Offered(key(), 8, 2)]


def test_done_before_the_end_releases_with_a_failure() -> None:
    for early in ((), (Landing(key(), 0),)):
        connector = prefill()
        messages = [FromPeer(D, DECODE.epoch, message) for message in (*early, Done(key()))]
        [released] = connector.step(1.0, messages).reports
        assert isinstance(released, Released)
        assert released.failure is not None


def test_another_node_cannot_release_what_was_offered_to_the_first() -> None:
    connector = prefill()
    other = (NodeId("e"), Epoch("e-1"))
    hello = PeerHello(PROTOCOL_VERSION, *other, "model", "layout")
    messages = (hello, Done(key()), Declined(key(), FAILURE))
    assert connector.step(1.0, [FromPeer(*other, message) for message in messages]).reports == []


def test_a_claim_made_twice_is_confirmed_twice() -> None:
    connector = prefill()
    claims = [FromPeer(D, DECODE.epoch, Landing(key(), 0))] * 2
    step = connector.step(1.0, claims)
    assert [c.message for c in step.commands if isinstance(c, ToPeer)] == [STARTED, STARTED]


def test_a_decode_node_that_greets_again_has_lost_what_it_had() -> None:
    connector = prefill()
    connector.step(1.0, [FromPeer(D, DECODE.epoch, Landing(key(), 0))])
    again = FromPeer(D, DECODE.epoch, PeerHello(1, D, DECODE.epoch, "model", "layout"))
    step = connector.step(2.0, [again])
    assert [type(c.message).__name__ for c in step.commands if isinstance(c, ToPeer)] == [
        "Withdrawn"
    ]
