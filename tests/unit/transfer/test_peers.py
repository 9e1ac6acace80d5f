"""Who may exchange blocks with whom, and when channels and ranks are opened and closed."""

import msgspec
import pytest

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    AddPeer,
    BeginReceive,
    BlocksDrained,
    BlockSlice,
    BlocksSummed,
    CancelRead,
    DialPeer,
    DropPeer,
    Effects,
    Expect,
    FromRank,
    OfferBroken,
    PeerDown,
    PeerLost,
    PeerRank,
    PeersChanged,
    PeerUp,
    Read,
    ReadDrained,
    ReadEnded,
    ReceiveEnded,
    Released,
    RemovePeer,
    SumBlocks,
    ToRank,
)
from baton.kv_transfer.peers import HELLO_S, REDIAL_S, edges_between
from baton.protocol.config import TransferConfig
from baton.protocol.messages import (
    BlockRange,
    Declined,
    End,
    FirstToken,
    KVLayout,
    RankAddress,
    Withdrawn,
)
from baton.protocol.pairing import tp_size_problem
from tests.support.connectors import (
    BLOCK_BYTES,
    DECODE,
    FAILURE,
    HEAD_BYTES,
    PREFILL,
    D,
    P,
    decode,
    heads_of,
    heard,
    hello,
    key,
    node,
    offer,
    offered,
    prefill,
    said,
    told,
)

POOL = PeerRank(PREFILL.epoch)
WHOLE = BlockSlice(0, 0, BLOCK_BYTES)
BLOCK_RANGE = BlockRange(key(), 0, (5,), (0,))
END = End(key(), (FirstToken(7),))


def up(target: int, source: int) -> FromRank:
    return FromRank(target, PeerUp(PeerRank(PREFILL.epoch, source), "shm"))


def codes(step: Effects) -> list[str | None]:
    found = [getattr(report, "failure", None) for report in step.reports]
    return [failure and failure.code for failure in found]


def test_another_model_or_layout_or_degree_is_refused_before_dialling():
    for other in (
        node("d", "decode", model="other"),
        node("d", "decode", layout=KVLayout(4, 64, "other")),
        # Of a version that does not publish its KV heads.
        node("d", "decode", num_ranks=2),
    ):
        step = prefill(decode=other).step(0.0, [offer()])
        assert codes(step) == ["peer_mismatch"]
        assert step.commands == []


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "decode", "problem"),
    [
        (1, 2, {}, None),
        (4, 2, {}, None),
        (2, 3, {}, "tensor_parallel_size of which one divides the other"),
        (1, 0, {}, "tensor_parallel_size of which one divides the other"),
        (1, 2, {"kv_heads": 0}, "give both nodes the same tensor_parallel_size"),
        (1, 2, {"kv_heads": 2}, "give both nodes the same tensor_parallel_size"),
        (2, 6, {}, "give both nodes the same tensor_parallel_size"),
        (1, 2, {"block_bytes": 64}, "they hold different heads"),
    ],
)
def test_degrees_fit_if_one_divides_the_other_and_else_the_reason_says_what_to_set(
    num_prefill, num_decode, decode, problem
):
    nodes = [
        node("p", "prefill", num_ranks=num_prefill, kv_heads=4),
        node("d", "decode", num_ranks=num_decode, kv_heads=4),
    ]
    layout = msgspec.structs.replace(nodes[1].layout, **decode)
    found = tp_size_problem(nodes[0], msgspec.structs.replace(nodes[1], layout=layout))
    assert (found is None) == (problem is None)
    assert problem is None or (found or "").endswith(problem)


@pytest.mark.parametrize("kv_heads", [2, 4, 8])
@pytest.mark.parametrize(
    "degrees", [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (8, 2), (4, 8)]
)
def test_every_head_of_every_rank_is_read_once_from_a_rank_that_holds_it(
    kv_heads, degrees
):
    num_prefill, num_decode = degrees
    prefill = node("p", "prefill", num_ranks=num_prefill, kv_heads=kv_heads)
    decode = node("d", "decode", num_ranks=num_decode, kv_heads=kv_heads)
    read: dict[int, list[int]] = {rank: [] for rank in range(num_decode)}
    for edge in edges_between(prefill, decode):
        first = edge.part.remote_offset // HEAD_BYTES
        part = edge.part
        num_heads = part.num_bytes // HEAD_BYTES
        heads = heads_of(kv_heads, num_prefill, edge.source)[first : first + num_heads]
        assert part.local_offset == len(read[edge.target]) * HEAD_BYTES
        read[edge.target] += heads
        assert edge.sums_row == edge.source * edge.num_slices + first // num_heads
    assert read == {
        rank: heads_of(kv_heads, num_decode, rank) for rank in range(num_decode)
    }


