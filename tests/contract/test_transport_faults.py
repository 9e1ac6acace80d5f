"""What agents make of transports that do damage, of blocks that change, and of a missing wheel."""

import os
import select
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from baton.kv_transfer.agent import TransferAgent, make_port
from baton.kv_transfer.agent_turns import AgentLimits
from baton.kv_transfer.host_pool import HostPool
from baton.kv_transfer.interfaces import (
    AddPeer,
    AgentEvent,
    PeerDown,
    PeerUp,
    PoolMemory,
    Read,
    ReadEnded,
)
from baton.kv_transfer.transports import nixl, nixl_binding, shm
from baton.kv_transfer.transports.nixl import NixlAddress, NixlTransport
from baton.kv_transfer.transports.shm import ShmAddress, ShmTransport
from baton.protocol.config import TransferConfig
from baton.protocol.errors import ConfigError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from tests.support.faulty_transport import Faults, FaultyTransport

OWNER, READER = Epoch("owner"), Epoch("reader")
NUM_BLOCKS, BLOCK_BYTES = 16, 4096
NO_FAULTS = Faults()


class Pair:
    """An owner, and a reader whose transport has faults, in this process."""

    def __init__(self, faults: Faults = NO_FAULTS, seed: int = 0) -> None:
        self._stack = ExitStack()
        self.source = HostPool(NUM_BLOCKS, BLOCK_BYTES)
        self.target = HostPool(NUM_BLOCKS, BLOCK_BYTES)
        self.source.buffer[:] = np.random.default_rng(1).bytes(NUM_BLOCKS * BLOCK_BYTES)
        inner = ShmTransport(self.target, READER)
        faulty = FaultyTransport(inner, faults, seed, self.target.buffer, BLOCK_BYTES)
        self.owner = make_port(self.source, OWNER, TransferConfig())
        limits = AgentLimits(BLOCK_BYTES, read_s=0.2, quiet_s=0.2)
        self.reader = TransferAgent([faulty], BLOCK_BYTES, limits)
        for closing in (self.source, self.target, self.owner, self.reader):
            self._stack.callback(closing.close)
        assert self.add(self.owner.address(), OWNER) == PeerUp(OWNER, "shm")

    def add(self, address: RankAddress, peer: Epoch) -> AgentEvent:
        self.reader.send(AddPeer(peer, "shm", address, NUM_BLOCKS, BLOCK_BYTES))
        return self.event()

    def event(self) -> AgentEvent:
        while True:
            assert select.select([self.reader.fileno()], [], [], 10.0)[0]
            for event in self.reader.poll():
                return event

    def read(self) -> ReadEnded:
        """Reads the whole pool."""
        blocks = tuple(range(NUM_BLOCKS))
        self.reader.send(Read(1, OWNER, blocks, blocks, (0,) * NUM_BLOCKS))
        event = self.event()
        assert isinstance(event, ReadEnded)
        return event

    def num_wrong_bytes(self) -> int:
        source, target = (np.frombuffer(p.buffer, np.uint8) for p in (self.source, self.target))
        return int((source != target).sum())

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def pairs() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(pairs: ExitStack, faults: Faults = NO_FAULTS, seed: int = 0) -> Pair:
    pair = Pair(faults, seed)
    pairs.callback(pair.close)
    return pair


def test_without_faults_the_wrapper_changes_nothing(pairs: ExitStack) -> None:
    pair = start(pairs)
    assert pair.read().failure is None
    assert pair.num_wrong_bytes() == 0


def test_late_and_double_reads_are_still_right(pairs: ExitStack) -> None:
    pair = start(pairs, Faults(delay=1.0, duplicate=1.0, stall=0.5, delay_tests=2, stall_tests=3))
    assert pair.read().failure is None
    assert pair.num_wrong_bytes() == 0


def test_a_lost_read_fails_at_its_deadline_and_is_quiet(pairs: ExitStack) -> None:
    end = start(pairs, Faults(lose=1.0)).read()
    assert end.failure is not None
    assert (end.num_bytes, end.quiet) == (0, True)


def test_a_stalled_read_ends_as_not_quiet(pairs: ExitStack) -> None:
    end = start(pairs, Faults(stall=1.0, stall_tests=1 << 40)).read()
    assert end.failure is not None
    assert not end.quiet


