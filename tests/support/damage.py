"""Damage to what a decode node has received, done before it is told that the bytes are there.

`damaged(hurt)` makes executors whose transfer port calls `hurt(blocks, layout)` with the landed
blocks of each read. It proves that the transfer is load-bearing: wrong bytes, wrong tokens.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baton.engine.executor import ExecutorInfo, Progress
from baton.engine.local_executor import InProcessExecutor
from baton.engine.model_config import read_decoder_config
from baton.engine.node import MakeExecutor
from baton.kv_transfer.host_pool import HostPool
from baton.kv_transfer.interfaces import AgentCommand, AgentEvent, Read, ReadEnded, TransferPort
from baton.protocol.config import ClusterConfig
from baton.protocol.ids import Epoch

# A pool as fp32 `[num_blocks, kv_heads, num_layers, 2, block_size, head_dim]`, or a block of it.
Blocks = NDArray[np.float32]
Hurt = Callable[[list[Blocks]], None]


class DamagingPort:
    """A port that hurts the landed blocks of every read."""

    def __init__(self, port: TransferPort, pool: Blocks, hurt: Hurt) -> None:
        self._port, self._pool, self._hurt = port, pool, hurt
        self._local: dict[int, tuple[int, ...]] = {}

    def send(self, command: AgentCommand) -> None:
        if isinstance(command, Read):
            self._local[command.ticket] = command.local
        self._port.send(command)

    def poll(self) -> list[AgentEvent]:
        events = self._port.poll()
        for event in events:
            if isinstance(event, ReadEnded):
                self._hurt([self._pool[block] for block in self._local.pop(event.ticket)])
        return events

    def fileno(self) -> int:
        return self._port.fileno()


class DamagedExecutor(InProcessExecutor):
    def __init__(self, config: ClusterConfig, epoch: Epoch, hurt: Hurt) -> None:
        super().__init__(config, epoch)
        self._hurt = hurt
        self._damaging: list[TransferPort] = []

    def start(self, progress: Progress) -> ExecutorInfo:
        info = super().start(progress)
        assert self._rank is not None
        assert isinstance(self._rank.pool, HostPool)
        config = read_decoder_config(Path(self._config.model.path))
        flat = np.frombuffer(self._rank.pool.buffer, np.float32)
        pool = flat.reshape(
            info.num_blocks, config.num_kv_heads, config.num_layers, 2,
            info.layout.block_size, config.head_dim,
        )  # fmt: skip
        self._damaging = [DamagingPort(port, pool, self._hurt) for port in super().ports]
        return info

    @property
    def ports(self) -> Sequence[TransferPort]:
        return self._damaging


def damaged(hurt: Hurt) -> MakeExecutor:
    return lambda config, epoch: DamagedExecutor(config, epoch, hurt)


def nothing(blocks: list[Blocks]) -> None:
    """The control: the same road without damage."""


def zero_one(blocks: list[Blocks]) -> None:
    blocks[len(blocks) // 2][:] = 0


def swap_two(blocks: list[Blocks]) -> None:
    """The first and the last, of which fewer slots are valid.

    Two whole blocks of one prompt could be swapped unnoticed: keys carry their positions, so
    attention is a sum over a set.
    """
    first = blocks[0].copy()
    blocks[0][:] = blocks[-1]
    blocks[-1][:] = first


def shift_by_one(blocks: list[Blocks]) -> None:
    """Every position holds what belongs to the one before it; the first holds nothing."""
    carried = np.zeros_like(blocks[0][..., 0, :])
    for block in blocks:
        last = block[..., -1, :].copy()
        block[..., 1:, :] = block[..., :-1, :].copy()
        block[..., 0, :] = carried
        carried = last


class BlockOfAnother:
    """The first block of every later read is the first one's: another request's."""

    def __init__(self) -> None:
        self._foreign: Blocks | None = None

    def __call__(self, blocks: list[Blocks]) -> None:
        if self._foreign is None:
            self._foreign = blocks[0].copy()
        else:
            blocks[0][:] = self._foreign
