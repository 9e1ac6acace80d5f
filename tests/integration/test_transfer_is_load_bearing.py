"""Wrong bytes give wrong tokens: what decode says comes from the blocks that were moved."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.async_llm import AsyncLLM
from baton.engine.process.records import ReadRecord
from baton.kv_transfer.interfaces import BlockSlice, Transport
from baton.kv_transfer.pools import HostPool
from baton.protocol.messages import Role
from baton.protocol.sampling import SamplingParams
from tests.support.checkpoints import tiny_cluster
from tests.support.node_threads import NodeThreads, never_local, wrap_transports
from tests.support.watched_transport import WatchedTransport

PROMPT = [10 + (i * i + 7 * i) % 241 for i in range(6 * 16 + 5)]
OTHER_PROMPT = [10 + (i * i + 5 * i) % 239 for i in range(40)]
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind="final")
BLOCK_SIZE, HEAD_DIM = 16, 32

Blocks = list[NDArray[np.float32]]  # of a read, each `[heads, layers and K or V, slots, head_dim]`
Hurt = Callable[[Blocks], None]


def nothing(blocks: Blocks) -> None:
    """Do no damage: the control."""


def zero_one(blocks: Blocks) -> None:
    blocks[len(blocks) // 2][:] = 0


def swap_two(blocks: Blocks) -> None:
    """Swap the first and the last, of which fewer slots are valid.

    Two whole blocks of one prompt could be swapped unnoticed: keys carry their positions, so
    attention is a sum over a set.
    """
    first = blocks[0].copy()
    blocks[0][:] = blocks[-1]
    blocks[-1][:] = first


def shift_by_one(blocks: Blocks) -> None:
    """Give every position what belongs to the one before it; the first gets zeros."""
    carried = np.zeros_like(blocks[0][..., 0, :])
    for block in blocks:
        last = block[..., -1, :].copy()
        block[..., 1:, :] = block[..., :-1, :].copy()
        block[..., 0, :] = carried
        carried = last


class BlockOfAnother:
    """Replaces the first block of every later read by that of the first read: another request's."""

    def __init__(self) -> None:
        self._foreign: NDArray[np.float32] | None = None

    def __call__(self, blocks: Blocks) -> None:
        if self._foreign is None:
            self._foreign = blocks[0].copy()
        else:
            blocks[0][:] = self._foreign


def damaging(hurt: Hurt) -> Callable[[Transport, HostPool], Transport]:
    """Make transports that hurt what they bring before decode is told that it is there."""

    def wrap(inner: Transport, pool: HostPool) -> Transport:
        def landed(local: tuple[int, ...], _: BlockSlice) -> None:
            flat = np.frombuffer(pool.buffer, np.float32)
            blocks = flat.reshape(pool.shape.num_blocks, -1, BLOCK_SIZE, HEAD_DIM)
            hurt([blocks[block] for block in local])

        return WatchedTransport(inner, landed=landed)

    return wrap


async def answer(llm: AsyncLLM) -> list[int]:
    """Answer PROMPT after the prompt of another request."""
    for prompt in (OTHER_PROMPT, PROMPT):
        async for output in llm.generate(prompt, PARAMS):
            last = output
    return last.outputs[0].token_ids


def answer_with(hurt: Hurt, folder: Path) -> list[int]:
    config = tiny_cluster(cache={"num_blocks": 64}, engine={"max_num_batched_tokens": 512})
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        wrap_transports(patch, damaging(hurt))
        return NodeThreads(folder, never_local(config)).run(answer)


def blank_one_slice() -> Callable[[Transport, HostPool], Transport]:
    """Blank what the first read that any transport ends has brought of its first block, once."""
    blanked: list[int] = []

    def wrap(inner: Transport, pool: HostPool) -> Transport:
        def landed(local: tuple[int, ...], part: BlockSlice) -> None:
            if not blanked:
                start = local[0] * pool.shape.block_bytes + part.local_offset
                blanked.append(start)
                pool.buffer[start : start + part.num_bytes] = bytes(part.num_bytes)

        return WatchedTransport(inner, landed=landed)

    return wrap


@pytest.mark.parametrize(("verify", "num_ranks"), [(False, 1), (True, 2)])
def test_a_blanked_slice_is_a_retry_where_blocks_are_verified(
    verify: bool,
    num_ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrap_transports(monkeypatch, blank_one_slice())
    cache = {"num_blocks": 64, "enable_prefix_caching": False}
    config = tiny_cluster(
        cache=cache, engine={"max_num_batched_tokens": 16}, transfer={"verify_kv": verify}
    )
    ranks: dict[Role, int] = {"prefill": num_ranks}
    nodes = NodeThreads(tmp_path, never_local(config), ranks=ranks)
    answered = nodes.run(answer)
    reads = [read for read in nodes.records("decode-0") if isinstance(read, ReadRecord)]
    # The other reads of that attempt may be cancelled, and nothing else fails.
    found = [read.failure for read in reads if read.failure not in (None, "cancelled")]
    assert found == (["corrupt_blocks"] if verify else [])
    told = [record for record in caplog.records if "with other bytes" in record.getMessage()]
    assert [vars(record)["fields"]["so_far"] for record in told] == ([1] if verify else [])
    if verify:
        (tmp_path / "whole").mkdir()
        whole = NodeThreads(tmp_path / "whole", never_local(config), ranks=ranks)
        assert answered == whole.run(answer)


def test_damaged_blocks_change_the_answer(tmp_path: Path) -> None:
    whole = answer_with(nothing, tmp_path / "whole")
    assert answer_with(nothing, tmp_path / "again") == whole
    for hurt in (zero_one, swap_two, shift_by_one, BlockOfAnother()):
        name = getattr(hurt, "__name__", "another")
        assert answer_with(hurt, tmp_path / name) != whole, name
