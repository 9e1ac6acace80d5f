"""The ways in which `tools.transfer` reads blocks: shm and nixl as in nodes, memcpy, raw NIXL.

Each copies blocks `remote` of the owner's pool into blocks `local` of its own and returns when the
bytes have arrived. memcpy is the floor: as many bytes in one piece within this process. Nothing
here measures a time.
"""

import ctypes
import secrets
import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.agent import TransferAgent, make_port
from baton.kv_transfer.interfaces import (
    AddPeer,
    AgentEvent,
    BlockPiece,
    PeerRank,
    PeerUp,
    Read,
    ReadEnded,
    SumBlocks,
)
from baton.kv_transfer.pools import HostPool, PoolShape
from baton.kv_transfer.transports.addresses import NixlAddress
from baton.kv_transfer.transports.nixl_binding import make_agent
from baton.protocol.config import TransferConfig, TransportChoice
from baton.protocol.errors import NodeError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.clock import monotonic

OWNER, READER = Epoch("bench-owner"), Epoch("bench-reader")
VERIFYING_READER, SUMMING = Epoch("bench-verifying-reader"), Epoch("bench-summing")
MEMCPY, RAW_NIXL, SUMS = "memcpy", "raw_nixl", "sums"
BRINGS_NOTHING = (MEMCPY, SUMS)  # of the owner's bytes
READ_TIMEOUT_S = 60.0

Ids = NDArray[np.int32]


class Reader(Protocol):
    """One way to read blocks."""

    def __call__(self, remote: Ids, local: Ids) -> None: ...
    def close(self) -> None: ...


@contextmanager
def readers(
    pool: HostPool,
    owner: Mapping[str, bytes],
    transports: Sequence[TransportChoice],
    verify: bool = False,
) -> Iterator[dict[str, Reader]]:
    """Return memcpy, one reader per transport of the owner, and raw NIXL next to nixl.

    With `verify`, also each transport with checksums, and the sums alone.
    """
    found: dict[str, Reader] = {}
    try:
        found[MEMCPY] = Memcpy(pool)
        for name in transports:
            address = RankAddress({name: owner[name]})
            plain = found[name] = PortReader(pool, name, address)
            if verify:
                sums = plain.sums()
                found[f"{name}_verified"] = PortReader(pool, name, address, sums)
        if verify:
            found[SUMS] = Sums(pool, transports[0])
        if "nixl" in found:
            found[RAW_NIXL] = RawNixl(pool, NixlAddress.decode(owner["nixl"]))
        yield found
    finally:
        for reader in found.values():
            reader.close()


class PortReader:
    """One transport through its agent, as a node uses it.

    With the `sums` of the owner's blocks it checks what it reads, as with `transfer.verify_kv`.
    """

    def __init__(
        self,
        pool: HostPool,
        name: TransportChoice,
        owner: RankAddress,
        sums: tuple[int, ...] = (),
    ) -> None:
        self._name, self._pool, self._sums = name, pool, sums
        config = TransferConfig(transport=name, verify_kv=bool(sums))
        epoch = VERIFYING_READER if sums else READER
        self._port: TransferAgent = make_port(pool, epoch, config)
        shape = pool.shape
        whole = BlockPiece(0, 0, shape.block_bytes)
        self._port.send(
            AddPeer(PeerRank(OWNER), name, owner, shape.num_blocks, shape.block_bytes, whole)
        )
        self._generations = (0,) * shape.num_blocks
        event = self._event()
        if not isinstance(event, PeerUp):
            self._port.close()
            raise NodeError(f"{name} does not connect: {event}")

    def __call__(self, remote: Ids, local: Ids) -> None:
        ids = tuple(remote.tolist()), tuple(local.tolist())
        sums = tuple(self._sums[block] for block in ids[0]) if self._sums else ()
        self._port.send(Read(0, PeerRank(OWNER), *ids, self._generations[: len(remote)], sums))
        event = self._event()
        if not isinstance(event, ReadEnded) or event.failure is not None:
            raise NodeError(f"a read over {self._name} failed: {event}")

    def sums(self) -> tuple[int, ...]:
        """Return the checksums of all blocks of the owner."""
        shape = self._pool.shape
        everything = np.arange(shape.num_blocks, dtype=np.int32)
        self(everything, everything)
        return self._pool.checksums(range(shape.num_blocks), 0, shape.block_bytes)

    def _event(self) -> AgentEvent:
        return event_of(self._port, self._name)

    def close(self) -> None:
        self._port.close()


