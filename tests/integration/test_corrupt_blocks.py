"""Wrong bytes are a retry where blocks are verified; for wrong tokens see `test_demo_recall`."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind="final")


async def answer(llm: AsyncLLM) -> list[int]:
    async for output in llm.generate(PROMPT, PARAMS):
        last = output
    return last.outputs[0].token_ids


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


def test_blocks_that_are_verified_are_read_again_when_they_came_with_other_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrap_transports(monkeypatch, blank_one_slice())
    cache = {"num_blocks": 64, "enable_prefix_caching": False}
    config = tiny_cluster(
        cache=cache, engine={"max_num_batched_tokens": 16}, transfer={"verify_kv": True}
    )
    ranks: dict[Role, int] = {"prefill": 2}
    nodes = NodeThreads(tmp_path, never_local(config), ranks=ranks)
    answered = nodes.run(answer)
    reads = [read for read in nodes.records("decode-0") if isinstance(read, ReadRecord)]
    # The other reads of that attempt may be cancelled, and nothing else fails.
    found = [read.failure for read in reads if read.failure not in (None, "cancelled")]
    assert found == ["corrupt_blocks"]
    told = [record for record in caplog.records if "with other bytes" in record.getMessage()]
    assert [vars(record)["fields"]["so_far"] for record in told] == [1]
    (tmp_path / "whole").mkdir()
    monkeypatch.undo()
    whole = NodeThreads(tmp_path / "whole", never_local(config), ranks=ranks).run(answer)
    assert answered == whole
