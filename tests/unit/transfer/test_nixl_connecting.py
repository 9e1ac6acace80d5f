"""How nixl connects to a peer, on a scripted library: real agents connect at once."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.kv_transfer.interfaces import BlockPiece, PeerRank, PoolMemory
from baton.kv_transfer.transports import nixl
from baton.kv_transfer.transports.lane import TIMED_BYTES, TimedRead, complaint
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.kv_transfer.transports.nixl_address import NixlAddress
from baton.kv_transfer.transports.shm import this_place
from baton.protocol.ids import Epoch
from tests.support.virtual_clock import VirtualClock

OWNER, READER = PeerRank(Epoch("owner")), Epoch("reader")
NUM_BLOCKS, BLOCK_BYTES = 4, 4096
WHOLE = BlockPiece(0, 0, BLOCK_BYTES)


class ScriptedNixl:
    """The part of NIXL that connecting needs. A warm-up ends when `state` says so."""

    def __init__(self) -> None:
        self.state = "PROC"
        self.regions: list[tuple[int, str]] = []  # bytes and kind
        self.rows: list[tuple[list[list[int]], str]] = []  # of prepared lists, and their kind
        self.reads: list[tuple[list[int], list[int]]] = []  # rows of the sink, and of the peer
        self.num_calls = 0  # that get NIXL on
        self.agents: list[str] = []  # as they were added
        self.num_removed = 0

    def register_memory(self, regions: list[tuple[int, int, int, str]], mem_type: str) -> None:
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
        return self.state

    def release(self) -> None: ...


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> ScriptedNixl:
    agent, errors = ScriptedNixl(), SimpleNamespace(all=(), at_start=(), disconnected=OSError)
    monkeypatch.setattr(nixl, "make_agent", lambda *_, **__: (agent, errors))
    return agent


def test_a_pair_that_was_given_up_goes_on_connecting_for_the_next_attempt(
    agent: ScriptedNixl,
) -> None:
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


@pytest.mark.parametrize(("seconds", "num_lines"), [(0.001, 0), (0.05, 1)])
def test_gpus_warm_up_in_gpu_memory_and_time_a_read_that_a_slow_lane_is_told_by(
    agent: ScriptedNixl, seconds: float, num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    block_bytes, num_blocks, clock = 1 << 20, 100, VirtualClock(5.0)
    memory = PoolMemory(1 << 30, num_blocks, block_bytes, "cuda:0", num_spare=1)
    transport = NixlTransport(memory, READER, clock=clock)
    spare = (1 << 30) + num_blocks * block_bytes
    assert agent.regions == [((num_blocks + 1) * block_bytes, "VRAM")], "no memory of the host"
    assert agent.rows == [([[spare, 64, 0]], "VRAM")]
    assert transport.progress_s is not None
    transport.service()
    assert agent.num_calls == 1, "NIXL has no thread here"
    address = NixlAddress(
        OWNER.epoch, "owner-agent", "cuda:1", 1 << 40, num_blocks, block_bytes, b"owner-agent",
        "/".join(this_place()),
    ).encode()  # fmt: skip
    whole = BlockPiece(0, 0, block_bytes)
    transport.add_peer(OWNER, address, num_blocks, block_bytes, whole)
    assert not transport.connected(OWNER)
    assert agent.reads == [([0], [0])]
    agent.state = "DONE"
    num_timed = TIMED_BYTES // block_bytes
    assert not transport.connected(OWNER)
    assert agent.rows[-1] == ([[spare, block_bytes, 0]], "VRAM")
    assert agent.reads[1] == ([0] * num_timed, list(range(num_timed))), "all into the spare block"
    clock.advance(seconds)
    assert transport.connected(OWNER)
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warnings) == num_lines
    assert all("cuda:1 of its peer into cuda:0 at 1.3 GB/s" in line for line in warnings)
    transport.remove_peer(OWNER)
    transport.add_peer(OWNER, address, num_blocks, block_bytes, whole)
    assert transport.connected(OWNER), "the pair was timed when it first connected"
    assert len(agent.reads) == 3
    transport.close()


@pytest.mark.parametrize(
    ("num_bytes", "is_one_host", "gb_per_s", "is_slow"),
    [
        (TIMED_BYTES, True, 9.9, True),
        (TIMED_BYTES, True, 10.1, False),
        (TIMED_BYTES, False, 1.0, False),  # the network may be no faster
        (1 << 20, True, 1.0, False),  # the start of a read takes most of its time
    ],
)
def test_a_lane_is_slow_when_gpus_of_one_host_read_below_ten_gigabytes_a_second(
    num_bytes: int, is_one_host: bool, gb_per_s: float, is_slow: bool
) -> None:
    read = TimedRead("cuda:0", "cuda:1", is_one_host, num_bytes, 0.0)
    said = complaint(read, num_bytes / (1e9 * gb_per_s))
    assert bool(said) == is_slow
    assert not is_slow or "cuda:0 of its peer into cuda:1" in said
