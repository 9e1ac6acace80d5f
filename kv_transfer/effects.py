"""The effects of one step of the connector, collected while its machines run.

Every machine of this room writes here and nowhere else. Commands to one peer or one rank are sent
in the order in which they were decided.
"""

from dataclasses import dataclass, field

from baton.kv_transfer.interfaces import (
    AgentCommand,
    ConnectorCommand,
    ConnectorReport,
    PeerName,
    ToPeer,
    ToRank,
)
from baton.protocol.messages import ToDecode, ToPrefill


@dataclass(slots=True)
class Effects:
    """`reachable` are the peers that have a channel. A message to any other peer is dropped."""

    reachable: set[PeerName]
    commands: list[ConnectorCommand] = field(default_factory=list)
    reports: list[ConnectorReport] = field(default_factory=list)

    def tell(self, peer: PeerName, message: ToDecode | ToPrefill) -> None:
        if peer in self.reachable:
            self.commands.append(ToPeer(*peer, message))

    def order(self, rank: int, command: AgentCommand) -> None:
        self.commands.append(ToRank(rank, command))