class Sums:
    """The checksums that prefill makes of the blocks before it announces them."""

    def __init__(self, pool: HostPool, name: TransportChoice) -> None:
        self._block_bytes = pool.shape.block_bytes
        self._port = make_port(pool, SUMMING, TransferConfig(transport=name, verify_kv=True))

    def __call__(self, remote: Ids, local: Ids) -> None:
        self._port.send(SumBlocks(0, tuple(local.tolist()), self._block_bytes, 1))
        event_of(self._port, SUMS)

    def close(self) -> None:
        self._port.close()


def event_of(port: TransferAgent, name: str) -> AgentEvent:
    """Return the next event of an agent."""
    deadline_s = monotonic() + READ_TIMEOUT_S
    while not (events := port.poll()):
        if monotonic() > deadline_s:
            raise NodeError(f"{name} did not answer within {READ_TIMEOUT_S:g} s")
        select.select([port.fileno()], [], [], 1.0)
    return events[0]


class Memcpy:
    """The copy of as many bytes in one piece, between two pools of this process.

    Both sides are pools, because the pages of a memfd are small and those of an array are huge.
    """

    def __init__(self, pool: HostPool) -> None:
        self._shape = pool.shape
        self._target = pool.address
        self._pool = HostPool(pool.shape.num_blocks, pool.shape.block_bytes)
        self._source = self._pool.address

    def __call__(self, remote: Ids, local: Ids) -> None:
        count, block_bytes = len(remote), self._shape.block_bytes
        first, last = (
            min(int(ids[0]), self._shape.num_blocks - count) * block_bytes
            for ids in (remote, local)
        )
        ctypes.memmove(self._target + last, self._source + first, count * block_bytes)

    def close(self) -> None:
        self._pool.close()


class RawNixl:
    """The read of the same blocks by NIXL alone: one request and a loop that polls it."""

    def __init__(self, pool: HostPool, owner: NixlAddress) -> None:
        self._agent, _ = make_agent(f"bench-raw-{secrets.token_hex(4)}", "")
        self._agent.register_memory([(pool.address, pool.shape.pool_bytes, 0, "")], "DRAM")
        name = self._agent.add_remote_agent(owner.metadata).decode()
        shape = PoolShape(owner.num_blocks, owner.block_bytes)
        self._mine, self._theirs = (
            self._agent.prep_xfer_dlist(agent, _descriptors(base, shape), "DRAM")
            for agent, base in (("", pool.address), (name, owner.pool_address))
        )

    def __call__(self, remote: Ids, local: Ids) -> None:
        handle = self._agent.make_prepped_xfer("READ", self._mine, local, self._theirs, remote)
        deadline_s = monotonic() + READ_TIMEOUT_S
        state = self._agent.transfer(handle)
        while state == "PROC" and monotonic() < deadline_s:
            state = self._agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise NodeError(f"a read over NIXL alone failed: {state}")

    def close(self) -> None:
        self._mine.release()
        self._theirs.release()


def _descriptors(base: int, shape: PoolShape) -> NDArray[np.uint64]:
    """Return (address, bytes, device) of each block."""
    offsets = np.arange(shape.num_blocks, dtype=np.uint64) * np.uint64(shape.block_bytes)
    rows = np.zeros((shape.num_blocks, 3), np.uint64)
    rows[:, 0], rows[:, 1] = offsets + np.uint64(base), shape.block_bytes
    return rows
