"""A prefix that one node reads from another's cache, as the connectors of both see it."""

import msgspec
import pytest

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    BeginReceive,
    CancelRead,
    ConnectorEvent,
    DialPeer,
    Effects,
    FetchPrefix,
    FromRank,
    KVReceived,
    Offer,
    PeerLost,
    PeerRank,
    PeerUp,
    PrefixWanted,
    Read,
    ReadEnded,
    ReceiveBroken,
    ReceiveEnded,
    RefusePrefix,
    Released,
    ToRank,
)
from baton.protocol.messages import (
    BlockRange,
    Declined,
    Done,
    End,
    Offered,
    PeerHello,
    PeerMessage,
    Renew,
    Renewed,
    WantPrefix,
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
    offered,
    said,
)

HASHES = bytes(range(32))
TIMEOUT_S = 0.5
FETCH = FetchPrefix(key(), D, HASHES, 0, TIMEOUT_S)
WANTED = WantPrefix(key(), HASHES)
BLOCK_RANGE = BlockRange(key(), 0, (1, 2), (0, 0))
UP = FromRank(0, PeerUp(PeerRank(DECODE.epoch), "shm"))
BEGIN = BeginReceive(key(), 0, (20, 21))


def ended(ticket: int = 1, *, is_well: bool = True) -> FromRank:
    failure = None if is_well else FAILURE
    return FromRank(0, ReadEnded(ticket, 1.0, 1.1, 128, failure))


def reader(*events: ConnectorEvent) -> NodeConnector:
    """The connector of `p`, which has asked `d` for a prefix and met it."""
    return connectors.prefill(FETCH, *heard(DECODE, hello(DECODE)), *events)


def lender(*events: ConnectorEvent) -> NodeConnector:
    return connectors.decode(*heard(PREFILL, hello(PREFILL)), *events)


def reading() -> NodeConnector:
    """One whose read is under way."""
    connector = reader(UP, *heard(DECODE, offered(), BLOCK_RANGE, End(key(), ())))
    step = connector.step(0.1, [BEGIN])
    [read] = [one.command for one in step.commands if isinstance(one, ToRank)]
    assert isinstance(read, Read)
    assert (read.remote, read.local) == ((1, 2), (20, 21))
    return connector


def told(step: Effects, kind: type[PeerMessage]) -> list[PeerMessage]:
    return [message for message in said(step) if isinstance(message, kind)]


def test_the_reader_dials_and_asks_and_reports_what_it_has_received():
    connector = connectors.prefill()
    step = connector.step(0.0, [FETCH])
    assert [type(command) for command in step.commands[:1]] == [DialPeer]
    assert [type(message) for message in said(step)] == [PeerHello, WantPrefix]
    connector = reading()
    connector.step(0.2, [*heard(DECODE, Renewed(key()))])
    step = connector.step(0.3, [ended()])
    [received] = step.reports
    assert isinstance(received, KVReceived)
    assert received.num_bytes == 128
    assert said(step) == [Done(key())]


def test_the_lender_asks_its_scheduler_and_gives_blocks_back_when_they_are_read():
    connector = lender()
    assert connector.step(0.0, heard(PREFILL, WANTED)).reports == [
        PrefixWanted(key(), P, HASHES, 0)
    ]
    events = [Offer(key(), P, 8, 2), BLOCK_RANGE, End(key(), ())]
    step = connector.step(0.0, events)
    assert [type(message) for message in said(step)] == [Offered, BlockRange, End]
    assert said(connector.step(0.1, heard(PREFILL, Renew((key(),))))) == [
        Renewed(key())
    ]
    assert connector.step(0.2, heard(PREFILL, Done(key()))).reports == [Released(key())]


def test_one_request_may_be_handed_over_while_its_prefix_is_read_the_other_way():
    connector = reading()
    offer = connectors.offer()
    step = connector.step(0.2, [offer])
    assert told(step, Offered)
    step = connector.step(0.2, heard(DECODE, Declined(key(), FAILURE)))
    assert step.reports == [Released(key(), FAILURE)], (
        "which says nothing of the prefix"
    )
    connector.step(0.2, heard(DECODE, Renewed(key())))
    [received] = connector.step(0.3, [ended()]).reports
    assert isinstance(received, KVReceived)


def test_a_refused_prefix_ends_at_once():
    step = lender(*heard(PREFILL, WANTED)).step(0.0, [RefusePrefix(key(), P, FAILURE)])
    assert said(step) == [Withdrawn(key(), FAILURE)]
    [end] = reader().step(0.1, heard(DECODE, Withdrawn(key(), FAILURE))).reports
    assert end == ReceiveEnded(key(), FAILURE)


@pytest.mark.parametrize("is_offered", [False, True])
def test_a_prefix_that_does_not_come_in_time_ends(is_offered):
    connector = reader(*(heard(DECODE, offered()) if is_offered else ()))
    step = connector.step(TIMEOUT_S - 0.01, [])
    assert (step.reports, step.wake_at_s) == ([], TIMEOUT_S)
    step = connector.step(TIMEOUT_S, [])
    [end] = step.reports
    assert isinstance(end, ReceiveEnded)
    assert end.failure.code == "transfer_timeout"
    assert told(step, Declined)


def test_a_read_that_is_late_is_broken_at_once_and_ends_when_nothing_can_land():
    connector = reading()
    step = connector.step(TIMEOUT_S, [])
    assert step.reports == [ReceiveBroken(key())]
    [cancel] = [one.command for one in step.commands if isinstance(one, ToRank)]
    assert isinstance(cancel, CancelRead)
    [end] = connector.step(5.0, [ended(is_well=False)]).reports
    assert isinstance(end, ReceiveEnded)
    assert end.quarantined == ()


def test_a_lost_channel_ends_a_prefix_that_was_only_asked_for():
    [end] = reader().step(0.1, [PeerLost(D, DECODE.epoch)]).reports
    assert isinstance(end, ReceiveEnded)


def test_a_node_that_nobody_knows_or_that_is_refused_is_not_asked():
    unknown = msgspec.structs.replace(FETCH, source=P)
    [end] = connectors.prefill().step(0.0, [unknown]).reports
    assert isinstance(end, ReceiveEnded)
    assert end.failure.code == "node_lost"
    other = msgspec.structs.replace(DECODE, model="another")
    step = connectors.prefill(decode=other).step(0.0, [FETCH])
    [end] = step.reports
    assert isinstance(end, ReceiveEnded)
    assert (end.failure.code, said(step)) == ("peer_mismatch", [])


def test_a_newer_attempt_ends_the_prefix_of_an_older_one_on_both_sides():
    newer = msgspec.structs.replace(FETCH, key=key(attempt=1))
    [end] = reader().step(0.1, [newer]).reports
    assert isinstance(end, ReceiveEnded)
    connector = lender()
    connector.step(0.0, [Offer(key(attempt=1), P, 8, 2)])
    step = connector.step(0.1, heard(PREFILL, WANTED))
    assert step.reports == []
    assert told(step, Withdrawn)


def test_a_question_that_comes_twice_is_asked_of_the_scheduler_once():
    connector = lender(*heard(PREFILL, WANTED))
    connector.step(0.0, [Offer(key(), P, 8, 2)])
    step = connector.step(0.1, heard(PREFILL, WANTED))
    assert (step.reports, said(step)) == ([], [])
