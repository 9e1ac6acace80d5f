"""Peers that break the protocol end their own handoff, and nothing else; a scheduler must not."""

from collections.abc import Sequence

import pytest

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    BeginReceive,
    ConnectorEvent,
    Expect,
    FromRank,
    PeerRank,
    PeerUp,
    Read,
    ReceiveEnded,
    Released,
    ToPeer,
    ToRank,
)
from baton.protocol.errors import InvariantBroken
from baton.protocol.messages import (
    BlockRange,
    Declined,
    Done,
    End,
    FirstToken,
    Renew,
    Renewed,
    ToDecode,
    Withdrawn,
)
from tests.support import connectors
from tests.support.connectors import (
    DECODE,
    FAILURE,
    PREFILL,
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


def decode(*messages: ToDecode) -> NodeConnector:
    greeted = heard(PREFILL, hello(PREFILL), *messages)
    return connectors.decode(Expect(key(), P), UP, *greeted)


def prefill() -> NodeConnector:
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
def test_what_makes_no_sense_ends_the_receive_and_is_declined(messages: tuple[ToDecode]) -> None:
    step = decode(*messages[:-1]).step(1.0, heard(PREFILL, messages[-1]))
    [ended] = step.reports
    assert isinstance(ended, ReceiveEnded)
    declined = step.commands[-1]
    assert isinstance(declined, ToPeer)
    assert declined.message == Declined(key(), ended.failure)


def test_blocks_that_the_source_does_not_have_are_not_read() -> None:
    connector = decode(offered(), BlockRange(key(), 0, (1, 64), (0, 0)))
    step = connector.step(1.0, [BeginReceive(key(), 0, (20, 21))])
    assert isinstance(step.reports[0], ReceiveEnded)
    assert not [c for c in step.commands if isinstance(c, ToRank) and isinstance(c.command, Read)]


def test_a_prompt_of_another_length_than_decode_has_is_not_landed() -> None:
    [ended] = decode(offered()).step(1.0, [BeginReceive(key(), 0, (20, 21, 22))]).reports
    assert isinstance(ended, ReceiveEnded)


def test_another_node_cannot_offer_or_end_what_was_expected_of_the_first() -> None:
    other = node("q", "prefill")
    connector = decode()
    messages = (hello(other), offered(), BLOCK_RANGE, Renewed(key()))
    step = connector.step(1.0, heard(other, *messages))
    assert step.reports == []
    assert [type(message) for message in said(step)][1:] == [Declined]
    assert connector.step(2.0, heard(PREFILL, offered())).reports == [offered()]


def test_done_before_the_end_releases_with_a_failure() -> None:
    for early in ((), (Renew((key(),)),)):
        [released] = prefill().step(1.0, heard(DECODE, *early, Done(key()))).reports
        assert isinstance(released, Released)
        assert released.failure is not None


def test_another_node_cannot_release_what_was_offered_to_the_first() -> None:
    other = node("e", "decode")
    messages = (hello(other), Done(key()), Declined(key(), FAILURE))
    assert prefill().step(1.0, heard(other, *messages)).reports == []


def test_a_decode_node_that_greets_again_has_lost_what_it_had() -> None:
    connector = prefill()
    connector.step(1.0, heard(DECODE, Renew((key(),))))
    step = connector.step(2.0, heard(DECODE, hello(DECODE)))
    assert [type(message) for message in said(step)] == [Withdrawn]


@pytest.mark.parametrize(
    ("connector", "events"),
    [
        (prefill, [offer()]),
        (prefill, [BlockRange(key(), 0, (1,), (0,))]),
        (prefill, [END]),
        (prefill, [BlockRange(key(), 1, (2,), (0,)), END, END]),
        (prefill, [BlockRange(key(), 1, (2,), (0,)), END, BlockRange(key(), 2, (3,), (0,))]),
        (decode, [Expect(key(), P)]),
        (decode, [BeginReceive(key(), 0, (20, 21))]),
        (decode, [*heard(PREFILL, offered()), *[BeginReceive(key(), 0, (20, 21))] * 2]),
    ],
)  # fmt: skip
def test_a_scheduler_that_breaks_the_contract_ends_the_process(
    connector: type[NodeConnector], events: Sequence[ConnectorEvent]
) -> None:
    with pytest.raises(InvariantBroken):
        connector().step(1.0, events)  # type: ignore[call-arg]