def test_ranks_that_hold_the_same_head_share_its_readers():
    prefill = node("p", "prefill", num_ranks=4, kv_heads=2)
    for num_decode, sources in ((2, [0, 2]), (8, [0, 0, 1, 1, 2, 2, 3, 3])):
        decode = node("d", "decode", num_ranks=num_decode, kv_heads=2)
        assert [edge.source for edge in edges_between(prefill, decode)] == sources


def test_decode_greets_a_stranger_back_and_declines_what_it_offers():
    connector = decode(Expect(key(), P))
    step = connector.step(0.0, [*heard(PREFILL, hello(PREFILL, model="other"))])
    assert told(PREFILL, hello(DECODE)) in step.commands
    assert codes(step) == ["peer_mismatch"]
    step = connector.step(0.0, [*heard(PREFILL, offered("other"))])
    [declined] = said(step)
    assert isinstance(declined, Declined)
    assert declined.failure.code == "peer_mismatch"


def test_announced_blocks_outlive_a_lost_channel_until_decode_answers_on_a_new_one():
    connector = prefill()
    connector.step(0.0, [offer(), *heard(DECODE, hello(DECODE)), BLOCK_RANGE])
    (broken,) = connector.step(1.0, [PeerLost(D, DECODE.epoch)]).reports
    assert isinstance(broken, OfferBroken), "the router need not wait for the lease"
    assert connector.unreachable == (D,)
    step = connector.step(1.0 + REDIAL_S, [])
    assert step.commands[0] == DialPeer(DECODE), "it does not need a request for that"
    step = connector.step(7.0, [*heard(DECODE, hello(DECODE))])
    [withdrawn] = said(step)
    assert isinstance(withdrawn, Withdrawn)
    step = connector.step(8.0, [*heard(DECODE, Declined(key(), FAILURE))])
    assert step.reports == [Released(key(), withdrawn.failure)]


def test_decode_learns_of_an_offer_that_was_lost_with_its_channel():
    """Once, `Offered` died with a channel that was being dialled, and decode waited for 600 s."""
    connector = prefill()
    connector.step(0.0, [offer()])
    step = connector.step(HELLO_S, [])
    assert (codes(step), step.wake_at_s) == (["node_lost"], HELLO_S + REDIAL_S)
    assert connector.unreachable == (D,)
    step = connector.step(15.0, [])
    assert step.commands[0] == DialPeer(DECODE)
    step = connector.step(16.0, heard(DECODE, hello(DECODE)))
    [withdrawn] = said(step)
    assert isinstance(withdrawn, Withdrawn)
    assert connector.unreachable == ()
    target = decode(Expect(key(), P))
    step = target.step(16.0, heard(PREFILL, hello(PREFILL), withdrawn))
    assert step.reports == [ReceiveEnded(key(), withdrawn.failure)]
    connector.step(17.0, heard(DECODE, *said(step)[-1:]))
    assert connector.step(18.0, []).wake_at_s is None


def test_a_channel_that_breaks_without_a_handoff_is_opened_again():
    connector = prefill()
    connector.step(
        0.0, [offer(), *heard(DECODE, hello(DECODE), Declined(key(), FAILURE))]
    )
    step = connector.step(1.0, [PeerLost(D, DECODE.epoch)])
    assert (connector.unreachable, step.wake_at_s) == ((D,), 1.0 + REDIAL_S)
    for dialled_s in (6.0, 6.0 + HELLO_S + REDIAL_S):  # the first time, nobody answers
        assert connector.step(dialled_s, []).commands[0] == DialPeer(DECODE)
        connector.step(dialled_s + HELLO_S, [])
        assert connector.unreachable == (D,)
    connector.step(16.0, heard(DECODE, hello(DECODE)))
    assert connector.unreachable == ()


def test_a_node_that_is_not_listed_any_more_is_not_dialled_again():
    connector = prefill()
    connector.step(
        0.0, [offer(), *heard(DECODE, hello(DECODE), Declined(key(), FAILURE))]
    )
    connector.step(1.0, [PeerLost(D, DECODE.epoch), PeersChanged(())])
    assert connector.unreachable == ()
    assert connector.step(10.0, []).wake_at_s is None