@pytest.mark.parametrize("faults", [Faults(refuse=0.5), Faults(fail=0.5)])
def test_one_bad_slice_fails_the_read(pairs: ExitStack, faults: Faults) -> None:
    end = start(pairs, faults).read()
    assert end.failure is not None
    assert end.quiet


def test_a_blank_block_goes_unnoticed_here_so_checks_of_tokens_have_something_to_find(
    pairs: ExitStack,
) -> None:
    pair = start(pairs, Faults(blank=1.0))
    assert pair.read().failure is None
    # Zeros agree with the zeros that were sent; everything else is wrong.
    assert pair.num_wrong_bytes() > NUM_BLOCKS * BLOCK_BYTES // 2


def test_the_same_seed_makes_the_same_faults(pairs: ExitStack) -> None:
    faults = Faults(refuse=0.05, blank=0.5)
    results = [start(pairs, faults, seed).read().num_bytes for seed in (3, 3, 4, 5, 6)]
    assert results[0] == results[1]
    assert len(set(results)) > 1


def test_a_block_that_changes_hands_while_it_is_copied_is_a_failed_read(
    pairs: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = start(pairs)
    copy = shm.copy_blocks

    def copy_slowly(
        target_pool: NDArray[np.void],
        target: NDArray[np.int64],
        source_pool: NDArray[np.void],
        source: NDArray[np.int64],
    ) -> None:
        copy(target_pool, target, source_pool, source)
        pair.source.generations[NUM_BLOCKS - 1] += int(NUM_BLOCKS - 1 in source)

    monkeypatch.setattr(shm, "copy_blocks", copy_slowly)
    failure = pair.read().failure
    assert failure is not None
    assert failure.code == "stale_block"


def test_a_reader_without_the_nonce_gets_no_pool(pairs: ExitStack) -> None:
    pair = start(pairs)
    address = ShmAddress.decode(pair.owner.address().metadata["shm"])
    forged = msgspec.structs.replace(address, nonce=bytes(16), epoch=Epoch("forged"))
    event = pair.add(RankAddress({"shm": forged.encode()}), Epoch("forged"))
    assert isinstance(event, PeerDown)
    assert pair.read().failure is None


def test_a_pool_on_another_host_is_refused(pairs: ExitStack) -> None:
    pair = start(pairs)
    address = ShmAddress.decode(pair.owner.address().metadata["shm"])
    away = msgspec.structs.replace(address, host="elsewhere", epoch=Epoch("away"))
    event = pair.add(RankAddress({"shm": away.encode()}), Epoch("away"))
    assert isinstance(event, PeerDown)
    assert "another host" in event.failure.message


def test_a_missing_wheel_is_an_error_that_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_binding, "WHEELS", ("no_such_wheel_of_nixl",))
    pool = HostPool(1, BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"pip install -e .\.\[nixl\]"):
        make_port(pool, OWNER, TransferConfig(transport="nixl"))
    port = make_port(pool, OWNER, TransferConfig(device="mlx5_0:1"))
    assert list(port.address().metadata) == ["shm"]
    port.close()
    pool.close()


@pytest.mark.parametrize(
    ("device", "given", "found"),
    [("cuda:0", None, "on"), ("cuda:0", "off", "off"), ("cpu", None, None)],
)
def test_ucx_is_told_to_read_within_a_gpu_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, device: str, given: str | None, found: str | None
) -> None:
    monkeypatch.setattr(nixl_binding, "WHEELS", ())  # UCX reads it when it is loaded
    name = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"pip install -e .\.\[nixl\]"):
        NixlTransport(PoolMemory(0, 1, 4096, device), OWNER)
    assert os.environ.get(name) == found


def test_shm_cannot_be_asked_for_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="nixl"):
        make_port(PoolMemory(0, 1, 4096, "cuda:0"), OWNER, TransferConfig(transport="shm"))


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
        OWNER, "owner-agent", "cpu", 4096, NUM_BLOCKS, BLOCK_BYTES, b"owner-agent"
    )
    for _ in range(3):
        transport.add_peer(OWNER, address.encode(), NUM_BLOCKS, BLOCK_BYTES)
        assert not transport.connected(OWNER)
        transport.remove_peer(OWNER)
        transport.service()
    assert (agent.agents, agent.num_removed) == (["owner-agent"], 0)
    agent.state = "DONE"
    transport.add_peer(OWNER, address.encode(), NUM_BLOCKS, BLOCK_BYTES)
    assert transport.connected(OWNER)
    assert agent.agents == ["owner-agent"]
    transport.close()
