"""Measure reads of KV blocks between two processes, on one GPU and between two, by each transport.

This is a section of the GPU benchmark. A child owns a pool, this process reads scattered blocks of
it through a transfer agent, as a decode node does, and compares the bytes. A rate counts the bytes
of the blocks once, by the agent's own stamps.
"""

import random
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import product
from typing import cast

import msgspec
import torch
from torch import Tensor

from baton.kv_transfer.pools import DevicePool, HostPool
from baton.kv_transfer.transports import TRANSPORTS
from baton.protocol.config import TransportChoice
from tools.block_owner import (
    BlockReader,
    Owned,
    block_owner,
    device_pool,
    marks,
    words_of,
)
from tools.gpu.cases import KV_READS, KvRead
from tools.gpu.floors import Work
from tools.gpu.rows import Check, Measured
from tools.gpu.section import Desk
from tools.gpu.timing import timing_of

KINDS = {cast("TransportChoice", kind.name): kind for kind in TRANSPORTS}
BETWEEN_GPUS = tuple(name for name, kind in KINDS.items() if DevicePool in kind.lends)


class TransferPlan(msgspec.Struct, frozen=True):
    device: str = "cuda"
    block_bytes: int = 9 << 18  # of Qwen3-8B, 16 tokens: 2.25 MiB
    reads: tuple[KvRead, ...] = KV_READS
    transports: tuple[TransportChoice, ...] = BETWEEN_GPUS
    rounds: int = 20


def run(desk: Desk, plan: TransferPlan | None = None) -> None:
    """Run the section."""
    plan = plan or TransferPlan()
    for ends, transport in product(pairs(plan.device), plan.transports):
        key = f"lane {lane_of(transport, ends)}"
        if not KINDS[transport].is_installed():
            desk.emit(Check(key, None, f"{transport} is not installed"))
            continue
        desk.check(key, partial(_measure, desk, plan, transport, ends), 20.0)


def pairs(device: str) -> list[tuple[str, str]]:
    """Return the devices of owner and reader: one GPU, and two GPUs both ways if there are two."""
    if device == "cpu":
        return [(device, device)]
    # torch wants the number of a device whose peers it is asked for, also of the only one.
    on_one = [("cuda:0", "cuda:0")]
    if torch.cuda.device_count() < 2:
        return on_one
    return [*on_one, ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")]


def lane_of(transport: str, ends: tuple[str, str]) -> str:
    owner, reader = ends
    if owner == reader:
        return f"{transport}, two processes on one device"
    reads = torch.cuda.can_device_access_peer(torch.device(reader), torch.device(owner))
    return f"{transport}, {owner} to {reader}, {'with' if reads else 'without'} peer access"


def _measure(
    desk: Desk, plan: TransferPlan, transport: TransportChoice, ends: tuple[str, str]
) -> Check:
    """Report a row for each size. Return whether every block arrived unchanged."""
    owner, reader = ends
    if reader != "cpu":
        torch.cuda.set_device(reader)
    num_blocks = 2 * max(read.num_blocks for read in plan.reads)
    pool: HostPool | DevicePool
    if plan.device == "cpu":
        pool = HostPool(num_blocks, plan.block_bytes)
        blocks = torch.from_numpy(words_of(pool))
    else:
        pool, blocks = device_pool(reader, num_blocks, plan.block_bytes)
    owned = Owned(num_blocks, plan.block_bytes, (transport,), owner)
    try:
        with (
            block_owner(owned) as address,
            closing(BlockReader(pool, transport, address, owned)) as block_reader,
        ):
            num_wrong = sum(
                _rounds(
                    desk, plan, block_reader, blocks, read, lane_of(transport, ends)
                )
                for read in plan.reads
            )
    finally:
        del blocks
        pool.close()
    detail = f"{transport}: " + (
        f"{num_wrong} blocks differ" if num_wrong else "all bytes equal"
    )
    return Check(f"lane {lane_of(transport, ends)}", not num_wrong, detail)


def _rounds(
    desk: Desk,
    plan: TransferPlan,
    reader: BlockReader,
    blocks: Tensor,
    read: KvRead,
    lane: str,
) -> int:
    """Report the rate of a size. Return how many blocks arrived with wrong bytes."""
    luck = random.Random(read.num_blocks)
    took = []
    num_wrong = 0
    for number in range(plan.rounds + 2):
        remote = luck.sample(range(len(blocks)), read.num_blocks)
        local = luck.sample(range(len(blocks)), read.num_blocks)
        blocks.zero_()
        if blocks.is_cuda:
            torch.cuda.synchronize(blocks.device)  # the agent copies on another stream
        end = reader.read(remote, local)
        num_wrong += _num_wrong(blocks, remote, local)
        if number >= 2:
            took.append(end.ended_s - end.posted_s)
    payload = read.num_blocks * plan.block_bytes
    desk.emit(
        Measured(read.key(lane), "TB/s", Work(2 * payload), timing_of(took), payload)
    )
    return num_wrong


def _num_wrong(blocks: Tensor, remote: Sequence[int], local: Sequence[int]) -> int:
    wanted = torch.from_numpy(marks(remote)).to(blocks.device)
    found = blocks[torch.tensor(local, device=blocks.device)]
    return int((found != wanted[:, None]).any(1).sum())