def test_only_prefill_dials_what_broke():
    connector = decode(Expect(key(), P))
    connector.step(0.0, heard(PREFILL, hello(PREFILL)))
    connector.step(1.0, [PeerLost(P, PREFILL.epoch)])
    assert connector.unreachable == ()


def test_a_prefill_node_that_offers_before_it_is_listed_is_connected_when_it_is():
    connector = NodeConnector(DECODE, TransferConfig())
    step = connector.step(
        0.0, [Expect(key(), P), *heard(PREFILL, hello(PREFILL), offered())]
    )
    assert step.reports == [offered()]
    step = connector.step(1.0, [PeersChanged((PREFILL,))])
    assert [type(c.command) for c in step.commands if isinstance(c, ToRank)] == [
        AddPeer
    ]


def test_a_rank_that_goes_down_is_connected_again_for_the_next_receive():
    connector = decode(Expect(key(), P), *heard(PREFILL, hello(PREFILL), offered()))
    connector.step(
        0.0, [FromRank(0, PeerUp(POOL, "shm")), BeginReceive(key(), 0, (20, 21))]
    )
    step = connector.step(1.0, [FromRank(0, PeerDown(POOL, FAILURE))])
    assert step.reports == [ReceiveEnded(key(), FAILURE)]
    assert ToRank(0, RemovePeer(POOL)) in step.commands
    step = connector.step(2.0, [Expect(key("other"), P)])
    assert [type(c.command) for c in step.commands if isinstance(c, ToRank)] == [
        AddPeer
    ]


def test_a_rank_that_shm_does_not_reach_is_read_by_nixl_and_the_receive_goes_on():
    """Both say that they are on one host, but the memory of one cannot be mapped by the other."""
    far = RankAddress({**PREFILL.ranks[0].metadata, "nixl": b"agent"})
    source = node("p", "prefill", ranks=(far,))
    target = node("d", "decode", ranks=(far,))
    connector = NodeConnector(target, TransferConfig())
    connector.step(0.0, [PeersChanged((source,)), *heard(PREFILL, hello(PREFILL))])
    connector.step(0.0, [Expect(key(), P), *heard(PREFILL, offered(), BLOCK_RANGE)])
    connector.step(0.0, [BeginReceive(key(), 0, (20, 21))])
    step = connector.step(1.0, [FromRank(0, PeerDown(POOL, FAILURE))])
    assert step.reports == []
    assert [c.command for c in step.commands if isinstance(c, ToRank)] == [
        RemovePeer(POOL),
        AddPeer(POOL, "nixl", far, 64, 64, WHOLE),
    ]
    step = connector.step(2.0, [FromRank(0, PeerUp(POOL, "nixl"))])
    assert ToRank(0, Read(1, POOL, (5,), (20,), (0,))) in step.commands
    # The pair keeps what worked; when that breaks, it does not go back to what never did.
    step = connector.step(
        3.0, [FromRank(0, PeerDown(POOL, FAILURE)), Expect(key("b"), P)]
    )
    assert ToRank(0, AddPeer(POOL, "nixl", far, 64, 64, WHOLE)) in step.commands


def test_a_rank_that_no_transport_reaches_ends_its_receives_and_is_tried_afresh():
    connector = decode(Expect(key(), P), *heard(PREFILL, hello(PREFILL), offered()))
    connector.step(0.0, [BeginReceive(key(), 0, (20, 21))])
    step = connector.step(1.0, [FromRank(0, PeerDown(POOL, FAILURE))])
    assert step.reports == [ReceiveEnded(key(), FAILURE)]
    step = connector.step(2.0, [Expect(key("b"), P)])
    assert (
        ToRank(0, AddPeer(POOL, "shm", PREFILL.ranks[0], 64, 64, WHOLE))
        in step.commands
    )


def test_a_peer_that_is_not_listed_any_more_is_unmapped_when_nothing_uses_it():
    connector = decode(Expect(key(), P), *heard(PREFILL, hello(PREFILL), offered()))
    assert not connector.step(1.0, [PeersChanged(())]).commands
    step = connector.step(2.0, [*heard(PREFILL, Withdrawn(key(), FAILURE))])
    assert step.commands[-2:] == [
        DropPeer(P, PREFILL.epoch),
        ToRank(0, RemovePeer(POOL)),
    ]


def test_no_transport_in_common_ends_the_receive_with_both_sides_named():
    strange = node(
        "p", "prefill", ranks=(msgspec.structs.replace(PREFILL.ranks[0], metadata={}),)
    )
    connector = decode(prefill=strange)
    step = connector.step(0.0, [Expect(key(), P)])
    assert codes(step) == ["no_transport"]


