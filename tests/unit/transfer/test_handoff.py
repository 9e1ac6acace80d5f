"""One handoff between two connectors, message by message."""

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    AddPeer,
    Complete,
    ConnectorEvent,
    ConnectorReport,
    DialPeer,
    Expect,
    FromPeer,
    FromRank,
    Land,
    Landed,
    Offer,
    Offered,
    PeersChanged,
    PeerUp,
    Publish,
    Read,
    ReadEnded,
    Released,
    ToPeer,
    ToRank,
)
from baton.protocol.config import TransferConfig
from baton.protocol.ids import NodeId
from baton.protocol.messages import FirstToken, NodeInfo
from tests.support.transfer_world import key, node


class Pair:
    """A prefill and a decode connector on perfect links; reads end when `end_reads` is called."""

    def __init__(self, num_ranks: int = 1) -> None:
        infos = node("p", "prefill", num_ranks=num_ranks), node("d", "decode", num_ranks=num_ranks)
        self.infos: dict[str, NodeInfo] = {info.node_id: info for info in infos}
        self.connectors = {
            name: NodeConnector(info, TransferConfig()) for name, info in self.infos.items()
        }
        self.reports: dict[str, list[ConnectorReport]] = {"p": [], "d": []}
        self.dialled: list[DialPeer] = []
        self.reads: list[tuple[int, Read]] = []
        self.now_s = 0.0
        self.step("p", PeersChanged((self.infos["d"],)))
        self.step("d", PeersChanged((self.infos["p"],)))

    def step(self, name: str, *events: ConnectorEvent) -> None:
        step = self.connectors[name].step(self.now_s, events)
        self.reports[name] += step.reports
        for command in step.commands:
            match command:
                case ToPeer(node=to, message=message):
                    me = self.infos[name]
                    self.step(to, FromPeer(me.node_id, me.epoch, message))
                case DialPeer():
                    self.dialled.append(command)
                case ToRank(rank, AddPeer(peer=peer, transport=transport)):
                    self.step(name, FromRank(rank, PeerUp(peer, transport)))
                case ToRank(rank, Read() as read):
                    self.reads.append((rank, read))

    def end_reads(self) -> None:
        reads, self.reads = self.reads, []
        for rank, read in reads:
            ended = ReadEnded(read.ticket, self.now_s - 0.5, self.now_s, 64 * len(read.local))
            self.step("d", FromRank(rank, ended))


TOKENS = (FirstToken(7),)


def test_a_prompt_travels_span_by_span_and_both_sides_report_it_once() -> None:
    pair = Pair(num_ranks=2)
    pair.step("d", Expect(key(), NodeId("p")))
    pair.step("p", Offer(key(), NodeId("d"), num_tokens=11, num_blocks=3))
    assert pair.reports["d"] == [Offered(key(), 11, 3)]
    pair.step("d", Land(key(), 1, (40, 41)))
    pair.step("p", Publish(key(), 0, (10, 11), (1, 2), 8))
    assert [(rank, read.remote, read.local) for rank, read in pair.reads] == [
        (0, (11,), (40,)),
        (1, (11,), (40,)),
    ]
    pair.now_s = 1.0
    pair.end_reads()
    pair.step("p", Publish(key(), 2, (12,), (5,), 11), Complete(key(), TOKENS))
    assert pair.reports["d"][1:] == []
    pair.now_s = 2.0
    pair.end_reads()
    assert pair.reports["d"][1:] == [Landed(key(), TOKENS, 256, 1.5, 1.0)]
    assert pair.reports["p"] == [Released(key())]
    assert [command.node.node_id for command in pair.dialled] == ["d"]
