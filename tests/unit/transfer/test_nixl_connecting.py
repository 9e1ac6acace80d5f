"""How nixl connects to a peer, on a scripted library: real agents connect at once."""

from types import SimpleNamespace

import pytest

from baton.kv_transfer.interfaces import BlockPiece, PeerRank, PoolMemory
from baton.kv_transfer.transports import nixl
from baton.kv_transfer.transports.nixl import NixlAddress, NixlTransport
from baton.protocol.ids import Epoch

OWNER, READER = PeerRank(Epoch("owner")), Epoch("reader")
NUM_BLOCKS, BLOCK_BYTES = 4, 4096
WHOLE = BlockPiece(0, 0, BLOCK_BYTES)


class ScriptedNixl:
    """The part of NIXL that connecting needs. A warm-up ends when `state` says so."""

    def __init__(self) -> None:
        self.state = "PROC"
        self.agents: list[str] = []  # as they were added
        self.num_removed = 0

    def register_memory(self, regions: list[tuple[int, int, int, str]], mem_type: str) -> None: ...

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.agents.append(metadata.decode())
        return metadata

    def remove_remote_agent(self, agent: str) -> None:
        self.num_removed += 1

    def prep_xfer_dlist(self, *_: object) -> "ScriptedNixl":
        return self

    def make_prepped_xfer(self, *_: object) -> "ScriptedNixl":
        return self

    def transfer(self, handle: object) -> str:
        return self.state

    def check_xfer_state(self, handle: object) -> str:
        return self.state

    def release(self) -> None: ...


def test_a_pair_that_was_given_up_goes_on_connecting_for_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, errors = ScriptedNixl(), SimpleNamespace(all=(), at_start=(), disconnected=OSError)
    monkeypatch.setattr(nixl, "make_agent", lambda *_, **__: (agent, errors))
    transport = NixlTransport(PoolMemory(4096, NUM_BLOCKS, BLOCK_BYTES), READER)
    address = NixlAddress(
        OWNER.epoch, "owner-agent", "cpu", 4096, NUM_BLOCKS, BLOCK_BYTES, b"owner-agent"
    )
    for _ in range(3):
        transport.add_peer(OWNER, address.encode(), NUM_BLOCKS, BLOCK_BYTES, WHOLE)
        assert not transport.connected(OWNER)
        transport.remove_peer(OWNER)
        transport.service()
    assert (agent.agents, agent.num_removed) == (["owner-agent"], 0)
    agent.state = "DONE"
    transport.add_peer(OWNER, address.encode(), NUM_BLOCKS, BLOCK_BYTES, WHOLE)
    assert transport.connected(OWNER)
    assert agent.agents == ["owner-agent"]
    transport.close()