def test_quarantined_blocks_come_back_when_nothing_can_land_in_them_on_any_rank():
    info, peer = (
        node(n, r, num_ranks=2) for n, r in (("d", "decode"), ("p", "prefill"))
    )
    connector = NodeConnector(info, TransferConfig())
    connector.step(
        0.0, [PeersChanged((peer,)), Expect(key(), P), *heard(PREFILL, hello(peer))]
    )
    connector.step(0.0, [up(rank, rank) for rank in (0, 1)])
    connector.step(
        0.0, [*heard(PREFILL, offered(), BLOCK_RANGE), BeginReceive(key(), 0, (20, 21))]
    )
    ends = [
        FromRank(rank, ReadEnded(1 + rank, 0.0, 1.0, 0, FAILURE, quiesced=False))
        for rank in (0, 1)
    ]
    (ended,) = connector.step(1.0, ends).reports
    assert ended == ReceiveEnded(key(), FAILURE, quarantined=(20,))
    assert connector.step(2.0, [FromRank(0, ReadDrained(1))]).reports == []
    assert connector.step(3.0, [FromRank(1, ReadDrained(2))]).reports == [
        BlocksDrained((20,))
    ]
    assert connector.step(4.0, [FromRank(1, ReadDrained(2))]).reports == []


def test_block_ranges_wait_for_their_checksums_and_keep_their_order():
    peer = node("p", "prefill", num_ranks=2, kv_heads=4)
    info = node("d", "decode", num_ranks=2, kv_heads=4)
    source = NodeConnector(peer, TransferConfig(verify_kv=True))
    source.step(0.0, [PeersChanged((info,)), offer(), *heard(DECODE, hello(info))])
    block_ranges = [BlockRange(key(), block, (5 + block,), (0,)) for block in range(2)]
    assert said(source.step(0.0, [*block_ranges, END])) == []
    late = [FromRank(rank, BlocksSummed(2, ((20 + rank,),))) for rank in (0, 1)]
    assert said(source.step(1.0, [*late, FromRank(1, BlocksSummed(1, ((11,),)))])) == []
    assert said(source.step(2.0, [FromRank(0, BlocksSummed(1, ((10,),)))])) == [
        msgspec.structs.replace(block_ranges[0], checksums=((10,), (11,))),
        msgspec.structs.replace(block_ranges[1], checksums=((20,), (21,))),
        END,
    ]


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "asked", "rows"),
    [
        (2, 2, (32, 1), {0: ((10,),), 1: ((11,),)}),
        (1, 2, (32, 2), {0: ((10,), (11,))}),
        (2, 1, (32, 1), {0: ((10,),), 1: ((11,),)}),
    ],
)
def test_checksums_are_of_the_slices_that_the_ranks_of_decode_read(
    num_prefill, num_decode, asked, rows
):
    peer = node("p", "prefill", num_ranks=num_prefill, kv_heads=4)
    info = node("d", "decode", num_ranks=num_decode, kv_heads=4)
    source = NodeConnector(peer, TransferConfig(verify_kv=True))
    source.step(0.0, [PeersChanged((info,)), offer(), *heard(DECODE, hello(info))])
    step = source.step(0.0, [BLOCK_RANGE])
    assert step.commands == [ToRank(rank, SumBlocks(1, (5,), *asked)) for rank in rows]
    answers = [FromRank(rank, BlocksSummed(1, sums)) for rank, sums in rows.items()]
    [summed] = said(source.step(1.0, answers))

    target = NodeConnector(info, TransferConfig(verify_kv=True))
    target.step(
        0.0, [PeersChanged((peer,)), Expect(key(), P), *heard(PREFILL, hello(peer))]
    )
    target.step(
        0.0, [up(edge.target, edge.source) for edge in edges_between(peer, info)]
    )
    target.step(0.0, [*heard(PREFILL, offered()), BeginReceive(key(), 0, (20, 21))])
    commands = target.step(0.0, [*heard(PREFILL, summed)]).commands
    reads = [
        c.command
        for c in commands
        if isinstance(c, ToRank) and isinstance(c.command, Read)
    ]
    assert [read.checksums for read in reads] == [(10,), (11,)]
    wrong = BlockRange(key(), 1, (6,), (0,), ((20,), (21,), (22,)))
    step = target.step(0.0, [*heard(PREFILL, wrong)])
    assert [type(c.command) for c in step.commands if isinstance(c, ToRank)] == [
        CancelRead
    ] * 2
