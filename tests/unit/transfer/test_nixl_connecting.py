"""How nixl connects to a peer, on a scripted library: real agents connect at once."""

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.kv_transfer.interfaces import AddPeer, BlockSlice, PeerRank, PoolMemory, Read
from baton.kv_transfer.transports import nixl
from baton.kv_transfer.transports.nixl import NixlAddress, NixlTransport
from baton.protocol.errors import TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress

OWNER = PeerRank(Epoch("owner"))
READER = Epoch("reader")
NUM_BLOCKS = 4
BLOCK_BYTES = 4096


def add(num_blocks: int, block_bytes: int, device: str = "cpu") -> AddPeer:
    """Return the command that adds the owner, whose agent is `owner-agent`."""
    where = NixlAddress(
        OWNER.epoch,
        "owner-agent",
        device,
        1 << 40,
        num_blocks,
        block_bytes,
        b"owner-agent",
    )
    address = RankAddress({"nixl": where.encode()})
    whole = BlockSlice(0, 0, block_bytes)
    return AddPeer(OWNER, "nixl", address, num_blocks, block_bytes, whole)


ADD = add(NUM_BLOCKS, BLOCK_BYTES)


class ScriptedNixl:
    """The part of NIXL that connecting needs. A warm-up ends when `state` says so."""

    def __init__(self) -> None:
        self.state = "PROC"
        self.error: Exception | None = None
        self.regions: list[tuple[int, str]] = []  # bytes and kind
        # Of prepared lists, and their kind.
        self.rows: list[tuple[list[list[int]], str]] = []
        # Rows of the sink, and of the peer.
        self.reads: list[tuple[list[int], list[int]]] = []
        self.num_calls = 0  # that get NIXL on
        self.agents: list[str] = []  # as they were added
        self.num_removed = 0

    def register_memory(
        self, regions: list[tuple[int, int, int, str]], mem_type: str
    ) -> None:
        self.regions += [(region[1], mem_type) for region in regions]

    def get_new_notifs(self) -> None:
        self.num_calls += 1

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.agents.append(metadata.decode())
        return metadata

    def remove_remote_agent(self, agent: str) -> None:
        self.num_removed += 1

    def prep_xfer_dlist(
        self, agent: str, rows: NDArray[np.uint64], mem_type: str
    ) -> "ScriptedNixl":
        self.rows.append((rows.tolist(), mem_type))
        return self

    def make_prepped_xfer(
        self,
        operation: str,
        local: object,
        into: NDArray[np.int32],
        remote: object,
        out_of: NDArray[np.int32],
    ) -> "ScriptedNixl":
        self.reads.append((into.tolist(), out_of.tolist()))
        return self

    def transfer(self, handle: object) -> str:
        return self.state

    def check_xfer_state(self, handle: object) -> str:
        if self.error is not None:
            raise self.error
        return self.state

    def release(self) -> None: ...


@pytest.fixture
def agent(monkeypatch):
    agent = ScriptedNixl()
    errors = SimpleNamespace(
        all=(OSError, ValueError), at_start=(), disconnected=OSError
    )
    monkeypatch.setattr(nixl, "make_agent", lambda *_, **__: (agent, errors))
    return agent


def test_a_pair_that_was_given_up_goes_on_connecting_for_the_next_attempt(agent):
    transport = NixlTransport(PoolMemory(4096, NUM_BLOCKS, BLOCK_BYTES), READER)
    for _ in range(3):
        transport.add_peer(ADD)
        assert not transport.connected(OWNER)
        transport.remove_peer(OWNER)
        transport.service()
    assert (agent.agents, agent.num_removed) == (["owner-agent"], 0)
    agent.state = "DONE"
    transport.add_peer(ADD)
    assert transport.connected(OWNER)
    assert agent.agents == ["owner-agent"]
    transport.close()


def test_gpus_warm_up_in_a_spare_block_and_without_a_thread_of_nixl(agent):
    block_bytes = 1 << 20
    num_blocks = 100
    memory = PoolMemory(1 << 30, num_blocks, block_bytes, "cuda:0", num_spare=1)
    transport = NixlTransport(memory, READER)
    spare = (1 << 30) + num_blocks * block_bytes
    assert agent.regions == [((num_blocks + 1) * block_bytes, "VRAM")], (
        "no memory of the host"
    )
    assert agent.rows == [([[spare, 64, 0]], "VRAM")]
    assert transport.progress_s is not None
    transport.service()
    assert agent.num_calls == 1, "NIXL has no thread here"
    transport.add_peer(add(num_blocks, block_bytes, "cuda:1"))
    assert not transport.connected(OWNER)
    assert agent.reads == [([0], [0])]
    agent.state = "DONE"
    assert transport.connected(OWNER)
    transport.close()


def test_only_a_broken_connection_proves_that_a_failed_read_writes_no_more(agent):
    transport = NixlTransport(PoolMemory(4096, NUM_BLOCKS, BLOCK_BYTES), READER)
    agent.state = "DONE"
    transport.add_peer(ADD)
    assert transport.connected(OWNER)
    agent.state = "PROC"
    first, second = (
        transport.read(Read(1, OWNER, (block,), (block,), (0,))) for block in (0, 1)
    )
    agent.error = ValueError("one of several descriptors failed")
    with pytest.raises(TransferError, match="one of several"):
        transport.test(first)
    assert not transport.cancel(first), "the other descriptors may still land"
    agent.error = OSError("the peer is gone")
    with pytest.raises(TransferError, match="process is gone"):
        transport.test(second)
    assert transport.cancel(second)
    assert transport.cancel(first)
    transport.close()
